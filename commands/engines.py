"""Exports to engines that know one tensor-parallel degree: as it is, or the nearest plan that they can run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

from exports.engine import Runnable, as_it_is, nearest
from exports.megatron import MEGATRON
from exports.megatron_ntp import is_damaged, reduced_of
from exports.megatron_ntp import write as write_reduced
from exports.shape import recompute
from exports.torchtitan import TORCHTITAN
from planner.make import make_plan
from planner.problem import Problem
from planner.start import costs_from, read_profile
from specs.errors import BadInputError, PlaitError
from specs.plan import Plan, Prediction
from specs.units import num_bytes, percent, seconds

ENGINES = {"megatron": MEGATRON, "torchtitan": TORCHTITAN}


def export_to_engine(
    plan: Plan,
    path: Path,
    to: Literal["megatron", "torchtitan"],
    *,
    profile: Path | None,
    take_nearest: bool,
    time_limit_seconds: float,
) -> tuple[str, str]:
    """The text of the export, and a remark on how it differs from the plan ("" when it does not).

    Raises `BadInputError` when the engine cannot run the plan: with the offer of the nearest plan that it can, unless
    that is what was asked for.
    """
    engine = ENGINES[to]
    try:
        engine.check_model(plan.model)
    except BadInputError as refusal:
        raise BadInputError(f"{engine.name} cannot run this model: {refusal}.") from None
    if to == "megatron" and is_damaged(plan):
        return _reduced(plan), ""
    try:
        runnable = as_it_is(plan, engine)
        return engine.write(runnable.plan, runnable.shape), ""
    except BadInputError as refusal:
        reason = str(refusal)
    offer = _nearest(plan, to, profile, time_limit_seconds)
    if offer is None:
        raise BadInputError(f"{engine.name} cannot run this plan: {reason}. No plan of its kind fits in memory.")
    found, prediction, before = offer
    cost = _cost(prediction, before)
    if not take_nearest:
        raise BadInputError(
            f"{engine.name} cannot run this plan: {reason}. The best plan that it can run {cost}; write that with "
            f"`plait export {path} --to {to} --nearest`."
        )
    shape = found.shape
    told = (
        f"{engine.name} cannot run this plan: {reason}. Written instead: TP {shape.tensor} x PP {shape.pipeline} x DP "
        f"{shape.data}{f' x EP {shape.expert}' if shape.expert > 1 else ''}, {recompute(shape)}, "
        f"which {cost}; fullest rank "
        f"{num_bytes(prediction.peak_memory_bytes)}."
    )
    return engine.write(found.plan, shape), told


def _reduced(plan: Plan) -> str:
    """Replicas that lost ranks have no nearest plan: what is lost is lost."""
    try:
        return write_reduced(reduced_of(plan))
    except BadInputError as refusal:
        raise BadInputError(f"Megatron-LM cannot run this plan: {refusal}.") from None


def _nearest(
    plan: Plan, to: str, profile: Path | None, time_limit_seconds: float
) -> tuple[Runnable, Prediction, Prediction] | None:
    """The nearest plan, its prediction, and the given plan's by the same costs."""
    from cost_models.step import price

    make_costs = costs_from(read_profile(profile))
    costs = make_costs(plan.cluster, plan.training)
    candidates = [plan]
    problem = Problem(plan.model, plan.cluster, plan.training, plan.made, plan.memory_cap_bytes)
    with contextlib.suppress(PlaitError):  # nothing uniform fits: what is left is to round the plan itself
        candidates.append(
            make_plan(
                problem,
                make_costs,
                objective="step-time",
                freedom="uniform",
                time_limit_seconds=time_limit_seconds,
                top_k=0,
            )
        )
    found = nearest(candidates, ENGINES[to], costs)
    return None if found is None else (*found, price(plan, costs))


def _cost(prediction: Prediction, before: Prediction) -> str:
    step, own = prediction.step_time_seconds, before.step_time_seconds
    more = step / own - 1.0
    compared = f"{percent(abs(more))} {'more' if more >= 0 else 'less'} than the {seconds(own)} of the plan"
    return f"takes {seconds(step)} a step, {compared}"
