"""Who holds which weights with whom: the buckets in which gradients are summed.

All cuts of a tensor's rows are refined into atomic intervals; each has one set of holders, and intervals with the
same holders share a bucket.  Work is done per pipeline and stage, never per replica.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from specs.layout import Interval, refine
from specs.model import Module
from specs.plan import ModulePlacement, Plan
from specs.tensors import TensorSpec, local_rows, parameter_name, tensors_of

# The executor closes a bucket once it has this many elements; a test holds the two together.
BUCKET_ELEMENTS = 8 * 2**20

# (pipeline, stage, rank in stage): a holder in every replica of that pipeline.
Member = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements that exactly these members hold; `zero` as in the placement, `decay` keeps vectors apart."""

    members: tuple[Member, ...]
    num_elements: int
    zero: int
    decay: bool


@dataclass(frozen=True, slots=True)
class Holdings:
    """All buckets of a plan.  `copied[member]` elements lie in several buckets' pieces, so that the parameter is a
    second copy beside the buckets' flat weights.
    """

    buckets: tuple[Bucket, ...]
    copied: dict[Member, int]


@dataclass(frozen=True, slots=True)
class _Place:
    """One module's place in one pipeline."""

    pipeline: int
    stage: int
    module: Module
    placement: ModulePlacement

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
    sizes: defaultdict[tuple[tuple[Member, ...], int, bool], int] = defaultdict(int)
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
        _add(holders, 1, sizes, copied)
    for key, count in alike.items():
        for tensor in tensors_of(example[key][0].module):
            _add([(tensor, place) for place in example[key]], count, sizes, copied)
    return Holdings(
        tuple(Bucket(members, size, zero, decay) for (members, zero, decay), size in sizes.items()), dict(copied)
    )


def _add(
    holders: Sequence[tuple[TensorSpec, _Place]],
    count: int,
    sizes: defaultdict[tuple[tuple[Member, ...], int, bool], int],
    copied: defaultdict[Member, int],
) -> None:
    """Count `count` equal tensors with their holders."""
    tensor, zero = holders[0][0], holders[0][1].placement.zero
    width = max(tensor.cols, 1)
    held: dict[tuple[Member, Interval], None] = {}
    for spec, place in holders:
        for rank in range(sum(place.placement.blocks)):
            rows = local_rows(place.module, spec, place.placement.units_of(rank, place.module))
            held[(place.pipeline, place.stage, rank), rows] = None
    atoms = refine({rows for _, rows in held})
    for atom in atoms:
        inside = (member for member, rows in held if rows.start <= atom.start and atom.stop <= rows.stop)
        sizes[tuple(dict.fromkeys(inside)), zero, tensor.decay] += count * atom.size * width
    known = set(atoms)
    for member, rows in held:
        if rows not in known:
            copied[member] += count * rows.size * width
