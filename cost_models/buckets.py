"""Who holds which weights with whom: the buckets in which gradients are summed.

All cuts of a tensor's rows are refined into atomic intervals; each has one set of holders, and intervals with the
same holders share a bucket.  Work is done per pipeline and stage, never per replica.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from specs.layout import Cuts, Interval, refine
from specs.model import Embedding, Head, Module
from specs.plan import ModulePlacement, Plan, Zero
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
        """Equal for modules that lie alike, on whichever stages."""
        placement = self.placement
        return (id(self.module), placement.blocks, placement.cuts, placement.zero)


# A stage of a pipeline.
_Where = tuple[int, int]


def holdings(plan: Plan) -> Holdings:
    """Buckets with their sizes, in no particular order."""
    chain = dict(plan.model.modules())
    places: defaultdict[str, list[_Place]] = defaultdict(list)
    for number in sorted({replica.pipeline for replica in plan.replicas}):
        for index, stage in enumerate(plan.pipelines[number].stages):
            for placement in stage.modules:
                places[placement.module].append(_Place(number, index, chain[placement.module], placement))
    tensors: defaultdict[str, list[tuple[TensorSpec, _Place]]] = defaultdict(list)
    alike: defaultdict[tuple[_Where, ...], dict[tuple[object, ...], _Alike]] = defaultdict(dict)
    for name, own in places.items():
        if name in ("embedding", "head"):  # which may share their weights
            for tensor in tensors_of(chain[name]):
                tensors[parameter_name(name, chain[name], tensor)] += [(tensor, place) for place in own]
            continue
        of_stages = alike[tuple((place.pipeline, place.stage) for place in own)]
        key = tuple(place.key() for place in own)
        known = of_stages.get(key)
        of_stages[key] = _Alike(own, known.number + 1 if known else 1)
    found = _Found()
    for holders in tensors.values():
        for touched in _add(holders, found):
            found.num_modules[touched] += 1
    # Stages that hold the same differ in their numbers alone.
    once: dict[tuple[object, ...], _Found] = {}
    for stages, modules in alike.items():
        content = tuple((key, own.number) for key, own in modules.items())
        if content not in once:
            once[content] = _of_stages(modules.values())
        found.take(once[content], stages)
    return Holdings(
        tuple(
            Bucket(key.members, size, key.zero, key.decay, key.gathered_again, found.num_modules[key])
            for key, size in found.sizes.items()
        ),
        dict(found.copied),
    )


class _Alike(NamedTuple):
    """Equal modules, equally placed on the same stages: one's places, and how many there are."""

    places: list[_Place]
    number: int


class _Found:
    """Elements and modules of buckets, and elements that are copied."""

    def __init__(self) -> None:
        self.sizes: defaultdict[_Key, int] = defaultdict(int)
        self.num_modules: defaultdict[_Key, int] = defaultdict(int)
        self.copied: defaultdict[Member, int] = defaultdict(int)

    def take(self, other: _Found, stages: tuple[_Where, ...]) -> None:
        """What `_of_stages` found, as that of these stages."""
        for key, size in other.sizes.items():
            own = key._replace(members=tuple((*stages[at], rank) for at, _, rank in key.members))
            self.sizes[own] += size
            self.num_modules[own] += other.num_modules[key]
        for (at, _, rank), size in other.copied.items():
            member = (*stages[at], rank)
            self.copied[member] += size


def _of_stages(modules: Iterable[_Alike]) -> _Found:
    """Modules that lie on the same stages, which stand for pipelines 0, 1 and so on here."""
    found = _Found()
    for places, number in modules:
        one = _of_module(tuple((p.module, p.placement.blocks, p.placement.cuts, p.placement.zero) for p in places))
        for key, size in one.sizes.items():
            found.sizes[key] += number * size
            found.num_modules[key] += number
        for member, size in one.copied.items():
            found.copied[member] += number * size
    return found


@lru_cache(maxsize=4096)
def _of_module(where: tuple[tuple[Module, tuple[int, ...], tuple[Cuts, ...] | None, Zero], ...]) -> _Found:
    """One module that lies so on a stage of each pipeline: the same on all stages and in all plans."""
    places = [
        _Place(at, 0, module, ModulePlacement(module="", blocks=blocks, cuts=cuts, zero=zero))
        for at, (module, blocks, cuts, zero) in enumerate(where)
    ]
    found = _Found()
    for tensor in tensors_of(where[0][0]):
        _add([(tensor, place) for place in places], found)
    return found


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


def _add(holders: Sequence[tuple[TensorSpec, _Place]], found: _Found) -> set[_Key]:
    """Count a tensor with its holders; returns the buckets that it lies in."""
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
        found.sizes[key] += num_elements
        touched.add(key)
    if zero < 3:
        width = max(tensor.cols, 1)
        for member, rows in dict.fromkeys((members[at][rank], rows) for at, rank, rows in parts.copied):
            found.copied[member] += rows.size * width
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
