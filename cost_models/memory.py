"""Bytes per rank: weights, gradients, optimizer, activations in flight, working memory, buffers.

The formulas describe this project's executor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from cost_models.activations import ACTIVATION_BYTES, activation_bytes, deferred_bytes
from cost_models.buckets import BUCKET_ELEMENTS, Holdings, Member
from cost_models.context import mask_elements
from cost_models.flops import largest_units
from cost_models.share import Share
from cost_models.working import working_bytes
from specs.cluster import Precision
from specs.layout import Cuts, Interval, block_of, block_starts, kv_groups_of
from specs.model import Attention, Mamba2, Module
from specs.plan import MemoryTerms, ModulePlacement, Plan, Recompute, Zero
from specs.schedule import Held, most_held, repeats
from specs.tensors import local_rows, sharding_level, tensors_of

WEIGHT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp8": 2}
GRADIENT_BYTES = 4  # summed over micro-batches in fp32
MOMENT_BYTES = 8  # AdamW's two moments in fp32
MASTER_BYTES = 4  # fp32 copy of weights that are kept in a shorter type


@dataclass(frozen=True, slots=True)
class StaticBytes:
    """What a rank holds of one module all the time."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def _state_bytes(precision: Precision) -> int:
    """Optimizer bytes per element that a rank owns."""
    return MOMENT_BYTES + (MASTER_BYTES if WEIGHT_BYTES[precision] < MASTER_BYTES else 0)


@lru_cache(maxsize=65536)
def static_bytes(
    module: Module,
    *,
    degree: int,
    num_copies: int,
    precision: Precision,
    zero: int,
    units: Interval | None = None,
    others: tuple[tuple[int, int], ...] = (),
) -> StaticBytes:
    """One module that lies in `num_copies` equal blocks of `degree` evenly cut ranks: the form the search needs.

    `units`: the rank's own, None for the largest share.  `others`: (size, number) of further blocks that hold copies.

    # weights w N, gradients 4 N, optimizer (8 + 4 [w < 4]) N / n;  gradients 4 N / n from zero 2 on, and with zero 3
    # weights w N / n (vectors w N)
    #   N local elements, w bytes of the compute type; n owners of each interval, 1 without sharding, else the copies,
    #   times the ranks of a block for what all of them hold (norms) or share (KV heads)
    """
    own = largest_units(module, degree) if units is None else units
    copies = ((degree, num_copies), *others)
    held = 0
    owned = kept = 0.0  # elements whose state is kept here, and of which weights are
    for tensor in tensors_of(module):
        width = max(tensor.cols, 1)
        rows = local_rows(module, tensor, own)
        size = rows.size * width
        held += size
        if not zero:
            part = float(size)
        elif tensor.cut == "whole":
            part = size / sum(number * ranks for ranks, number in copies)
        elif tensor.cut == "kv":
            assert isinstance(module, Attention | Mamba2)
            groups = kv_groups_of(own, module.num_heads, module.num_kv_heads)
            part = sum(
                tensor.rows_per_unit
                * width
                / sum(number * _kv_holders(module, group, ranks) for ranks, number in copies)
                for group in range(groups.start, groups.stop)
            )
        else:
            part = size / sum(number for _, number in copies)
        owned += part
        kept += part if sharding_level(tensor, zero) == 3 else size
    return StaticBytes(
        round(kept * WEIGHT_BYTES[precision]),
        round((owned if zero >= 2 else held) * GRADIENT_BYTES),
        round(owned * _state_bytes(precision)),
    )


def _kv_holders(module: Attention | Mamba2, group: int, degree: int) -> int:
    """Ranks of an evenly cut block whose query heads read a KV head."""
    per_group = module.num_heads // module.num_kv_heads
    first, last = group * per_group, (group + 1) * per_group - 1
    # rank of head h in a balanced cut: the largest i with i * heads // degree <= h
    return ((last + 1) * degree - 1) // module.num_heads - ((first + 1) * degree - 1) // module.num_heads + 1


