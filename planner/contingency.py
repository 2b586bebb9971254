"""What to do when ranks are lost: plans that go on with what is left, priced like any plan.

`contingencies` solves the loss of one rank of every kind when a plan is made; `replan` solves any loss when it
happens.  A whole global batch comes first, then the least step time; what was not taken is kept with its reason.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import ValidationError

from cost_models.interface import CostModel
from cost_models.step import Price
from planner.explain import memory_limit
from planner.survivors import Candidate, Slack, Survivors, Way
from specs.contingency import remade
from specs.errors import BadInputError, NoPlanFitsError, TimeLimitError
from specs.plan import Alternative, Contingency, ContingencyPolicy, Plan, Prediction
from specs.units import num_bytes

# Candidates of a policy that are priced, the best by their estimates, when a plan is made and when a rank is lost.
PRICED_AHEAD = 3
PRICED_ON_LOSS = 4
# Times that everything is composed anew with less memory, when a price finds more than the tables of the search.
TIGHTENED = 6
# What is composed again with less memory may be this part faster than before: each stage is a rounding, not the best.
ROUNDED = 0.05
# Of ways whose steps differ by less than this, the first in the order is taken: it moves least.
AS_GOOD = 0.005
ORDER: tuple[ContingencyPolicy, ...] = ("spare", "reduced", "drop", "resplit", "split")


@dataclass(frozen=True)
class _Priced:
    """A candidate and its price."""

    candidate: Candidate
    price: Price

    @property
    def predicted(self) -> Prediction:
        return self.price.predicted

    def rank(self, limit: int) -> tuple[bool, int, float]:
        """Order: what fits, with the most of the batch, soonest."""
        over = self.price.peak_memory_bytes > limit
        return over, -self.candidate.global_batch, self.predicted.step_time_seconds


class Replanner:
    """Solves losses of one plan; what was composed and priced for one serves the next."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self.plan = plan
        self._costs = costs
        self._limit = memory_limit(plan)
        self._survivors = Survivors(plan, costs, self._limit - costs.reserved_bytes)
        self._prices: dict[object, Price] = {}

    def solve(
        self,
        lost: Sequence[int],
        *,
        deadline: float = float("inf"),
        ahead: bool = False,
        policies: Sequence[ContingencyPolicy] = ORDER,
    ) -> Contingency:
        """The best way on without these ranks.  `ahead`: quickly, of fewer ways.  `policies`: these only.

        Raises `BadInputError` for ranks that the plan does not have, `NoPlanFitsError` when nothing can run, and
        `TimeLimitError` when nothing was priced before `deadline` (of `time.monotonic`).
        """
        used = {rank for replica in self.plan.replicas for rank in replica.ranks}
        strange = sorted(set(lost) - used)
        if strange or not lost:
            raise BadInputError(
                f"rank {strange[0]} is not in the plan, so its loss changes nothing. Name ranks of its replicas."
                if strange
                else "no rank is named as lost. Name at least one."
            )
        ways = self._most_promising(lost, deadline, policies, ahead=ahead)
        found: list[_Priced] = []
        for way in ways:
            if time.monotonic() > deadline and found:
                break
            fitting = [one.rank(self._limit) for one in found if one.price.peak_memory_bytes <= self._limit]
            least = min(fitting, default=None)
            if self._is_behind(way, lost, found):
                continue
            priced = self._priced(way, lost, least)
            if priced is not None:
                found.append(priced)
        if not found:
            raise self._nothing(lost, deadline)
        found.sort(key=lambda one: one.rank(self._limit))
        found.insert(0, found.pop(self._least_change(found)))
        best, over = found[0], found[0].price.peak_memory_bytes - self._limit
        if over > 0:
            raise NoPlanFitsError(
                f"without {_ranks(lost)} nothing fits {num_bytes(self._limit)}: the closest layout "
                f"({best.candidate.policy}: {best.candidate.layout}) needs {num_bytes(over)} more. Wait for the "
                "device, add spares, or plan anew with a smaller micro-batch or a larger --memory-cap."
            )
        return self._contingency(lost, best, found[1:])

    def _is_behind(self, way: Way, lost: Sequence[int], found: Sequence[_Priced]) -> bool:
        """Whether another way of the same policy is better for certain: then its price would change nothing."""
        candidate = self._survivors.candidate(way, lost)
        if candidate is None:
            return False
        at_best = False, -candidate.global_batch, candidate.least * (1.0 - ROUNDED)
        return any(one.candidate.policy == way.policy and one.rank(self._limit) <= at_best for one in found)

    def _least_change(self, found: Sequence[_Priced]) -> int:
        """Of those that are as good as the best, the one that moves least."""
        *limits, seconds = found[0].rank(self._limit)
        close = []
        for index, one in enumerate(found):
            *own, other = one.rank(self._limit)
            if own == limits and other <= seconds * (1.0 + AS_GOOD):
                close.append((ORDER.index(one.candidate.policy), index))
        return min(close)[1]

    def _most_promising(
        self, lost: Sequence[int], deadline: float, policies: Sequence[ContingencyPolicy], *, ahead: bool
    ) -> list[Way]:
        """The best of every policy by their estimates, the best of all first."""
        by_policy: defaultdict[str, list[tuple[tuple[int, float], Way]]] = defaultdict(list)
        for way in self._survivors.ways(lost, few=ahead):
            if time.monotonic() > deadline:
                break
            candidate = self._survivors.candidate(way, lost) if way.policy in policies else None
            if candidate is not None:
                by_policy[way.policy].append((self._estimate(candidate), way))
        most = PRICED_AHEAD if ahead else PRICED_ON_LOSS
        return [way for _, way in sorted(one for found in by_policy.values() for one in sorted(found)[:most])]

    def _priced(self, way: Way, lost: Sequence[int], best: tuple[bool, int, float] | None = None) -> _Priced | None:
        """A way at its price; composed again with less memory where the price finds more than the tables say, unless
        it is behind the `best` as it is.
        """
        found = None
        for _ in range(TIGHTENED):
            candidate = self._survivors.candidate(way, lost)
            if candidate is None:
                break
            try:
                found = _Priced(candidate, self._price(candidate, lost))
            except ValidationError:  # a plan's own checks have the last word on what can run
                return None
            over = found.price.peak_memory_bytes - self._limit
            if over <= 0 or (best is not None and (False, *found.rank(self._limit)[1:]) >= best):
                break
            slack = self._survivors.slack
            if self._is_healthy(found.price.peak_memory_rank, candidate):
                self._survivors.slack = slack._replace(healthy=_more(slack.healthy, over))
            else:
                self._survivors.slack = slack._replace(damaged=_more(slack.damaged, over))
        self._survivors.slack = Slack()
        return found

    def _is_healthy(self, rank: int, candidate: Candidate) -> bool:
        return any(
            rank in replica.ranks
            for replica, share in zip(self.plan.replicas, candidate.sequences, strict=True)
            if share
        )

    @staticmethod
    def _estimate(candidate: Candidate) -> tuple[int, float]:
        return -candidate.global_batch, candidate.seconds

    def _price(self, candidate: Candidate, lost: Sequence[int]) -> Price:
        key: object = (candidate.policy, candidate.pipelines, candidate.replicas, candidate.sequences)
        if not candidate.replicas:  # the same whichever rank of a replica is gone
            key = candidate.sequences, candidate.pipelines
        if key not in self._prices:
            plan = remade(
                self.plan,
                lost,
                sequences=candidate.sequences,
                pipelines=candidate.pipelines,
                replaced=candidate.replaced,
                stand_ins=candidate.replicas,
                global_batch=candidate.global_batch,
            )
            self._prices[key] = Price(plan, self._costs)
        return self._prices[key]

    def _contingency(self, lost: Sequence[int], best: _Priced, others: Sequence[_Priced]) -> Contingency:
        seen = {best.candidate.policy}
        alternatives = []
        for other in others:
            if other.candidate.policy not in seen:
                seen.add(other.candidate.policy)
                alternatives.append(
                    Alternative(
                        layout=f"{other.candidate.policy}: {other.candidate.layout}",
                        step_time_seconds=other.predicted.step_time_seconds,
                        peak_memory_bytes=other.predicted.peak_memory_bytes,
                        reason=self._reason(best, other),
                    )
                )
        return Contingency(
            lost=tuple(lost),
            policy=best.candidate.policy,
            layout=best.candidate.layout,
            pipelines=best.candidate.pipelines,
            replicas=best.candidate.replicas,
            replaced=best.candidate.replaced,
            sequences=best.candidate.sequences,
            global_batch=best.candidate.global_batch,
            predicted=best.predicted,
            alternatives=tuple(alternatives),
        )

    def _reason(self, best: _Priced, other: _Priced) -> str:
        over = other.predicted.peak_memory_bytes - self._limit
        if over > 0:
            return f"does not fit: {num_bytes(over)} too much"
        batch = self.plan.training.global_batch
        if other.candidate.global_batch < batch <= best.candidate.global_batch:
            return f"the batch would shrink to {other.candidate.global_batch} of {batch} sequences"
        speed = best.predicted.tokens_per_second / other.predicted.tokens_per_second - 1.0
        if abs(speed) <= AS_GOOD:
            return "as fast, and moves more"
        return f"{100.0 * speed:.2f} % slower"

    def _nothing(self, lost: Sequence[int], deadline: float) -> Exception:
        if time.monotonic() > deadline:
            return TimeLimitError(f"no way on without {_ranks(lost)} was found in time. Give more time.")
        self._survivors.slack = Slack(-(2**62), -(2**62))
        if any(self._survivors.candidate(way, lost) is not None for way in self._survivors.ways(lost)):
            return NoPlanFitsError(
                f"without {_ranks(lost)} nothing fits {num_bytes(self._limit)}, even in the largest blocks with full "
                "recompute. Wait for the device, add spares, or plan anew with a smaller micro-batch or a larger "
                "--memory-cap."
            )
        return NoPlanFitsError(
            f"without {_ranks(lost)} no layout of the {self.plan.world_size - len(lost)} ranks that are left divides "
            "the model and the batch. Wait for the device or resume with fewer ranks from a new plan."
        )


