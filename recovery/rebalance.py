"""Less work for slow devices: smaller cuts inside their blocks, fewer micro-batches for their replicas.

A rank that takes f times as long is given 1/f of a peer's units in every block of several ranks, in whole units; or
its replica gets fewer micro-batches, so that all replicas end as early as can be; or both.  Whichever is priced best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cost_models.interface import CostModel
from cost_models.step import price
from planner.shares import Worker, deal
from specs.layout import Cuts, block_starts
from specs.model import num_units
from specs.plan import ModulePlacement, Pipeline, Plan


@dataclass(frozen=True)
class Rebalanced:
    """`gain`: fraction of the step time with the slow devices that the new plan saves, as priced; 0: the old plan."""

    plan: Plan
    layout: str
    gain: float


def weighted_cuts(size: int, weights: Sequence[float]) -> Cuts | None:
    """Cut points that give each part whole units in proportion to its weight, at least one; None when too few.

    Largest remainders first, as seats are dealt out.
    """
    if size < len(weights):
        return None
    spare = size - len(weights)
    quotas = [spare * weight / sum(weights) for weight in weights]
    parts = [1 + int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: (int(quotas[i]) - quotas[i], i))
    for index in by_remainder[: size - sum(parts)]:
        parts[index] += 1
    return (0, *accumulate(parts))


def rebalance(plan: Plan, slow: Mapping[int, float], costs: CostModel) -> Rebalanced:
    """The plan with less work for the ranks in `slow` (factor by rank); `costs` know of their speeds."""
    best = price(plan, costs).step_time_seconds
    before, chosen, layout = best, plan, ""
    smaller = _smaller_cuts(plan, slow)
    for candidate, words in (
        (smaller, "smaller cuts for slow ranks"),
        (_fewer_micro_batches(plan, slow), "fewer micro-batches for slow replicas"),
        (_fewer_micro_batches(smaller, slow), "smaller cuts and fewer micro-batches for slow ranks"),
    ):
        if candidate == plan:
            continue
        checked = Plan.model_validate(candidate.model_dump())
        seconds = price(checked, costs).step_time_seconds
        if seconds < best:
            best, chosen, layout = seconds, checked, words
    return Rebalanced(chosen, layout, 1.0 - best / before)


def _smaller_cuts(plan: Plan, slow: Mapping[int, float]) -> Plan:
    """Each replica with a slow rank gets a pipeline of its own, with cuts by speed."""
    pipelines, replicas = list(plan.pipelines), list(plan.replicas)
    for index, replica in enumerate(plan.replicas):
        if slow.keys() & set(replica.ranks):
            speeds = [1.0 / slow.get(rank, 1.0) for rank in replica.ranks]
            pipelines.append(_cut_by_speed(plan, plan.pipelines[replica.pipeline], speeds))
            replicas[index] = replica.model_copy(update={"pipeline": len(pipelines) - 1})
    used = sorted({replica.pipeline for replica in replicas})
    return plan.model_copy(
        update={
            "pipelines": tuple(pipelines[number] for number in used),
            "replicas": tuple(r.model_copy(update={"pipeline": used.index(r.pipeline)}) for r in replicas),
        }
    )


def _cut_by_speed(plan: Plan, pipeline: Pipeline, speeds: Sequence[float]) -> Pipeline:
    units = {name: num_units(module) for name, module in plan.model.modules()}
    starts = pipeline.stage_starts()
    stages = []
    for stage, first in zip(pipeline.stages, starts, strict=False):
        own = speeds[first : first + stage.num_ranks]
        modules = tuple(_placed(placement, units[placement.module], own) for placement in stage.modules)
        stages.append(stage.model_copy(update={"modules": modules}))
    return pipeline.model_copy(update={"stages": tuple(stages)})


def _placed(placement: ModulePlacement, units: int, speeds: Sequence[float]) -> ModulePlacement:
    starts = block_starts(placement.blocks)
    cuts = [weighted_cuts(units, speeds[a : a + size]) for a, size in zip(starts, placement.blocks, strict=False)]
    if any(cut is None for cut in cuts):
        return placement
    return placement.model_copy(update={"cuts": tuple(cut for cut in cuts if cut is not None)})


def _fewer_micro_batches(plan: Plan, slow: Mapping[int, float]) -> Plan:
    """Shares of the batch by the work a replica's slowest rank can do; the plan itself when none add up."""
    workers = []
    for replica in plan.replicas:
        pipeline = plan.pipelines[replica.pipeline]
        factor = max(slow.get(rank, 1.0) for rank in replica.ranks)
        seconds = factor * pipeline.micro_batch / len(replica.ranks)
        fill = seconds * (len(pipeline.stages) - 1)
        workers.append(Worker(1, pipeline.micro_batch, seconds, fill))
    shares = deal(plan.training.global_batch, workers)
    if shares is None:
        return plan
    replicas = tuple(
        replica.model_copy(update={"sequences": share[0] * worker.micro_batch})
        for replica, share, worker in zip(plan.replicas, shares, workers, strict=True)
    )
    return plan.model_copy(update={"replicas": replicas})
