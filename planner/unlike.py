"""The rung of unlike devices: a plan made as if all ranks were equal, changed for the speeds that they have.

Changes in this order, each kept only where the exact price says that the step gets shorter and memory still holds:

    placement   groups of neighbouring ranks trade places, so that slow ones share a replica, or a stage
    cuts        a slow rank takes fewer tokens where attention allows, and in its blocks fewer units
    stages      a replica's stages hand layers to their neighbours
    shares      replicas take whole micro-batches so that the slowest ends early (`planner.shares`)

    units u of a rank of speed v in a block: minimise max over ranks of u / v      sum of u given, u >= 1

Replicas with the same speeds share a pipeline.  This is a local search: what it finds is priced, not proven best; the
plan's bound holds all the same, since no rank is faster than it takes the fastest to be.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import ValidationError

from cost_models.buckets import holdings
from cost_models.interface import CostModel
from cost_models.passes import ReplicaPass, replica_pass
from cost_models.sharding import micro_batch_seconds
from cost_models.step import price
from cost_models.topology import Topology
from planner.shares import Worker, deal
from specs.layout import Cuts, balanced_cuts, block_starts
from specs.model import SEQUENCE_KINDS, num_units
from specs.plan import ModulePlacement, Pipeline, Plan, Prediction, Replica, Stage

# Relative gain below which a change is not worth having.
LEAST_GAIN = 1e-6


@dataclass(frozen=True)
class Adapted:
    """A plan, its price, and which changes it took."""

    plan: Plan
    predicted: Prediction
    changes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.predicted.step_time_seconds


def proportional_cuts(size: int, weights: Sequence[float]) -> Cuts:
    """Cut points that give part i about size x weight_i / sum of weights, at least 1, with the least largest
    part / weight.  `size` at least the number of parts.
    """
    total = sum(weights)
    parts = [max(1, math.floor(size * weight / total)) for weight in weights]
    while sum(parts) > size:  # parts of at least 1 took too much
        worst = max((i for i, part in enumerate(parts) if part > 1), key=lambda i: parts[i] / weights[i])
        parts[worst] -= 1
    waiting = [((part + 1) / weight, i) for i, (part, weight) in enumerate(zip(parts, weights, strict=True))]
    heapq.heapify(waiting)
    for _ in range(size - sum(parts)):
        _, i = waiting[0]
        parts[i] += 1
        heapq.heapreplace(waiting, ((parts[i] + 1) / weights[i], i))
    return block_starts(parts)


def adapt(plan: Plan, costs: CostModel, memory_bytes: int, *, fixed_stages: bool = False) -> Adapted:
    """The plan as the speeds of its cluster's ranks want it; the plan itself where nothing is gained.

    For plans whose stages are one run of the chain each.  `fixed_stages`: every stage keeps its layers.
    """
    before = Adapted(plan, price(plan, costs))
    if not plan.cluster.slow or any(stage.num_virtual > 1 for p in plan.pipelines for stage in p.stages):
        return before
    search = _Search(costs, memory_bytes, before.predicted.peak_memory_bytes)
    best = before
    layers = () if fixed_stages else (search.hand_over,)
    for words, replicas in _placements(plan):
        placed = before if not words else search.taken(before, replace_parts(plan, plan.pipelines, replicas), words)
        # Which of the last two comes first matters: each levels what the other would use.
        for order in dict.fromkeys([(search.share, *layers, search.share), (*layers, search.share)]):
            found = search.cut(placed)
            for step in order:
                found = step(found)
            best = min(best, found, key=lambda item: item.seconds)
    return best


def replace_parts(plan: Plan, pipelines: Sequence[Pipeline], replicas: Sequence[Replica]) -> Plan:
    """The plan with other pipelines and replicas, checked anew."""
    return Plan(
        made=plan.made,
        model=plan.model,
        cluster=plan.cluster,
        training=plan.training,
        memory_cap_bytes=plan.memory_cap_bytes,
        pipelines=tuple(pipelines),
        replicas=tuple(replicas),
    )


class _Search:
    """Changes plans and keeps what pays."""

    def __init__(self, costs: CostModel, memory_bytes: int, peak_bytes: int) -> None:
        self._costs = costs
        self._memory_bytes = max(memory_bytes, peak_bytes)

    def taken(self, before: Adapted, plan: Plan, change: str) -> Adapted:
        """The changed plan if it fits, better or not."""
        predicted = price(plan, self._costs)
        if predicted.peak_memory_bytes > self._memory_bytes:
            return before
        return Adapted(plan, predicted, tuple(dict.fromkeys((*before.changes, change))))

    def better(self, before: Adapted, pipelines: Sequence[Pipeline], replicas: Sequence[Replica], how: str) -> Adapted:
        """The changed plan, equal pipelines made one, if it fits and is faster."""
        kept = list(dict.fromkeys(pipelines))
        merged = [
            replica.model_copy(update={"pipeline": kept.index(pipelines[replica.pipeline])}) for replica in replicas
        ]
        try:
            plan = replace_parts(before.plan, kept, merged)
        except ValidationError:
            return before
        after = self.taken(before, plan, how)
        return after if after.seconds < before.seconds * (1.0 - LEAST_GAIN) else before

    def cut(self, before: Adapted) -> Adapted:
        """Tokens and units by speed, in a pipeline of their own for every pattern of speeds."""
        pipelines, replicas = _by_speeds(before.plan)
        speeds = {replica.pipeline: _speeds(before.plan, replica) for replica in replicas}
        changed = [_cut_pipeline(before.plan, p, speeds[number]) for number, p in enumerate(pipelines)]
        return self.better(before, changed, replicas, "cuts by speed")

    def hand_over(self, before: Adapted) -> Adapted:
        """Layers go from the slowest stage of the slowest replica to a neighbour, as long as that pays."""
        pipelines, replicas = _by_speeds(before.plan)
        if len(pipelines[0].stages) == 1:
            return before
        best = before
        while True:
            pipelines, replicas = _by_speeds(best.plan)
            now = best
            passes = self._passes(replace_parts(best.plan, pipelines, replicas))
            last = max(passes, key=lambda item: item.timing.makespan_seconds)
            number = last.replica.pipeline
            busy = [stage.forward + stage.backward for stage in last.stages]
            speeds = next(_speeds(best.plan, r) for r in replicas if r.pipeline == number)
            for moved in _handed_over(pipelines[number], busy.index(max(busy))):
                cut = _cut_pipeline(best.plan, moved, speeds)
                for one in (moved, cut):
                    every = [one if n == number else p for n, p in enumerate(pipelines)]
                    now = min(now, self.better(best, every, replicas, "layers by speed"), key=lambda a: a.seconds)
            if now is best:
                return best
            best = now

    def share(self, before: Adapted) -> Adapted:
        """Whole micro-batches to replicas, so that the slowest ends early."""
        pipelines, replicas = _by_speeds(before.plan)
        if len(replicas) == 1:
            return before
        workers: list[Worker] = []
        members: list[list[int]] = []
        for item in self._passes(replace_parts(before.plan, pipelines, replicas)):
            own = [r for r in range(len(replicas)) if replicas[r].pipeline == item.replica.pipeline]
            if any(own == other for other in members):
                continue
            each = max(stage.forward + stage.backward for stage in item.stages)
            fill = max(0.0, item.timing.makespan_seconds - item.num_micro_batches * each)
            workers.append(Worker(len(own), pipelines[item.replica.pipeline].micro_batch, each, fill))
            members.append(own)
        shares = deal(before.plan.training.global_batch, workers)
        if shares is None:
            return before
        sequences = {
            r: number * worker.micro_batch
            for worker, own, numbers in zip(workers, members, shares, strict=True)
            for r, number in zip(own, numbers, strict=True)
        }
        dealt = [replica.model_copy(update={"sequences": sequences[r]}) for r, replica in enumerate(replicas)]
        return self.better(before, pipelines, dealt, "micro-batches by speed")

    def _passes(self, plan: Plan) -> list[ReplicaPass]:
        topology = Topology(plan)
        sharding = micro_batch_seconds(plan, self._costs, topology, holdings(plan).buckets)
        chain = dict(plan.model.modules())
        return [replica_pass(plan, self._costs, topology, chain, item, sharding) for item in topology.classes]


def _speeds(plan: Plan, replica: Replica) -> tuple[float, ...]:
    return tuple(plan.cluster.slow.get(rank, 1.0) for rank in replica.ranks)


def _by_speeds(plan: Plan) -> tuple[list[Pipeline], list[Replica]]:
    """A pipeline for every pattern of speeds that runs it."""
    known: dict[tuple[int, tuple[float, ...]], int] = {}
    replicas = []
    for replica in plan.replicas:
        number = known.setdefault((replica.pipeline, _speeds(plan, replica)), len(known))
        replicas.append(replica.model_copy(update={"pipeline": number}))
    return [plan.pipelines[old] for old, _ in known], replicas


def _placements(plan: Plan) -> Iterator[tuple[str, list[Replica]]]:
    """Who sits where: as it is; the slowest groups in as few replicas as hold them; all of them in one stage."""
    yield "", list(plan.replicas)
    starts = plan.pipelines[0].stage_starts()
    seats = [(r, s) for r in range(len(plan.replicas)) for s in range(len(starts) - 1)]
    groups = [plan.replicas[r].ranks[starts[s] : starts[s + 1]] for r, s in seats]
    slow = plan.cluster.slow

    def speed(group: tuple[int, ...]) -> float:
        return min(slow.get(rank, 1.0) for rank in group)

    usual = sorted(map(speed, groups))[len(groups) // 2]
    odd = [number for number, group in enumerate(groups) if speed(group) < usual]
    stages = range(len(starts) - 1)
    orders = [("slow ranks in one replica", sorted(range(len(seats)), key=lambda n: seats[n]))]
    orders += [
        (
            f"slow ranks in stage {s}",
            sorted(range(len(seats)), key=lambda n: ((seats[n][1] - s) % len(stages), seats[n][0])),
        )
        for s in stages
        if len(plan.replicas) > 1
    ]
    seen = {tuple(groups)}
    for words, order in orders:
        placed = list(groups)
        wanted = order[: len(odd)]
        homeless = [n for n in odd if n not in wanted]
        for target in (n for n in wanted if n not in odd):
            source = homeless.pop()
            placed[target], placed[source] = placed[source], placed[target]
        if tuple(placed) in seen:
            continue
        seen.add(tuple(placed))
        ranks = [sum((placed[seats.index((r, s))] for s in stages), ()) for r in range(len(plan.replicas))]
        yield words, [old.model_copy(update={"ranks": own}) for old, own in zip(plan.replicas, ranks, strict=True)]


def _cut_pipeline(plan: Plan, pipeline: Pipeline, speeds: Sequence[float]) -> Pipeline:
    """Tokens and units of every stage by speed."""
    starts = pipeline.stage_starts()
    stages = [
        _cut_stage(plan, stage, pipeline.micro_batch, speeds[a:b])
        for stage, (a, b) in zip(pipeline.stages, pairwise(starts), strict=True)
    ]
    return pipeline.model_copy(update={"stages": tuple(stages)})


def _cut_stage(plan: Plan, stage: Stage, micro_batch: int, speeds: Sequence[float]) -> Stage:
    """Attention's blocks keep their tokens, which are whole sequences; inside them tokens go by speed."""
    modules = dict(plan.model.modules())
    even = stage.model_copy(update={"token_cuts": None}).chunk_cuts(micro_batch * plan.training.seq_len)
    if len(set(speeds)) == 1:
        plain = tuple(p.model_copy(update={"cuts": None}) for p in stage.modules)
        return stage.model_copy(update={"modules": plain, "token_cuts": None})
    fixed = {0, stage.num_ranks}
    for placement in stage.modules:
        if modules[placement.module].kind in SEQUENCE_KINDS:
            fixed.update(block_starts(placement.blocks))
    cuts = [0]
    for a, b in pairwise(sorted(fixed)):
        cuts += [even[a] + cut for cut in proportional_cuts(even[b] - even[a], speeds[a:b])[1:]]
    placed = tuple(_cut_module(p, num_units(modules[p.module]), speeds) for p in stage.modules)
    return stage.model_copy(update={"modules": placed, "token_cuts": tuple(cuts)})


