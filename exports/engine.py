"""An engine that a plan can be exported to, and the plan nearest to a given one that it can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from cost_models.interface import CostModel
from cost_models.step import price
from exports.shape import Shape, loose_shape_of, memory_limit, plan_of, shape_of
from specs.errors import BadInputError
from specs.model import ModelSpec
from specs.plan import Plan, Prediction, Recompute, Schedule, Zero

Pair = tuple[Recompute, Recompute]  # of attention, of the feed-forward part


@dataclass(frozen=True)
class Engine:
    """What an engine can run and how that is written.

    `check_model` and `check` raise `BadInputError` for a model, and for a shape of it, that it cannot run;
    `recomputes` are the ways of recomputation that it has for a model; `write` gives the text of the export.
    """

    name: str
    check_model: Callable[[ModelSpec], None]
    check: Callable[[Shape, ModelSpec], None]
    recomputes: Callable[[ModelSpec], tuple[Pair, ...]]
    has_full_layers: bool  # the first few layers of every stage in full, the others not
    write: Callable[[Plan, Shape], str]


@dataclass(frozen=True)
class Runnable:
    """A plan that an engine can run, as it runs it."""

    plan: Plan
    shape: Shape


def as_it_is(plan: Plan, engine: Engine) -> Runnable:
    """The plan, when the engine can run just that.  Raises `BadInputError` with the reason when it cannot."""
    shape = shape_of(plan)
    engine.check(shape, plan.model)
    _check_recompute(shape, plan.model, engine)
    return Runnable(plan, shape)


def _check_recompute(shape: Shape, model: ModelSpec, engine: Engine) -> None:
    known = engine.recomputes(model)
    if shape.full_layers and not engine.has_full_layers:
        raise BadInputError(f"the plan recomputes some layers and not others, {engine.name} all or none")
    if (shape.attention, shape.feed_forward) not in known:
        told = "; ".join(f"{attention} and {feed_forward}" for attention, feed_forward in known)
        raise BadInputError(
            f"the plan recomputes attention {_manner(shape.attention)} and the feed-forward part "
            f"{_manner(shape.feed_forward)}; {engine.name} has, of the two: {told}"
        )


def _manner(mode: Recompute) -> str:
    return {"none": "not at all", "selective": "selectively", "full": "in full"}[mode]


def nearest(plans: Iterable[Plan], engine: Engine, costs: CostModel) -> tuple[Runnable, Prediction] | None:
    """Of all ways that the engine could run these plans the fastest that fits in memory; None when there is none."""
    found = [
        best
        for plan in plans
        for shape in _shapes(plan, engine)
        if (best := _priced(shape, plan, engine, costs) or _with_least_recompute(shape, plan, engine, costs))
    ]
    return min(found, key=lambda item: item[1].step_time_seconds, default=None)


def _shapes(plan: Plan, engine: Engine) -> Iterator[Shape]:
    loose = loose_shape_of(plan)
    if loose is None:
        return
    schedules: set[Schedule] = {loose.schedule} if loose.virtual > 1 else {loose.schedule, "1f1b"}
    levels: set[Zero] = {loose.zero} if loose.zero <= 1 else {loose.zero, 1}
    for schedule, zero, pair in product(sorted(schedules), sorted(levels), engine.recomputes(plan.model)):
        yield replace(loose, schedule=schedule, zero=zero, attention=pair[0], feed_forward=pair[1])


def _priced(shape: Shape, plan: Plan, engine: Engine, costs: CostModel) -> tuple[Runnable, Prediction] | None:
    """None when the engine cannot run it or it does not fit."""
    try:
        engine.check(shape, plan.model)
        candidate = plan_of(shape, plan)
        prediction = price(candidate, costs)
    except (BadInputError, ValueError):
        return None
    if prediction.peak_memory_bytes > memory_limit(plan):
        return None
    return Runnable(candidate.with_results(predicted=prediction), shape), prediction


def _with_least_recompute(
    shape: Shape, plan: Plan, engine: Engine, costs: CostModel
) -> tuple[Runnable, Prediction] | None:
    """With as few layers recomputed in full as fit; more layers are slower and smaller, so halving finds them."""
    if not engine.has_full_layers or (shape.attention, shape.feed_forward) != ("none", "none"):
        return None
    best = None
    few, many = 1, max(shape.layers) - 1
    while few <= many:
        middle = (few + many) // 2
        found = _priced(replace(shape, full_layers=middle), plan, engine, costs)
        best = found or best
        few, many = (few, middle - 1) if found else (middle + 1, many)
    return best