def matrix_elements(module: Module, units: Interval) -> list[int]:
    """Elements of each matrix of a module on one rank."""
    return [local_rows(module, tensor, units).size * tensor.cols for tensor in tensors_of(module) if tensor.cols]


class _OnRank(NamedTuple):
    """Bytes of one module on one rank: per micro-batch in flight, of those what waits for weight gradients too, at
    work; elements of its largest matrix and of all of them.
    """

    kept: int
    deferred: int
    working: int
    largest: int
    matrices: int


@lru_cache(maxsize=65536)
def _on_rank(module: Module, share: Share, precision: Precision, recompute: Recompute) -> _OnRank:
    matrices = matrix_elements(module, share.units)
    return _OnRank(
        activation_bytes(module, share, precision, recompute),
        deferred_bytes(module, share, precision, recompute),
        working_bytes(module, share, precision, recompute),
        max(matrices, default=0),
        sum(matrices),
    )


class _Parts(NamedTuple):
    """What all modules of a stage take on one rank: bytes kept, waiting and at work by virtual stage, and in masks;
    elements of the largest bucket, and of what is gathered around a use.
    """

    kept: tuple[int, ...]
    deferred: tuple[int, ...]
    working: tuple[int, ...]
    masks: int
    bucket: int
    gathered: int


def sharding_bytes(scattered: int, bucket: int, gathered: int, precision: Precision) -> int:
    """Buffers during the passes of what is scattered after every micro-batch and gathered around every use.

    # 4 min(N, 3 B) + 2 w M
    #   N elements of level 2 and 3, B of the largest bucket: one fills while two are summed;  M matrices of the largest
    #   module of level 3: in use, and those gathered meanwhile;  w bytes of a weight
    """
    return GRADIENT_BYTES * min(scattered, 3 * bucket) + 2 * WEIGHT_BYTES[precision] * gathered


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Equal modules, equally placed, of one virtual stage."""

    module: Module
    placement: ModulePlacement
    count: int

    def unnamed(self) -> ModuleGroup:
        """Equal for such groups, and in all plans."""
        placed = self.placement
        return replace(self, placement=_unnamed(placed.blocks, placed.cuts, placed.recompute, placed.zero))

    def key(self) -> tuple[object, ...]:
        """Equal for groups that differ in the names of their modules alone, in one plan."""
        placed = self.placement
        return (id(self.module), placed.blocks, placed.cuts, placed.recompute, placed.zero, self.count)


@lru_cache(maxsize=4096)
def _unnamed(
    blocks: tuple[int, ...], cuts: tuple[Cuts, ...] | None, recompute: Recompute, zero: Zero
) -> ModulePlacement:
    return ModulePlacement(module="", blocks=blocks, cuts=cuts, recompute=recompute, zero=zero)


def module_groups(run: Iterable[ModulePlacement], chain: Mapping[str, Module]) -> list[ModuleGroup]:
    """A virtual stage's modules with equal ones counted once, in order of first appearance."""
    groups: dict[tuple[object, ...], ModuleGroup] = {}
    for placement in run:
        module = chain[placement.module]
        key = (id(module), placement.blocks, placement.cuts, placement.recompute, placement.zero)
        known = groups.get(key)
        groups[key] = ModuleGroup(module, placement, known.count + 1 if known else 1)
    return list(groups.values())


def share_of(
    placement: ModulePlacement, module: Module, rank: int, chunk_cuts: Cuts, seq_len: int, context: int
) -> Share:
    """A stage's rank seen from one of its modules; `context`: the pipeline's degree of context parallelism."""
    block, _ = block_of(placement.blocks, rank)
    start, stop = block_starts(placement.blocks)[block : block + 2]
    return Share(
        degree=stop - start,
        chunk_tokens=chunk_cuts[rank + 1] - chunk_cuts[rank],
        block_tokens=chunk_cuts[stop] - chunk_cuts[start],
        units=placement.units_of(rank, module),
        seq_len=seq_len,
        context=context,
        first_token=chunk_cuts[start] % seq_len,
    )


