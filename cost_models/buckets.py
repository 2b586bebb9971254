"""Who holds which weights with whom: the buckets in which gradients are summed.

All cuts of a tensor's rows are refined into atomic intervals; each has one set of holders, and intervals with the
same holders share a bucket.  Work is done per pipeline and stage, never per replica.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from specs.layout import Interval, refine
from specs.model import Embedding, Head, Module
from specs.plan import ModulePlacement, Plan
from specs.tensors import TensorSpec, local_rows, parameter_name, sharding_level, tensors_of

# The executor closes a bucket once it has this many elements; a test holds the two together.
BUCKET_ELEMENTS = 8 * 2**20

# (pipeline, stage, rank in stage): a holder in every replica of that pipeline.
Member = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements that exactly these members hold; `decay` keeps vectors apart.

    `zero` is the level of the tensors: that of the placement, but vectors are never gathered.  Of level 3:
    `num_modules` have such elements, each gathered alone, and `gathered_again` in backward.
    """

    members: tuple[Member, ...]
    num_elements: int
    zero: int
    decay: bool
    gathered_again: bool = False
    num_modules: int = 0


@dataclass(frozen=True, slots=True)
class Holdings:
    """All buckets of a plan.  `copied[member]` elements lie in several buckets' pieces, so that the parameter is a
    second copy beside the buckets' flat weights.
    """

    buckets: tuple[Bucket, ...]
    copied: dict[Member, int]


class _Key(NamedTuple):
    """What the elements of one bucket have in common."""

    members: tuple[Member, ...]
    zero: int
    decay: bool
    gathered_again: bool


@dataclass(frozen=True)
class _Place:
    """One module's place in one pipeline."""

    pipeline: int
    stage: int
    module: Module
    placement: ModulePlacement

    @cached_property
    def units(self) -> tuple[Interval, ...]:
        """Of every rank of the stage."""
        return tuple(self.placement.units_of(rank, self.module) for rank in range(sum(self.placement.blocks)))

    @cached_property
    def members(self) -> list[Member]:
        return [(self.pipeline, self.stage, rank) for rank in range(sum(self.placement.blocks))]

    def key(self) -> tuple[object, ...]:
        placement = self.placement
        return (self.pipeline, self.stage, id(self.module), placement.blocks, placement.cuts, placement.zero)


def holdings(plan: Plan) -> Holdings:
    """Buckets with their sizes, in no particular order."""
    chain = dict(plan.model.modules())
    places: defaultdict[str, list[_Place]] = defaultdict(list)
    for number in sorted({replica.pipeline for replica in plan.replicas}):
        for index, stage in enumerate(plan.pipelines[number].stages):
            for placement in stage.modules:
                places[placement.module].append(_Place(number, index, chain[placement.module], placement))
    tensors: defaultdict[str, list[tuple[TensorSpec, _Place]]] = defaultdict(list)
    sizes: defaultdict[_Key, int] = defaultdict(int)
    num_modules: defaultdict[_Key, int] = defaultdict(int)
    copied: defaultdict[Member, int] = defaultdict(int)
    alike: defaultdict[tuple[object, ...], int] = defaultdict(int)
    example: dict[tuple[object, ...], list[_Place]] = {}
    shared = {"embedding", "head"}
    for name, where in places.items():
        if name in shared:
            for tensor in tensors_of(chain[name]):
                tensors[parameter_name(name, chain[name], tensor)] += [(tensor, place) for place in where]
        else:
            key: tuple[object, ...] = tuple(place.key() for place in where)
            alike[key] += 1
            example[key] = where
    for holders in tensors.values():
        for touched in _add(holders, 1, sizes, copied):
            num_modules[touched] += 1
    for key, count in alike.items():
        of_module = set()
        for tensor in tensors_of(example[key][0].module):
            of_module |= _add([(tensor, place) for place in example[key]], count, sizes, copied)
        for touched in of_module:
            num_modules[touched] += count
    return Holdings(
        tuple(
            Bucket(key.members, size, key.zero, key.decay, key.gathered_again, num_modules[key])
            for key, size in sizes.items()
        ),
        dict(copied),
    )


class _Holder(NamedTuple):
    """A stage that holds a tensor of a module: the units of each of its ranks."""

    tensor: TensorSpec
    module: Module
    units: tuple[Interval, ...]


class _Parts(NamedTuple):
    """A tensor's atomic intervals, each with the (holder, rank in its stage) that have it and its elements; and the
    rows of those that have several of them as one.
    """

    shared: tuple[tuple[tuple[tuple[int, int], ...], int], ...]
    copied: tuple[tuple[int, int, Interval], ...]


def _add(
    holders: Sequence[tuple[TensorSpec, _Place]],
    count: int,
    sizes: defaultdict[_Key, int],
    copied: defaultdict[Member, int],
) -> set[_Key]:
    """Count `count` equal tensors with their holders; returns the buckets that they lie in."""
    tensor, place = holders[0]
    zero = sharding_level(tensor, place.placement.zero)
    again = zero == 3 and not isinstance(place.module, Embedding | Head)
    members = [where.members for _, where in holders]
    twice = len({(where.pipeline, where.stage) for _, where in holders}) < len(holders)  # a tied weight in one stage
    parts = _parts(tuple(_Holder(spec, where.module, where.units) for spec, where in holders))
    touched: set[_Key] = set()
    for ranks, num_elements in parts.shared:
        of_part = [members[at][rank] for at, rank in ranks]
        key = _Key(tuple(dict.fromkeys(of_part) if twice else of_part), zero, tensor.decay, again)
        sizes[key] += count * num_elements
        touched.add(key)
    if zero < 3:
        width = max(tensor.cols, 1)
        for member, rows in dict.fromkeys((members[at][rank], rows) for at, rank, rows in parts.copied):
            copied[member] += count * rows.size * width
    return touched


@lru_cache(maxsize=4096)
def _parts(holders: tuple[_Holder, ...]) -> _Parts:
    """The same on all stages, and in all plans, that cut a module alike."""
    width = max(holders[0].tensor.cols, 1)
    held = [
        (at, rank, local_rows(module, tensor, units))
        for at, (tensor, module, of_ranks) in enumerate(holders)
        for rank, units in enumerate(of_ranks)
    ]
    atoms = refine({rows for _, _, rows in held})
    known = set(atoms)
    return _Parts(
        tuple(
            (
                tuple((at, rank) for at, rank, rows in held if rows.start <= atom.start and atom.stop <= rows.stop),
                atom.size * width,
            )
            for atom in atoms
        ),
        tuple((at, rank, rows) for at, rank, rows in held if rows not in known),
    )
