"""The last rung of the ladder where ranks have unlike speeds: which layouts to adapt to them, and what it bought.

The best layouts for equal ranks of several shapes are adapted (`planner.unlike`), for the shape that is best with
adapted shares and cuts is rarely the one that suffers least from a slow rank with even ones.
"""

from __future__ import annotations

import time
from dataclasses import replace

from planner.describe import describe
from planner.grid_search import Incumbent
from planner.ladder import NOTHING, climb
from planner.layout import Layout
from planner.problem import Pricer, Problem
from planner.search import TOLERANCE, Freedom, Searcher
from planner.unlike import Adapted, adapt
from specs.plan import LadderRung, Plan

# Part of the time for layouts that treat all ranks alike: no bound of theirs knows of slow ranks, so few are ruled out.
EQUAL_SHARE = 0.25
# Shapes (stages, ranks, replicas) whose best layout is adapted.
SHAPES = 4


def for_unlike_devices(
    problem: Problem, searcher: Searcher, made: Plan, layout: Layout, freedom: Freedom, *, deadline: float
) -> Plan:
    """The plan, or a better one for the ranks' speeds, with a rung that says what was changed.

    The certificate's bound becomes that of equal replicas all of whose ranks run at full speed.
    """
    assert made.predicted is not None
    assert made.certificate is not None
    equal = replace(problem, cluster=problem.cluster.model_copy(update={"slow": {}}))
    incumbent = Incumbent(Pricer(equal, searcher).seconds)
    outcome = climb(searcher.within(searcher.capacity), incumbent, freedom, deadline=deadline)[-1].outcome
    pricer, costs = Pricer(problem, searcher), searcher.source.costs
    fixed = searcher.rules.boundaries is not None
    by_step = made.certificate.objective == "step-time"
    tokens = problem.training.tokens_per_step

    def value(found: Adapted) -> float:
        """Step seconds, or seconds delivered."""
        return found.seconds if by_step else tokens / found.predicted.goodput_tokens_per_second

    best, base = Adapted(made, made.predicted), layout
    for number, other in enumerate(_distinct(layout, incumbent)):
        if number and time.monotonic() > deadline:
            break
        found = adapt(pricer.plan(other), costs, problem.memory_bytes, fixed_stages=fixed)
        if value(found) < value(best):
            best, base = found, other
    gain = 1.0 - value(best) / made.certificate.objective_value
    changes = "".join(f", {change}" for change in best.changes)
    rung = LadderRung(
        freedom="+ unlike devices",
        step_time_seconds=best.seconds,
        gain_over_previous=1.0 - best.seconds / made.predicted.step_time_seconds,
        layout=f"{describe(base)}{changes}",
        reason="" if gain >= NOTHING else "buys nothing here",
    )
    bound = min(outcome.bound, value(best))  # renewal and degraded operation only make it longer
    gap = 1.0 - bound / value(best)
    certificate = made.certificate.model_copy(
        update={
            "objective_value": value(best),
            "bound": bound,
            "gap": gap,
            "status": "optimal" if gap <= TOLERANCE else "feasible",
        }
    )
    return best.plan.with_results(
        predicted=best.predicted,
        certificate=certificate,
        ladder=(*made.ladder, rung),
        alternatives=made.alternatives,
        rate_choices=made.rate_choices,
    )


def _distinct(first: Layout, incumbent: Incumbent) -> list[Layout]:
    """A layout, and the best of every shape of those that were priced, the fastest shapes first."""
    found: dict[tuple[int, int, int], Layout] = {}
    for layout, seconds in sorted(incumbent.priced.items(), key=lambda item: item[1]):
        grid = layout.grid
        if len(found) < SHAPES and seconds < float("inf"):
            found.setdefault((grid.num_stages, grid.num_ranks, grid.num_replicas), layout)
    return list(dict.fromkeys([first, *found.values()]))
