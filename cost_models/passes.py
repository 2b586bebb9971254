"""One step of one kind of replica: what each stage takes, and how the schedule fits them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from cost_models.activations import ACTIVATION_BYTES
from cost_models.context import with_exchange
from cost_models.flops import SPLIT_KINDS, largest_units, local_kv_heads, weight_gradient_share
from cost_models.interface import CostModel, ModuleCost
from cost_models.memory import ModuleGroup, module_groups, share_of
from cost_models.pipeline import PipelineTiming, Span, action_spans, simulate, simulate_actions
from cost_models.sharding import MicroBatchSeconds
from cost_models.topology import ReplicaClass, Topology, span_of
from specs.cluster import Precision
from specs.layout import Cuts, block_of, block_starts, sharing_blocks
from specs.model import Attention, Mamba2, Module
from specs.plan import ModulePlacement, Pipeline, Plan, Recompute


@dataclass(frozen=True, slots=True)
class StagePass:
    """One micro-batch on one stage, seconds.  `forward` and `backward` are what the stage takes, with communication,
    waiting inside blocks, loading, host and exposed `sharding` of gradients and weights; `weight` is the part of
    backward that comes later in schedules that split it.  The `mean_` parts are computing alone, means over its ranks.
    `variance` is that of one rank's forward and backward time.
    """

    forward: float
    backward: float
    weight: float
    mean_forward: float
    mean_backward: float
    data: float
    other: float
    sharding: float
    variance: float
    estimated: bool


@dataclass(frozen=True, slots=True)
class ReplicaPass:
    """One step of one kind of replica."""

    replica: ReplicaClass
    num_micro_batches: int
    stages: tuple[StagePass, ...]
    timing: PipelineTiming
    pipeline: Pipeline
    places: tuple[StagePass, ...]  # every virtual stage, in the order of the chain
    transfer_seconds: tuple[float, ...]  # from each of them to the next

    def spans(self) -> list[Span]:
        """When each action of the step runs."""
        return action_spans(
            self.pipeline.stage_actions(self.num_micro_batches),
            [place.forward for place in self.places],
            [place.backward for place in self.places],
            self.transfer_seconds,
            weight_seconds=[place.weight for place in self.places],
        )


class _GroupPass(NamedTuple):
    """One of equal modules in a micro-batch, as `StagePass` sums them up; `more`: what splitting adds."""

    forward: float
    backward: float
    weight: float
    more: float
    mean_forward: float
    mean_backward: float
    variance: float
    estimated: bool


def replica_pass(
    plan: Plan,
    costs: CostModel,
    topology: Topology,
    chain: Mapping[str, Module],
    replica: ReplicaClass,
    sharding: Mapping[tuple[int, int], MicroBatchSeconds],
) -> ReplicaPass:
    """`sharding` by (pipeline, stage); virtual stages have equal parts of it."""
    pipeline = plan.pipelines[replica.pipeline]
    num_stages = len(pipeline.stages)
    num_micro_batches = replica.sequences // pipeline.micro_batch
    splits = _splits(pipeline, num_micro_batches)
    known: dict[tuple[object, ...], StagePass] = {}
    runs = [
        [
            _with_sharding(run, costs, sharding.get((replica.pipeline, index)), pipeline.num_virtual)
            for run in _virtual_stage_passes(plan, costs, topology, chain, replica, index, known, splits=splits[index])
        ]
        for index in range(num_stages)
    ]
    places = [runs[index][virtual] for virtual in range(pipeline.num_virtual) for index in range(num_stages)]
    ring = [
        _transfer_seconds(plan, costs, topology, replica, index, (index + 1) % num_stages)
        for index in range(min(num_stages, len(places) - 1))
    ]
    transfers = [ring[place % num_stages] for place in range(len(places) - 1)]
    timing = _timing(pipeline, num_micro_batches, places, transfers)
    return ReplicaPass(
        replica, num_micro_batches, tuple(map(_together, runs)), timing, pipeline, tuple(places), tuple(transfers)
    )


def _splits(pipeline: Pipeline, num_micro_batches: int) -> list[bool]:
    """Of every stage, whether its backward passes come in two parts."""
    if pipeline.actions is None:
        return [pipeline.schedule == "zb-h1"] * len(pipeline.stages)
    return [any(action.kind == "W" for action in own) for own in pipeline.stage_actions(num_micro_batches)]


def _timing(
    pipeline: Pipeline, num_micro_batches: int, places: Sequence[StagePass], transfers: Sequence[float]
) -> PipelineTiming:
    """The schedule on these stages."""
    forward, backward = [place.forward for place in places], [place.backward for place in places]
    weight = [place.weight for place in places]
    if pipeline.actions is not None:
        actions = pipeline.stage_actions(num_micro_batches)
        return simulate_actions(actions, forward, backward, transfers, weight_seconds=weight)
    return simulate(
        pipeline.schedule,
        forward,
        backward,
        transfers,
        num_micro_batches,
        weight_seconds=weight,
        num_virtual=pipeline.num_virtual,
    )


def _with_sharding(run: StagePass, costs: CostModel, sharding: MicroBatchSeconds | None, num_virtual: int) -> StagePass:
    """What does not hide beside the passes takes time of its own."""
    if sharding is None:
        return run
    forward = costs.exposed_gradient_sync(sharding.forward / num_virtual, run.forward, sharded=True)
    backward = costs.exposed_gradient_sync(sharding.backward / num_virtual, run.backward, sharded=True)
    return replace(run, forward=run.forward + forward, backward=run.backward + backward, sharding=forward + backward)


def _together(runs: Sequence[StagePass]) -> StagePass:
    """All virtual stages of a stage."""
    return StagePass(
        forward=sum(run.forward for run in runs),
        backward=sum(run.backward for run in runs),
        weight=sum(run.weight for run in runs),
        mean_forward=sum(run.mean_forward for run in runs),
        mean_backward=sum(run.mean_backward for run in runs),
        data=sum(run.data for run in runs),
        other=sum(run.other for run in runs),
        sharding=sum(run.sharding for run in runs),
        variance=sum(run.variance for run in runs),
        estimated=any(run.estimated for run in runs),
    )


def _virtual_stage_passes(
    plan: Plan,
    costs: CostModel,
    topology: Topology,
    chain: Mapping[str, Module],
    replica: ReplicaClass,
    index: int,
    known: dict[tuple[object, ...], StagePass],
    *,
    splits: bool,
) -> list[StagePass]:
    """Of one stage.  `known`: virtual stages that hold and lie alike, on whichever stages of the replica."""
    pipeline = plan.pipelines[replica.pipeline]
    stage = pipeline.stages[index]
    ranks = topology.stage_ranks(replica, index)
    start = pipeline.stage_starts()[index] if replica.speeds else 0
    speeds = replica.speeds[start : start + len(ranks)] if replica.speeds else (1.0,) * len(ranks)
    cuts, pattern = stage.chunk_cuts(pipeline.micro_batch * plan.training.seq_len), topology.pattern(ranks)
    found = []
    for run in stage.runs():
        groups = module_groups(run, chain)
        key = (cuts, pattern, speeds, splits, *(group.key() for group in groups))
        if key not in known:
            known[key] = _sum_of(plan, costs, groups, _Place(cuts, pattern, speeds, pipeline.context_parallel), splits)
        found.append(known[key])
    return found


def _sum_of(plan: Plan, costs: CostModel, groups: Sequence[ModuleGroup], place: _Place, splits: bool) -> StagePass:
    """All modules of a virtual stage."""
    forward = backward = weight = more = mean_forward = mean_backward = variance = 0.0
    estimated = splits
    training = plan.training
    for group in groups:
        unnamed = group.unnamed().placement
        own = _group_pass(costs, group.module, unnamed, place, training.seq_len, training.precision, splits=splits)
        forward += group.count * own.forward
        backward += group.count * own.backward
        weight += group.count * own.weight
        more += group.count * own.more
        mean_forward += group.count * own.mean_forward
        mean_backward += group.count * own.mean_backward
        variance += group.count * own.variance
        estimated = estimated or own.estimated
    reads = any(group.module.kind in ("embedding", "head") for group in groups)
    data = costs.overhead.data_seconds_per_sequence * (place.cuts[-1] // training.seq_len) if reads else 0.0
    host = costs.overhead.other_seconds_per_action
    return StagePass(
        forward=forward + data + host,
        backward=backward + more + host * (1 + splits),
        weight=weight + more + host * splits,
        mean_forward=mean_forward,
        mean_backward=mean_backward,
        data=data,
        other=host * (2 + splits) + more,
        sharding=0.0,
        variance=variance,
        estimated=estimated,
    )


class _Place(NamedTuple):
    """Ranks of a stage: token cuts, nodes relative to the first, speeds; and blocks that may share a sequence."""

    cuts: Cuts
    nodes: tuple[int, ...]
    speeds: tuple[float, ...]
    context: int


@lru_cache(maxsize=16384)
def _group_pass(
    costs: CostModel,
    module: Module,
    placement: ModulePlacement,
    place: _Place,
    seq_len: int,
    precision: Precision,
    *,
    splits: bool,
) -> _GroupPass:
    """A module takes a stage as long as its slowest rank needs; what the others wait is communication.

    How a split backward pass divides is computed from operations, never measured, so that it counts as estimated.
    The same in all plans; the name of `placement` is left out.
    """
    by_rank = _rank_costs(costs, module, placement, place, seq_len, precision)
    computing = [(c.forward_seconds / v, c.backward_seconds / v) for c, v in zip(by_rank, place.speeds, strict=True)]
    weight = more = 0.0
    if splits:
        if isinstance(module, SPLIT_KINDS):
            more = costs.overhead.split_backward_overhead * max(b for _, b in computing)
        weight = max(
            _weight_seconds(module, placement, rank, place, seq_len, b, c.backward_communication_seconds)
            for rank, ((_, b), c) in enumerate(zip(computing, by_rank, strict=True))
        )
    return _GroupPass(
        forward=max(f + c.forward_communication_seconds for (f, _), c in zip(computing, by_rank, strict=True)),
        backward=max(b + c.backward_communication_seconds for (_, b), c in zip(computing, by_rank, strict=True)),
        weight=weight,
        more=more,
        mean_forward=sum(f for f, _ in computing) / len(by_rank),
        mean_backward=sum(b for _, b in computing) / len(by_rank),
        variance=costs.jitter**2 * max(f * f + b * b for f, b in computing),
        estimated=any(cost.estimated for cost in by_rank),
    )


def _weight_seconds(
    module: Module,
    placement: ModulePlacement,
    rank: int,
    place: _Place,
    seq_len: int,
    computing: float,
    communication: float,
) -> float:
    """The part of a module's backward pass that a split one does later."""
    share = share_of(placement, module, rank, place.cuts, seq_len, place.context)
    part = weight_gradient_share(
        module,
        block_tokens=share.block_tokens,
        seq_len=seq_len,
        units=share.units,
        recompute=placement.recompute,
    )
    return weight_seconds(part, computing, communication, placement.recompute)