def replan(
    plan: Plan,
    costs: CostModel,
    lost_ranks: Sequence[int],
    *,
    time_limit_seconds: float = 10.0,
    policies: Sequence[ContingencyPolicy] = ORDER,
) -> Contingency:
    """The best way on without `lost_ranks` of a plan (which may itself be one that goes on after a loss).

    Devices of the cluster that the plan does not use and that are not missing are spares.  `policies`: of these only.
    Raises as `Replanner.solve`.
    """
    deadline = time.monotonic() + time_limit_seconds
    return Replanner(plan, costs).solve(lost_ranks, deadline=deadline, policies=policies)


def contingencies(plan: Plan, costs: CostModel, *, time_limit_seconds: float = 10.0) -> tuple[Contingency, ...]:
    """The loss of one rank of every kind: ranks of a stage of replicas that lie alike are one kind.

    Kinds that stand for most ranks come first; those that the time does not suffice for (one is always solved) are
    left to `replan`.  So is a kind for which nothing fits or was measured: its loss ends the run until the device is
    back.
    """
    if plan.world_size == 1:
        return ()
    deadline = time.monotonic() + time_limit_seconds
    replanner = Replanner(plan, costs)
    found: list[Contingency] = []
    for ranks in kinds_of_ranks(plan):
        if found and time.monotonic() > deadline:
            break
        try:
            solved = replanner.solve(ranks[:1], ahead=True)
        except (NoPlanFitsError, BadInputError):
            continue
        found.append(solved.model_copy(update={"equivalent": ranks}))
    return tuple(found)


