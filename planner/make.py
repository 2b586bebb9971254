"""From a model, a cluster and costs to a complete plan: layout, prediction, certificate, ladder, alternatives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypedDict

from cost_models.goodput import checkpoint_bytes_per_rank
from cost_models.interface import CostModel
from planner.alternatives import alternatives
from planner.goal import make_worth
from planner.grid_search import Incumbent
from planner.infeasible import nothing_found
from planner.ladder import NOTHING, Climb, as_ladder, goodput_rung, memory_rung
from planner.memory_goal import MEMORY_TOLERANCE, least_memory
from planner.outcome import Outcome
from planner.problem import CostMaker, Pricer, Problem, context_degrees, make_searcher
from planner.rate_choices import rate_choices
from planner.search import TOLERANCE, Engine, Freedom, Searcher
from planner.unlike_domains_rung import EQUAL_SHARE as EQUAL_RANKS_SHARE
from planner.unlike_domains_rung import for_unlike_domains, unlike_domains
from planner.unlike_rung import EQUAL_SHARE, for_unlike_devices
from specs.errors import PlaitError
from specs.plan import Certificate, Contingency, Objective, Plan

Losses = Callable[[Plan, float], tuple[Contingency, ...]]


def make_plan(
    problem: Problem,
    make_costs: CostMaker,
    *,
    objective: Objective = "goodput",
    freedom: Freedom = "interleaved",
    engine: Engine = "dp",
    time_limit_seconds: float = 60.0,
    top_k: int = 3,
    slowdown: float = 0.05,
    losses: Losses | None = None,
) -> Plan:
    """The best plan under a freedom.

    Every rung of the ladder is searched by step time; goodput and memory add a last one (`planner.goal`,
    `planner.memory_goal`), and so do nodes with unlike numbers of ranks (`planner.unlike_domains_rung`).  On a given
    cluster tokens per dollar are goodput over a constant.  `slowdown`: the fraction of step time that the objective
    memory may give up.  `losses` gives the contingencies of a plan that took so many seconds; None for none.

    Raises `NoPlanFitsError`, `TimeLimitError` (nothing found in time) and `BadInputError` (sizes that no layout
    divides, costs that were not measured).
    """
    start, whole = time.monotonic(), unlike_domains(problem, objective, freedom)
    equal = partial(
        _of_equal_ranks,
        problem,
        make_costs,
        objective=objective,
        freedom=freedom,
        engine=engine,
        top_k=top_k,
        slowdown=slowdown,
    )
    if whole is None:
        return equal(time_limit_seconds=time_limit_seconds, losses=losses)
    made: Plan | None = None
    why: PlaitError | None = None
    try:
        made = equal(time_limit_seconds=time_limit_seconds * EQUAL_RANKS_SHARE, losses=None)
    except PlaitError as error:
        why = error
    costs = make_costs(problem.cluster, problem.training)
    found = for_unlike_domains(
        problem,
        whole,
        costs,
        made,
        objective=objective,
        engine=engine,
        freedom=freedom,
        start=start,
        deadline=start + time_limit_seconds,
    )
    if found is None:
        assert why is not None
        raise why
    return _with_losses(found, losses, start)


def _of_equal_ranks(
    problem: Problem,
    make_costs: CostMaker,
    *,
    objective: Objective,
    freedom: Freedom,
    engine: Engine,
    time_limit_seconds: float,
    top_k: int,
    slowdown: float,
    losses: Losses | None,
) -> Plan:
    """The best plan of stages and replicas of equally many ranks; slow ones are then spared."""
    start = time.monotonic()
    unlike = bool(problem.cluster.slow) and objective != "memory" and freedom in ("modules", "cuts", "interleaved")
    if problem.cluster.slow and freedom == "interleaved":  # shares and cuts are fitted to stages of one run
        freedom = "cuts"
    whole = start + time_limit_seconds
    deadline = start + time_limit_seconds * (EQUAL_SHARE if unlike else 1.0)
    searcher, pricer, climb, complete, elsewhere = _climbed(
        problem,
        make_costs(problem.cluster, problem.training),
        engine,
        freedom,
        deadline=deadline,
        # For goodput the fastest is a rung like others.
        tolerance=TOLERANCE if objective in ("step-time", "memory") else NOTHING,
    )
    top = climb.top
    if top.layout is None:
        raise nothing_found(
            problem, make_costs, searcher, freedom, complete=complete, time_limit_seconds=time_limit_seconds
        )
    outcome, value = top.outcome, pricer.seconds
    if objective == "memory":
        limit = top.seconds * (1.0 + slowdown)
        outcome = least_memory(searcher, pricer, freedom, limit_seconds=limit, deadline=deadline)
    elif objective != "step-time":
        value = pricer.seconds_delivered
        outcome = _deliver(problem, searcher, pricer, freedom, deadline=deadline)
    assert outcome.layout is not None
    # Other processes may still be searching the ladder.
    plan = _with_losses(pricer.plan(outcome.layout), None if unlike else losses, start)
    rungs = climb.rungs()
    if objective != "memory":  # G X is at most 1, so seconds bound what is delivered
        outcome.bound = min(outcome.bound, elsewhere)
        better = min((rung.layout for rung in rungs if rung.layout is not None), key=value)
        if value(better) < outcome.seconds:  # within what searches leave open
            outcome.layout, outcome.seconds = better, value(better)
            plan = _with_losses(pricer.plan(better), None if unlike else losses, start)
    chosen, ladder, predictions = outcome.layout, as_ladder(rungs), pricer.predictions
    if objective in ("goodput", "tokens-per-dollar"):
        ladder = (*ladder, goodput_rung(predictions[top.layout], predictions[chosen], chosen))
    elif objective == "memory":
        ladder = (*ladder, memory_rung(predictions[top.layout], predictions[chosen], chosen))
    fitting = {layout: p for layout, p in predictions.items() if pricer.fits(p)}
    made = plan.with_results(
        predicted=predictions[chosen],
        certificate=Certificate(
            engine=engine,
            objective=objective,
            status="optimal"
            if outcome.gap <= (TOLERANCE if objective != "memory" else MEMORY_TOLERANCE)
            else "feasible",
            objective_value=outcome.seconds,
            bound=outcome.bound,
            gap=outcome.gap,
            seconds=time.monotonic() - start,
            freedom=freedom,
            constraints=problem.constraints.texts(),
            **_work([rung.outcome for rung in rungs], outcome),
        ),
        ladder=ladder,
        rate_choices=rate_choices(plan, fitting, chosen),
        alternatives=alternatives(
            searcher, climb.incumbent, predictions, chosen, pricer.memory_bytes, top_k, deadline=whole
        ),
    )
    if unlike:
        return _with_losses(for_unlike_devices(problem, searcher, made, chosen, freedom, deadline=whole), losses, start)
    return made


class _Climbed(NamedTuple):
    """What has searched a problem best; `elsewhere`: a bound of the step seconds of all else that was searched."""

    searcher: Searcher
    pricer: Pricer
    climb: Climb
    complete: bool
    elsewhere: float


def _climbed(
    problem: Problem, costs: CostModel, engine: Engine, freedom: Freedom, *, deadline: float, tolerance: float
) -> _Climbed:
    """Without context parallelism, and with its degrees while they help."""

    def at(context: int) -> _Climbed:
        searcher = make_searcher(problem, costs, engine, context)
        pricer = Pricer(problem, searcher)
        climb = Climb(searcher, pricer, freedom, deadline=deadline, tolerance=tolerance)
        return _Climbed(searcher, pricer, climb, climb.top.outcome.complete, float("inf"))

    best = at(1)
    if not best.complete:
        return best
    for context in context_degrees(problem, nothing_fits=best.climb.top.layout is None):
        other = at(context)
        better = other.climb.top.seconds < best.climb.top.seconds
        best, left = (other, best) if better else (best, other)
        elsewhere = min(best.elsewhere, left.elsewhere, left.climb.top.outcome.bound)
        best = best._replace(complete=True, elsewhere=elsewhere)
        if best.climb.top.layout is not None and not better:  # more sharing only sends more
            break
    return best


def _with_losses(plan: Plan, losses: Losses | None, start: float) -> Plan:
    return plan if losses is None else plan.with_results(contingencies=losses(plan, time.monotonic() - start))


def _deliver(problem: Problem, searcher: Searcher, pricer: Pricer, freedom: Freedom, *, deadline: float) -> Outcome:
    """The search by goodput, from the layouts that the search by step time priced."""
    goal = Incumbent(pricer.seconds_delivered)
    for layout, prediction in list(pricer.predictions.items()):
        if pricer.fits(prediction):
            goal.offer(layout, 0.0)
    some = next(iter(pricer.predictions))
    worth = make_worth(
        num_ranks=searcher.topology.num_ranks,
        devices_per_node=max(group.devices_per_node for group in problem.cluster.nodes),
        state_bytes_per_rank=checkpoint_bytes_per_rank(pricer.plan(some)),
    )
    return searcher.search(freedom, goal, deadline=deadline, worth=worth)


class _Work(TypedDict):
    labels: int
    nodes: int
    evaluated: int
    pruned: dict[str, int]


def _work(rungs: list[Outcome], last: Outcome) -> _Work:
    """What the searches of all rungs and the last one did; pruned by those of the last rung on."""
    searches = rungs if last in rungs else [*rungs, last]
    return {
        "labels": sum(outcome.labels for outcome in searches),
        "nodes": sum(outcome.nodes for outcome in searches),
        "evaluated": sum(outcome.evaluated for outcome in searches),
        "pruned": dict(sum((outcome.pruned for outcome in (rungs[-1], *searches[len(rungs) :])), Counter())),
    }
