"""Why a plan is as it is: what every other way to run a module would cost, and what memory is worth.

Each neighbour differs from the plan in one module and is priced like any plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from cost_models.interface import CostModel
from cost_models.step import price
from planner.blocks import blocks_of, stage_degrees
from planner.constraints import MODES
from planner.shadow_prices import ShadowPrice
from planner.space import SCHEDULES
from specs.errors import BadInputError
from specs.model import Module, num_units
from specs.plan import ModulePlacement, Plan, Prediction, Recompute, Schedule, Stage


@dataclass(frozen=True)
class Neighbour:
    """One other way to run a module.  `step_change` and `memory_change` against the plan (of the module's stage);
    `reason` why it was not taken, None for the plan's own.
    """

    blocks: tuple[int, ...]
    recompute: Recompute
    step_change_seconds: float | None
    memory_change_bytes: int | None
    reason: str | None


@dataclass(frozen=True)
class ModuleReasons:
    """A module (the first of `count` that are placed alike in its stage) and its neighbours."""

    module: str
    count: int
    stage: int
    neighbours: tuple[Neighbour, ...]


@dataclass(frozen=True)
class OtherSchedule:
    """The plan under one schedule, all else as it is; `memory_change_bytes` on the fullest rank."""

    schedule: Schedule
    step_change_seconds: float
    memory_change_bytes: int
    reason: str | None


@dataclass(frozen=True)
class Explanation:
    """Memory left on the fullest rank of each stage (negative: over the limit), reasons by module, shadow prices."""

    step_seconds: float
    free_bytes: tuple[int, ...]
    modules: tuple[ModuleReasons, ...]
    prices: tuple[ShadowPrice, ...] = ()
    schedules: tuple[OtherSchedule, ...] = ()


def explain(plan: Plan, costs: CostModel, module: str | None = None) -> Explanation:
    """Reasons for one module, or for the first of every run of equal modules of the first pipeline.

    Raises `BadInputError` for a module that the plan does not have.
    """
    base = price(plan, costs)
    limit = memory_limit(plan)
    chain = dict(plan.model.modules())
    if module is not None and module not in chain:
        raise BadInputError(f"the plan has no module {module!r}. It has {', '.join([*chain][:4])} ... {[*chain][-1]}.")
    found = []
    for index, stage in enumerate(plan.pipelines[0].stages):
        for position, count in _representatives(stage, chain, module):
            placement = stage.modules[position]
            kind = chain[placement.module]
            rows = [
                _neighbour(
                    plan, costs, base.step_time_seconds, base.stage_memory_bytes[index], limit, index, position, p
                )
                for p in _ways(placement, kind, stage.num_ranks)
            ]
            found.append(ModuleReasons(placement.module, count, index, tuple(rows)))
    free = tuple(limit - used for used in base.stage_memory_bytes)
    schedules = () if module is not None else tuple(_schedules(plan, costs, base, limit))
    return Explanation(base.step_time_seconds, free, tuple(found), schedules=schedules)


def _schedules(plan: Plan, costs: CostModel, base: Prediction, limit: int) -> Iterator[OtherSchedule]:
    """The plan's own schedule, then the others that need no virtual stages; one for all pipelines."""
    own = {pipeline.schedule for pipeline in plan.pipelines}
    if len(own) > 1 or not own <= set(SCHEDULES) or all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
        return
    for schedule in sorted(SCHEDULES, key=lambda one: one not in own):
        pipelines = tuple(pipeline.model_copy(update={"schedule": schedule}) for pipeline in plan.pipelines)
        predicted = price(plan.model_copy(update={"pipelines": pipelines}), costs)
        change = predicted.step_time_seconds - base.step_time_seconds
        yield OtherSchedule(
            schedule,
            change,
            predicted.peak_memory_bytes - base.peak_memory_bytes,
            None if schedule in own else _reason(predicted.peak_memory_bytes, limit, change, base.step_time_seconds),
        )


def _reason(used: int, limit: int, change: float, step_seconds: float) -> str:
    if used > limit:
        return f"does not fit: {(used - limit) / 2**20:,.0f} MiB over"
    return f"slower by {100.0 * change / step_seconds:.3f} % of a step" if change > 0.0 else "no slower alone"


def memory_limit(plan: Plan) -> int:
    """Bytes that a rank may fill: the plan's cap, or the smallest device's memory."""
    smallest = min(plan.cluster.devices[group.device].memory_bytes for group in plan.cluster.nodes)
    return smallest if plan.memory_cap_bytes is None else min(smallest, plan.memory_cap_bytes)


def _representatives(stage: Stage, chain: dict[str, Module], module: str | None) -> Iterator[tuple[int, int]]:
    """(position, how many are alike) of the modules to explain."""
    alike: dict[object, list[int]] = {}
    for position, placement in enumerate(stage.modules):
        key = (chain[placement.module], placement.blocks, placement.cuts, placement.recompute)
        alike.setdefault(key, []).append(position)
    for positions in alike.values():
        if module is None:
            yield positions[0], len(positions)
        else:
            yield from ((p, len(positions)) for p in positions if stage.modules[p].module == module)


def _ways(placement: ModulePlacement, module: Module, num_ranks: int) -> list[ModulePlacement]:
    """The plan's own way first, then all degrees and recompute modes; alone a rank gathers nothing to keep."""
    ways = [placement]
    for degree in stage_degrees(num_ranks):
        for mode in MODES[module.kind]:
            if mode == "keep" and degree == 1:
                continue
            blocks = blocks_of(degree, num_ranks)
            if degree <= num_units(module) and (blocks, mode) != (placement.blocks, placement.recompute):
                ways.append(placement.model_copy(update={"blocks": blocks, "cuts": None, "recompute": mode}))
    return ways


def _neighbour(
    plan: Plan,
    costs: CostModel,
    step_seconds: float,
    stage_bytes: int,
    limit: int,
    stage: int,
    position: int,
    placement: ModulePlacement,
) -> Neighbour:
    own = plan.pipelines[0].stages[stage].modules[position] == placement
    try:
        other = _replaced(plan, stage, position, placement)
        predicted = price(other, costs)
    except ValidationError:
        return Neighbour(placement.blocks, placement.recompute, None, None, "blocks without whole sequences")
    except BadInputError as error:
        return Neighbour(placement.blocks, placement.recompute, None, None, str(error))
    change = predicted.step_time_seconds - step_seconds
    used = predicted.stage_memory_bytes[stage]
    reason = None if own else _reason(used, limit, change, step_seconds)
    return Neighbour(placement.blocks, placement.recompute, change, used - stage_bytes, reason)


def _replaced(plan: Plan, stage: int, position: int, placement: ModulePlacement) -> Plan:
    """The plan with one module placed otherwise, checked anew."""
    pipeline = plan.pipelines[0]
    modules = list(pipeline.stages[stage].modules)
    modules[position] = placement
    stages = list(pipeline.stages)
    stages[stage] = stages[stage].model_copy(update={"modules": tuple(modules)})
    first = pipeline.model_copy(update={"stages": tuple(stages)})
    return Plan(
        made=plan.made,
        model=plan.model,
        cluster=plan.cluster,
        training=plan.training,
        memory_cap_bytes=plan.memory_cap_bytes,
        pipelines=(first, *plan.pipelines[1:]),
        replicas=plan.replicas,
    )
