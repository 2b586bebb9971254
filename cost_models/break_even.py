"""At which failure rate one plan overtakes another: the fast one against the one that a failure hurts less."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cost_models.failures import default_failure_model
from cost_models.goodput import checkpoint_bytes_per_rank, factors_of
from specs.failures import FailureModel
from specs.plan import Plan, Prediction


@dataclass(frozen=True, slots=True)
class Candidate:
    """What goodput depends on in a layout; fields as in `goodput.factors_of`."""

    tokens_per_second: float
    num_ranks: int
    num_replicas: int
    devices_per_node: int
    step_seconds: float
    state_bytes_per_rank: int
    ranks_per_group: int | None = None
    spare_nodes: int = 0

    def goodput(self, failures: FailureModel) -> float:
        """Kept tokens per second under a failure model."""
        found = factors_of(
            num_ranks=self.num_ranks,
            num_replicas=self.num_replicas,
            devices_per_node=self.devices_per_node,
            step_seconds=self.step_seconds,
            state_bytes_per_rank=self.state_bytes_per_rank,
            ranks_per_group=self.ranks_per_group,
            spare_nodes=self.spare_nodes,
            failures=failures,
        )
        return self.tokens_per_second * found.factor


def candidate_of(plan: Plan, predicted: Prediction) -> Candidate:
    """A plan with its prediction as a candidate."""
    node = max(group.devices_per_node for group in plan.cluster.nodes)
    return Candidate(
        tokens_per_second=predicted.tokens_per_second,
        num_ranks=plan.world_size,
        num_replicas=len(plan.replicas),
        devices_per_node=node,
        step_seconds=predicted.step_time_seconds,
        state_bytes_per_rank=checkpoint_bytes_per_rank(plan),
        ranks_per_group=max(stage.num_ranks for pipeline in plan.pipelines for stage in pipeline.stages),
        spare_nodes=(plan.cluster.num_usable - plan.world_size) // node,
    )


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Equal goodput at `failures_per_device_day`, which is `multiplier` times the model's rate.

    `second_wins_above`: beyond it the second plan is ahead, else the first.
    """

    multiplier: float
    failures_per_device_day: float
    second_wins_above: bool

    @property
    def days_between_failures(self) -> float:
        """Days between two failures of one device."""
        return 1.0 / self.failures_per_device_day

    def sentence(self, first: str, second: str) -> str:
        """`first wins unless a device fails more often than once in 312 days, then second`."""
        calm, stormy = (first, second) if self.second_wins_above else (second, first)
        days = self.days_between_failures
        return f"{calm} wins unless a device fails more often than once in {days:,.0f} days, then {stormy}"


def break_even(
    first: Candidate, second: Candidate, failures: FailureModel | None = None, *, widest: float = 1000.0
) -> BreakEven | None:
    """Where the two plans deliver the same; None when one is ahead from 1/`widest` to `widest` times the rate.

    With several crossings (integer replicas make steps) the one nearest to the model's rate is taken.
    """
    model = failures if failures is not None else default_failure_model()

    def lead(log_multiplier: float) -> float:
        scaled = model.scaled(math.exp(log_multiplier))
        ours, theirs = first.goodput(scaled), second.goodput(scaled)
        return ours - theirs

    edge = math.log(widest)
    grid = [edge * step / 24.0 for step in range(-24, 25)]
    leads = [lead(point) for point in grid]
    crossings = [
        (grid[i], grid[i + 1])
        for i in range(len(grid) - 1)
        if leads[i] * leads[i + 1] < 0.0 or (leads[i] == 0.0 and leads[i + 1] != 0.0)
    ]
    if not crossings:
        return None
    low, high = min(crossings, key=lambda pair: abs(pair[0] + pair[1]))
    first_at_low = lead(low) >= 0.0
    for _ in range(40):
        middle = (low + high) / 2.0
        if (lead(middle) >= 0.0) == first_at_low:
            low = middle
        else:
            high = middle
    multiplier = math.exp((low + high) / 2.0)
    return BreakEven(multiplier, multiplier * model.failures_per_device_day, first_at_low)


def best_by_rate(
    candidates: Sequence[Candidate], failures: FailureModel | None = None, *, widest: float = 100.0
) -> list[tuple[int, float]]:
    """(candidate, failures per device-day up to which it delivers most), from rare failures to frequent ones.

    Rates from 1/`widest` to `widest` times the model's; the last entry's is infinite.  Candidates that are ahead for
    less than a step of the grid (a factor of 1.4) may be missed.
    """
    model = failures if failures is not None else default_failure_model()

    fastest_first = sorted(range(len(candidates)), key=lambda index: -candidates[index].tokens_per_second)

    def best(log_multiplier: float) -> int:
        scaled = model.scaled(math.exp(log_multiplier))
        found, most = fastest_first[0], 0.0
        for index in fastest_first:
            if candidates[index].tokens_per_second <= most:
                break  # G X is at most 1
            goodput = candidates[index].goodput(scaled)
            if goodput > most:
                found, most = index, goodput
        return found

    edge = math.log(widest)
    steps = math.ceil(2.0 * edge / math.log(2.0))
    grid = [edge * step / steps for step in range(-steps, steps + 1)]
    winners = [best(point) for point in grid]
    found: list[tuple[int, float]] = []
    for (low, here), (high, there) in pairwise(zip(grid, winners, strict=True)):
        while here != there:  # a third one may lie between: it is found on the way
            point, after = _next_change(best, low, high, here)
            found.append((here, model.failures_per_device_day * math.exp(point)))
            low, here = point, after
    return [*found, (winners[-1], math.inf)]


def _next_change(best: Callable[[float], int], low: float, high: float, here: int) -> tuple[float, int]:
    """Where `here` stops being the best, and what is then."""
    after = best(high)
    while high - low > 1e-4:
        middle = (low + high) / 2.0
        now = best(middle)
        if now == here:
            low = middle
        else:
            high, after = middle, now
    return high, after