@lru_cache(maxsize=4096)
def _parts_of(
    runs: tuple[tuple[ModuleGroup, ...], ...],
    cuts: Cuts,
    context: int,
    precision: Precision,
    seq_len: int,
    on_gpu: bool,
) -> tuple[_Parts, ...]:
    """Of every rank of a stage, by its virtual stages' modules (unnamed): the same in all plans."""
    return tuple(_parts_of_rank(rank, runs, cuts, context, precision, seq_len, on_gpu) for rank in range(len(cuts) - 1))


def _parts_of_rank(
    rank: int,
    runs: tuple[tuple[ModuleGroup, ...], ...],
    cuts: Cuts,
    context: int,
    precision: Precision,
    seq_len: int,
    on_gpu: bool,
) -> _Parts:
    masks: dict[tuple[int | None, bool], int] = {}
    kept, deferred, working = ([0] * len(runs) for _ in range(3))
    bucket, gathered = BUCKET_ELEMENTS, 0
    for virtual, groups in enumerate(runs):
        for group in groups:
            share = share_of(group.placement, group.module, rank, cuts, seq_len, context)
            own = _on_rank(group.module, share, precision, group.placement.recompute)
            kept[virtual] += group.count * own.kept
            deferred[virtual] += group.count * own.deferred
            working[virtual] = max(working[virtual], own.working)
            if isinstance(group.module, Attention) and not (on_gpu and _kernel_masks(group.module, seq_len)):
                kind = (group.module.window, group.module.score_cap is not None)
                masks[kind] = max(masks.get(kind, 0), mask_elements(group.module, share))
            bucket = max(bucket, own.largest)
            gathered = max(gathered, own.matrices if group.placement.zero == 3 else 0)
    size = ACTIVATION_BYTES[precision]
    return _Parts(tuple(kept), tuple(deferred), tuple(working), size * sum(masks.values()), bucket, gathered)


def _kernel_masks(module: Attention, seq_len: int) -> bool:
    """Whether attention kernels of GPUs know which keys precede which queries: without window and cap."""
    window = module.window is not None and module.window < seq_len
    return not window and module.score_cap is None


