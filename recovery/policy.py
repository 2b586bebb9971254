"""The way on: which plan trains without the devices that are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cost_models.sources import survivors_costs
from planner.contingency import replan
from planner.start import read_profile
from recovery.rebalance import rebalance
from specs.contingency import find_contingency, plan_after
from specs.options import TrainOptions
from specs.plan import Alternative, Plan


@dataclass(frozen=True)
class Way:
    """A plan to go on with; `rejected` names the other ways, each with its reason."""

    plan: Plan
    policy: str
    layout: str
    rejected: tuple[str, ...] = ()


# Gives the way on without some ranks of the run's plan and with some slow ones (factor by rank), or raises a
# `PlaitError` that says why there is none.
WayOn = Callable[[frozenset[int], Mapping[int, float]], Way]


class Policy:
    """Of one run: what was solved with the plan is looked up, everything else is solved when it happens."""

    def __init__(self, plan: Plan, options: TrainOptions) -> None:
        self._plan = plan
        self._profile = read_profile(options.profile)
        self._seconds = options.replan_seconds

    def way_on(self, lost: frozenset[int], slow: Mapping[int, float] | None = None) -> Way:
        """Without the lost devices, with less work for the slow ones (factor by rank).

        Raises `NoPlanFitsError` or `TimeLimitError` when there is no way, `BadInputError` when it cannot be priced.
        """
        way = self._without(lost)
        used = {rank: factor for rank, factor in (slow or {}).items() if rank in ranks_of(way.plan)}
        if not used:
            return way
        speeds = {rank: 1.0 / factor for rank, factor in used.items()}
        cluster = way.plan.cluster.model_copy(update={"slow": {**way.plan.cluster.slow, **speeds}})
        plan = way.plan.model_copy(update={"cluster": cluster})
        found = rebalance(plan, used, survivors_costs(self._profile, plan.training, cluster))
        layout = "; ".join(filter(None, (way.layout, found.layout or "no other cut is faster")))
        return Way(found.plan, way.policy, layout, way.rejected)

    def _without(self, lost: frozenset[int]) -> Way:
        used = sorted(lost.intersection(ranks_of(self._plan)))
        if not used:
            return Way(self._plan, "as planned", "")
        known = find_contingency(self._plan, used[0]) if len(lost) == 1 else None
        if known is not None:
            plan = plan_after(self._plan, known, used[0])
            return Way(plan, known.policy, known.layout, _rejected(known.alternatives))
        missing = tuple(sorted({*self._plan.cluster.missing, *lost.difference(used)}))  # spares that are lost too
        plan = self._plan.model_copy(update={"cluster": self._plan.cluster.model_copy(update={"missing": missing})})
        costs = survivors_costs(self._profile, plan.training, plan.cluster)
        solved = replan(plan, costs, used, time_limit_seconds=self._seconds)
        return Way(plan_after(plan, solved), solved.policy, solved.layout, _rejected(solved.alternatives))


def _rejected(alternatives: Iterable[Alternative]) -> tuple[str, ...]:
    return tuple(f"{alternative.layout}: {alternative.reason}" for alternative in alternatives)


def ranks_of(plan: Plan) -> tuple[int, ...]:
    """Ranks that a plan uses, ascending: their order is that of process numbers."""
    return tuple(sorted(rank for replica in plan.replicas for rank in replica.ranks))


def peers(plan: Plan) -> dict[int, tuple[int, ...]]:
    """For each rank those that have the same work: of the same stage of any replica with the same share."""
    by_work: dict[tuple[int, int, int], list[int]] = {}
    for replica in plan.replicas:
        pipeline = plan.pipelines[replica.pipeline]
        starts = pipeline.stage_starts()
        for stage in range(len(pipeline.stages)):
            work = (replica.pipeline, stage, replica.sequences)
            by_work.setdefault(work, []).extend(replica.ranks[starts[stage] : starts[stage + 1]])
    return {rank: tuple(ranks) for ranks in by_work.values() for rank in ranks}


def words(numbers: Iterable[int], noun: str = "rank") -> str:
    """`rank 3`, `ranks 1 and 4`."""
    names = [str(number) for number in sorted(numbers)]
    if len(names) == 1:
        return f"{noun} {names[0]}"
    return f"{noun}s {', '.join(names[:-1])} and {names[-1]}"
