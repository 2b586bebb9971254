"""The last rung of the ladder where ranks have unlike speeds: which layouts to adapt to them, and what it bought.

The shape that is best with adapted shares and cuts is rarely the one that is best with equal ranks.  So the best
layouts of several shapes are adapted (`planner.unlike`), those first that promise most:

    promised = t / mean over groups of v      t seconds with equal ranks; a group: a stage of a replica; v speed of its
                                              slowest rank: layers and micro-batches can be moved from group to group

Shapes that the search priced come first; of others, which equal ranks ruled out, t is a bound.
"""

from __future__ import annotations

import time
from dataclasses import replace

from planner.describe import describe
from planner.grid_search import Incumbent
from planner.ladder import NOTHING, Climb
from planner.layout import Layout, make_replicas
from planner.problem import Pricer, Problem
from planner.search import TOLERANCE, Freedom, Searcher
from planner.shapes import Shape, best_of, promising, shape_of
from planner.space import Grid, Topology
from planner.unlike import Adapted, adapt
from specs.cluster import ClusterSpec
from specs.plan import LadderRung, Plan

# Part of the time for layouts that treat all ranks alike: no bound of theirs knows of slow ranks, so few are ruled out.
EQUAL_SHARE = 0.25
# Shapes (stages, ranks, replicas) whose best layout is adapted.
SHAPES = 8


def for_unlike_devices(
    problem: Problem, searcher: Searcher, made: Plan, layout: Layout, freedom: Freedom, *, deadline: float
) -> Plan:
    """The plan, or a better one for the ranks' speeds, with a rung that says what was changed.

    The certificate's bound becomes that of equal replicas all of whose ranks run at full speed.
    """
    assert made.predicted is not None
    assert made.certificate is not None
    equal = replace(problem, cluster=problem.cluster.model_copy(update={"slow": {}}))
    equal_pricer = Pricer(equal, searcher)
    climb = Climb(searcher.within(searcher.capacity), equal_pricer, freedom, deadline=deadline)
    outcome, _ = climb.top.outcome, climb.rungs()
    incumbent = climb.incumbent
    pricer, costs = Pricer(problem, searcher), searcher.source.costs
    fixed = searcher.rules.boundaries is not None
    by_step = made.certificate.objective == "step-time"
    tokens = problem.training.tokens_per_step

    def value(found: Adapted) -> float:
        """Step seconds, or seconds delivered."""
        return found.seconds if by_step else tokens / found.predicted.goodput_tokens_per_second

    best, base = Adapted(made, made.predicted), layout

    def offer(other: Layout) -> None:
        nonlocal best, base
        found = adapt(pricer.plan(other), costs, problem.memory_bytes, fixed_stages=fixed)
        if value(found) < value(best):
            best, base = found, other

    def promised(seconds: float, grid: Grid) -> float:
        return seconds / mean_speed(grid, problem.cluster, searcher.topology)

    offer(layout)
    seen = {shape_of(layout.grid)}
    for other in sorted(_best_by_shape(incumbent), key=lambda other: promised(incumbent.priced[other], other.grid)):
        if len(seen) <= SHAPES and time.monotonic() < deadline:
            seen.add(shape_of(other.grid))
            offer(other)
    for promise, grids in promising(searcher, lambda grid: promised(1.0, grid)):
        if len(seen) > SHAPES or promise >= value(best) or time.monotonic() > deadline:
            break
        if shape_of(grids[0]) not in seen:
            found = best_of(grids, searcher, equal_pricer.seconds, within=best.seconds, deadline=deadline)
            if found is not None:
                seen.add(shape_of(grids[0]))
                offer(found)
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


def _best_by_shape(incumbent: Incumbent) -> list[Layout]:
    best: dict[Shape, Layout] = {}
    for layout, seconds in sorted(incumbent.priced.items(), key=lambda item: item[1]):
        if seconds < float("inf"):
            best.setdefault(shape_of(layout.grid), layout)
    return list(best.values())


def mean_speed(grid: Grid, cluster: ClusterSpec, topology: Topology) -> float:
    """Mean over the stages of all replicas of the speed of their slowest rank."""
    groups = [
        [replica.ranks[start : start + grid.num_ranks] for start in range(0, len(replica.ranks), grid.num_ranks)]
        for replica in make_replicas(grid, topology)
    ]
    speeds = [min(cluster.slow.get(rank, 1.0) for rank in group) for row in groups for group in row]
    return sum(speeds) / len(speeds)