class PlanMemory:
    """Memory of every rank of a plan, from one reading of its buckets."""

    def __init__(self, plan: Plan, held: Holdings, replicas_of: Mapping[int, int], *, reserved_bytes: int) -> None:
        """`replicas_of`: replicas of each pipeline."""
        self._plan = plan
        self._chain = dict(plan.model.modules())
        self._reserved_bytes = reserved_bytes
        self._on_gpu = all(device.kind == "gpu" for device in plan.cluster.devices.values())
        self._parts: dict[tuple[object, ...], tuple[_Parts, ...]] = {}  # by rank, of stages that hold the same
        self._terms: dict[tuple[object, ...], MemoryTerms] = {}  # of ranks that hold the same
        self._weights: defaultdict[Member, float] = defaultdict(float, held.copied)
        self._gradients: defaultdict[Member, float] = defaultdict(float)
        self._scattered: defaultdict[Member, int] = defaultdict(int)  # after every micro-batch
        self._gathered: defaultdict[Member, int] = defaultdict(int)  # after the update, at most at once
        self.owned: defaultdict[Member, float] = defaultdict(float)
        for bucket in held.buckets:
            owners = sum(replicas_of[pipeline] for pipeline, _, _ in bucket.members)
            for member in bucket.members:
                part = bucket.num_elements / (owners if bucket.zero else 1)
                self.owned[member] += part
                self._weights[member] += part if bucket.zero == 3 else bucket.num_elements
                self._gradients[member] += part if bucket.zero >= 2 else bucket.num_elements
                if owners == 1:
                    continue
                if bucket.zero >= 2:
                    self._scattered[member] += bucket.num_elements
                if bucket.zero in (1, 2):
                    largest = min(bucket.num_elements, BUCKET_ELEMENTS)
                    self._gathered[member] = max(self._gathered[member], largest)

    def stage(self, pipeline: int, stage: int) -> list[MemoryTerms]:
        """Peak bytes of each rank of a stage."""
        layout = self._plan.pipelines[pipeline]
        groups = [module_groups(run, self._chain) for run in layout.stages[stage].runs()]
        cuts = layout.stages[stage].chunk_cuts(layout.micro_batch * self._plan.training.seq_len)
        sequences = max(replica.sequences for replica in self._plan.replicas if replica.pipeline == pipeline)
        number = sequences // layout.micro_batch
        few = repeats(layout.schedule, num_stages=len(layout.stages), num_micro_batches=number).few
        moments = most_held(layout.stage_actions(few)[stage])
        key = (cuts, layout.context_parallel, tuple(tuple(group.key() for group in of_run) for of_run in groups))
        if key not in self._parts:
            runs = tuple(tuple(group.unnamed() for group in of_run) for of_run in groups)
            training = self._plan.training
            self._parts[key] = _parts_of(
                runs, cuts, layout.context_parallel, training.precision, training.seq_len, self._on_gpu
            )
        return [
            self._rank((pipeline, stage, rank), parts, cuts[rank + 1] - cuts[rank], moments)
            for rank, parts in enumerate(self._parts[key])
        ]

    def _rank(self, member: Member, parts: _Parts, chunk_tokens: int, moments: tuple[Held, ...]) -> MemoryTerms:
        chunks = self._passing_chunks(member)
        held = self._weights[member], self._gradients[member], self.owned[member]
        moved = self._scattered[member], self._gathered[member]
        key = (parts, chunk_tokens, moments, chunks, held, moved)
        if key not in self._terms:
            self._terms[key] = self._terms_of(parts, chunk_tokens, moments, chunks, held, moved)
        return self._terms[key]

    def _terms_of(
        self,
        parts: _Parts,
        chunk_tokens: int,
        moments: tuple[Held, ...],
        chunks: int,
        held: tuple[float, float, float],
        moved: tuple[int, int],
    ) -> MemoryTerms:
        """`held`: elements of weights, gradients and optimizer; `moved`: scattered, and gathered at once."""
        precision = self._plan.training.precision
        kept = [
            sum(n * size for n, size in zip(moment.kept + moment.deferred, parts.kept + parts.deferred, strict=True))
            for moment in moments
        ]
        activations = max(kept)
        # Beside them at their most: a virtual stage that works with more may do so when less is kept.
        at_most = max(size + parts.working[moment.working] for size, moment in zip(kept, moments, strict=True))
        weight = WEIGHT_BYTES[precision]
        # What is scattered and gathered once a step finds activations gone.
        passing = sharding_bytes(moved[0], parts.bucket, parts.gathered, precision)
        sharding = max(passing, moved[1] * weight - at_most)
        chunk = ACTIVATION_BYTES[precision] * chunk_tokens * self._plan.model.hidden
        return MemoryTerms(
            weights=round(held[0] * weight),
            gradients=round(held[1] * GRADIENT_BYTES),
            optimizer=round(held[2] * _state_bytes(precision)),
            activations=activations,
            working=at_most - activations + parts.masks,
            communication=sharding + chunks * chunk,
            reserved=self._reserved_bytes,
        )

    def _passing_chunks(self, member: Member) -> int:
        """Chunks on their way to and from a rank: activations and gradients, one of each in (the next receive is posted
        when the one before has come) and one out, however many virtual stages share them.
        """
        pipeline = self._plan.pipelines[member[0]]
        last = len(pipeline.stages) - 1
        if pipeline.num_virtual > 1:
            return 4 if last else 0
        return 4 - 2 * (member[1] == 0) - 2 * (member[1] == last)
