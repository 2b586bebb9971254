"""The rung of unlike domains: which layouts of the whole cluster to fit to the ranks that are there, and what it buys.

The best layout of the whole cluster is rarely the one that suffers least from a loss: with few micro-batches to deal,
or blocks that hold few sequences, little of it can be moved.  So the best layouts of several shapes are fitted, those
first that promise most.  They are priced, not proven best; the bound is that of the work alone (`planner.work_bound`),
which no plan of these ranks is below.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from cost_models.interface import CostModel
from planner.constraints import Constraints
from planner.describe import describe
from planner.ladder import NOTHING
from planner.layout import Layout
from planner.problem import Pricer, Problem, make_searcher
from planner.search import TOLERANCE, Engine, Freedom
from planner.shapes import best_of, promising, shape_of
from planner.unlike_domains import Fitted, Whole, as_whole, fit, slowed
from planner.work_bound import work_bound
from specs.plan import Alternative, Certificate, LadderRung, Objective, Plan

# Part of the time for layouts of equal ranks; they are few where the number of ranks has few divisors.
EQUAL_SHARE = 0.5
# Layouts of the whole cluster that are fitted in the ways that most often win, and of those in every way.
TRIES = 12
FULLY = 6


def unlike_domains(problem: Problem, objective: Objective, freedom: Freedom) -> Whole | None:
    """The whole cluster, where the rung has something to do: some node lacks ranks.

    Not with slow ranks or constraints, which fitting does not know, for the objective memory, or without the freedom.
    """
    if problem.cluster.slow or problem.constraints != Constraints() or objective == "memory":
        return None
    return as_whole(problem.cluster) if freedom in ("modules", "cuts", "interleaved") else None


class _Best(NamedTuple):
    fitted: Fitted
    layout: Layout


class _Fitting:
    """Fits layouts of the whole cluster; `value` of the best in seconds of the objective, `seconds` of its step."""

    def __init__(
        self, problem: Problem, whole: Whole, costs: CostModel, made: Plan | None, objective: Objective
    ) -> None:
        self._problem, self._whole, self._costs = problem, whole, costs
        at_once = replace(problem, cluster=whole.cluster)
        self._searcher = make_searcher(at_once, costs)
        self._pricer = Pricer(at_once, self._searcher)
        self._by_step = objective == "step-time"
        self.best: _Best | None = None
        self.seconds = self.value = float("inf")
        self.tried: list[tuple[float, Layout]] = []
        if made is not None and made.predicted is not None and made.certificate is not None:
            self.seconds, self.value = made.predicted.step_time_seconds, made.certificate.objective_value

    def run(self, deadline: float) -> None:
        shapes = promising(
            self._searcher,
            lambda grid: slowed(grid, self._whole),
            lambda grid: (*shape_of(grid), grid.micro_batch),  # the micro-batch says how much can be dealt
        )
        for promise, grids in shapes:
            if len(self.tried) == TRIES or promise >= self.value or time.monotonic() > deadline:
                break
            layout = best_of(grids, self._searcher, self._pricer.seconds, within=self.seconds, deadline=deadline)
            if layout is not None:
                self._fit(layout, deadline, quickly=True)
        for _, layout in sorted(self.tried, key=lambda one: one[0])[:FULLY]:
            if time.monotonic() < deadline:
                self._fit(layout, deadline, quickly=False)

    def _fit(self, layout: Layout, deadline: float, *, quickly: bool) -> None:
        plan = self._pricer.plan(layout)
        found = fit(plan, self._whole, self._problem, self._costs, deadline=deadline, quickly=quickly)
        if found is None or not self._pricer.fits(found.predicted):
            return
        seconds, tokens = found.predicted.step_time_seconds, self._problem.training.tokens_per_step
        value = seconds if self._by_step else tokens / found.predicted.goodput_tokens_per_second
        self.tried.append((value, layout))
        if value < self.value:
            self.best, self.value, self.seconds = _Best(found, layout), value, seconds


def for_unlike_domains(
    problem: Problem,
    whole: Whole,
    costs: CostModel,
    made: Plan | None,
    *,
    objective: Objective,
    engine: Engine,
    freedom: Freedom,
    start: float,
    deadline: float,
) -> Plan | None:
    """`made`, the plan of equal ranks if there is one, or a better one, with a rung that says what it buys; None when
    nothing fits.
    """
    fitting = _Fitting(problem, whole, costs, made, objective)
    fitting.run(deadline)
    best, value = fitting.best, fitting.value
    if best is None and made is None:
        return None
    bound = work_bound(
        problem.model,
        problem.training,
        costs,
        num_ranks=problem.cluster.num_usable,
        most_degree=max(group.devices_per_node for group in problem.cluster.nodes),
    )
    gap = max(0.0, 1.0 - bound / value)
    certificate = Certificate(
        engine=engine,
        objective=objective,
        status="optimal" if gap <= TOLERANCE else "feasible",
        objective_value=value,
        bound=min(bound, value),
        gap=gap,
        seconds=time.monotonic() - start,
        evaluated=len(fitting.tried),
        freedom=freedom,
    )
    rung = _rung(made, best, whole)
    if made is None or made.certificate is None:
        assert best is not None
        return best.fitted.plan.with_results(predicted=best.fitted.predicted, certificate=certificate, ladder=(rung,))
    work = made.certificate
    counts = {"labels": work.labels, "nodes": work.nodes, "pruned": work.pruned}
    return (made if best is None else best.fitted.plan).with_results(
        predicted=made.predicted if best is None else best.fitted.predicted,
        certificate=certificate.model_copy(update={**counts, "evaluated": work.evaluated + certificate.evaluated}),
        ladder=(*made.ladder, rung),
        alternatives=made.alternatives if best is None else _beaten(made, fitting.seconds),
        rate_choices=made.rate_choices if best is None else (),  # they compare plans of equal ranks
    )


def _beaten(made: Plan, seconds: float) -> tuple[Alternative, ...]:
    """The plan of equal ranks and its alternatives, beside a plan whose step takes `seconds`."""
    assert made.predicted is not None
    own = Alternative(
        layout=made.ladder[-1].layout,
        step_time_seconds=made.predicted.step_time_seconds,
        peak_memory_bytes=made.predicted.peak_memory_bytes,
        reason="",
    )
    found = []
    for other in (own, *made.alternatives):
        if other.step_time_seconds is not None:
            slower = 100.0 * (other.step_time_seconds / seconds - 1.0)
            other = other.model_copy(update={"reason": f"equal ranks: {slower:.2f} % slower"})
        found.append(other)
    return tuple(found)


def _rung(made: Plan | None, best: _Best | None, whole: Whole) -> LadderRung:
    if best is None:
        assert made is not None
        assert made.predicted is not None
        return LadderRung(
            freedom="+ unlike domains",
            step_time_seconds=made.predicted.step_time_seconds,
            gain_over_previous=0.0,
            layout=made.ladder[-1].layout,
            reason="buys nothing here",
        )
    seconds, gain = best.fitted.predicted.step_time_seconds, None
    if made is not None and made.predicted is not None:
        gain = 1.0 - seconds / made.predicted.step_time_seconds
    used, usable = best.fitted.plan.world_size, best.fitted.plan.cluster.num_usable
    idle = f"; {used} of {usable} usable ranks" if used < usable else ""
    return LadderRung(
        freedom="+ unlike domains",
        step_time_seconds=seconds,
        gain_over_previous=gain,
        layout=f"{describe(best.layout)}, of {len(whole.names)} ranks; {best.fitted.words}{idle}",
        reason="the first that fits" if gain is None else "" if gain >= NOTHING else "buys nothing in step time",
    )