def weight_seconds(part: float, computing: float, communication: float, recompute: Recompute) -> float:
    """Seconds of a backward pass that come later where it is split: those of the weight gradients.

    `part`: their part of computing, 0 where a module does not split.  Of three collectives, the gradient gathered, the
    input gathered again and its gradient scattered, the second is theirs, unless gathered inputs are kept.
    """
    gathers = part > 0.0 and recompute != "keep"
    return part * computing + (communication / 3.0 if gathers else 0.0)


def _rank_costs(
    costs: CostModel, module: Module, placement: ModulePlacement, place: _Place, seq_len: int, precision: Precision
) -> list[ModuleCost]:
    """Cost of a module on each rank of a stage; equal shares are asked for once."""
    starts = block_starts(placement.blocks)
    levels = [span_of(place.nodes[a:b]).level for a, b in pairwise(starts)]
    sharing = {
        block: span_of([place.nodes[starts[other]] for other in blocks])
        for blocks in (sharing_blocks(placement.blocks, place.cuts, seq_len) if isinstance(module, Attention) else ())
        for block in blocks
    }
    known: dict[tuple[object, ...], ModuleCost] = {}
    result = []
    for rank in range(len(place.nodes)):
        share = share_of(placement, module, rank, place.cuts, seq_len, place.context)
        block, _ = block_of(placement.blocks, rank)
        kv_heads = local_kv_heads(module, share.units) if isinstance(module, Attention | Mamba2) else 0
        key = (share.degree, share.block_tokens, share.units.size, kv_heads, levels[block], sharing.get(block))
        if key not in known:
            largest = share.units.size == largest_units(module, share.degree).size
            cost = costs.module(
                module,
                degree=share.degree,
                block_tokens=share.block_tokens,
                seq_len=seq_len,
                recompute=placement.recompute,
                level=levels[block],
                units=None if largest else share.units,
            )
            if block in sharing:
                size = ACTIVATION_BYTES[precision]
                cost = with_exchange(cost, costs, module, share, sharing[block], size, placement.recompute)
            known[key] = cost
        result.append(known[key])
    return result


def _transfer_seconds(
    plan: Plan, costs: CostModel, topology: Topology, replica: ReplicaClass, index: int, following: int
) -> float:
    """A chunk of the smaller stage, its larger neighbour's ranks sending side by side."""
    pipeline = plan.pipelines[replica.pipeline]
    here, there = topology.stage_ranks(replica, index), topology.stage_ranks(replica, following)
    tokens = -(-pipeline.micro_batch * plan.training.seq_len // min(len(here), len(there)))
    return costs.collective(
        "point_to_point",
        num_ranks=2,
        payload_bytes=tokens * plan.model.hidden * ACTIVATION_BYTES[plan.training.precision],
        level=topology.span((here[0], there[0])).level,
    )