def _cut_module(placement: ModulePlacement, units: int, speeds: Sequence[float]) -> ModulePlacement:
    cuts = tuple(proportional_cuts(units, speeds[a:b]) for a, b in pairwise(block_starts(placement.blocks)))
    even = tuple(balanced_cuts(units, size) for size in placement.blocks)
    return placement.model_copy(update={"cuts": None if cuts == even else cuts})


def _handed_over(pipeline: Pipeline, stage: int) -> Iterator[Pipeline]:
    """The pipeline with the first layer of a stage in the one before, and with its last layer in the one after."""
    own = pipeline.stages[stage].modules
    layers = [placement.module.rsplit(".", 1)[0] for placement in own]
    for neighbour, count in ((stage - 1, layers.count(layers[0])), (stage + 1, layers.count(layers[-1]))):
        if not 0 <= neighbour < len(pipeline.stages) or count == len(own):
            continue
        if pipeline.stages[neighbour].num_ranks != pipeline.stages[stage].num_ranks:
            continue
        stages = list(pipeline.stages)
        there = stages[neighbour].modules
        moved, kept = (own[:count], own[count:]) if neighbour < stage else (own[-count:], own[:-count])
        joined = (*there, *moved) if neighbour < stage else (*moved, *there)
        # Cuts are those of other ranks: even ones do for any.
        plain = tuple(p.model_copy(update={"cuts": None}) for p in joined)
        stages[stage] = stages[stage].model_copy(update={"modules": kept})
        stages[neighbour] = stages[neighbour].model_copy(update={"modules": plain, "token_cuts": None})
        yield pipeline.model_copy(update={"stages": tuple(stages)})
