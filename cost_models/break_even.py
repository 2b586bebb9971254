"""At which failure rate one plan overtakes another: the fast one against the one that a failure hurts less."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        spare_nodes=(len(plan.cluster.ranks()) - plan.world_size) // node,
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