def kinds_of_ranks(plan: Plan) -> list[tuple[int, ...]]:
    """Ranks whose single loss leaves the same problem under other names, the most numerous kinds first.

    # same pipeline, share of the batch, stage, nodes relative to the replica's first, and speeds
    """
    starts = plan.cluster.node_starts()
    node = [index for index, (start, stop) in enumerate(pairwise(starts)) for _ in range(start, stop)]
    slow = plan.cluster.slow
    kinds: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for replica in plan.replicas:
        borders = bytes(node[a] != node[b] for a, b in pairwise(replica.ranks))
        speeds = tuple(slow.get(rank, 1.0) for rank in replica.ranks) if slow else ()
        positions = plan.pipelines[replica.pipeline].stage_starts()
        for stage, (start, stop) in enumerate(pairwise(positions)):
            for rank in replica.ranks[start:stop]:
                key = (replica.pipeline, replica.sequences, borders, speeds, stage, slow.get(rank, 1.0))
                kinds[key].append(rank)
    return sorted((tuple(ranks) for ranks in kinds.values()), key=lambda ranks: (-len(ranks), ranks))


def _ranks(lost: Sequence[int]) -> str:
    return f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"


def _more(slack: int, over: int) -> int:
    """A next slack: modules come in whole ones, so a little more than is missing, and more each time."""
    return slack + over + (slack + over) // 4
