"""The price of a plan: step time by term, memory of the fullest rank, goodput.

step = pipeline of the slowest replica + exposed gradient sync + optimizer + host
stages run in an exact simulation of the schedule; work is done per pipeline and stage, not per rank
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cost_models.buckets import holdings
from cost_models.goodput import checkpoint_bytes_per_rank, factors
from cost_models.gradient_sync import sync_end
from cost_models.interface import CostModel
from cost_models.memory import PlanMemory
from cost_models.passes import ReplicaPass, replica_pass
from cost_models.sharding import micro_batch_seconds
from cost_models.stragglers import expected_maximum
from cost_models.topology import Topology
from specs.failures import FailureModel
from specs.plan import MemoryTerms, Plan, Prediction, StepTerms

# Terms below this part of a step are rounding.
ROUNDING = 1e-12


def price(plan: Plan, costs: CostModel, *, failures: FailureModel | None = None) -> Prediction:
    """Predict a plan.  `failures` None: published defaults.

    Raises `BadInputError` for costs that were not measured.
    """
    return Price(plan, costs, failures=failures).predicted


class Price:
    """A plan's price in two parts: memory, which says whether it can run, and all the rest once it is asked for."""

    def __init__(self, plan: Plan, costs: CostModel, *, failures: FailureModel | None = None) -> None:
        self._plan = plan
        self._costs = costs
        self._failures = failures
        self._topology = Topology(plan)
        self._held = holdings(plan)
        replicas_of = Counter(replica.pipeline for replica in plan.replicas)
        self._memory = PlanMemory(plan, self._held, replicas_of, reserved_bytes=costs.reserved_bytes)
        self._peak = _peak_memory(plan, self._memory, self._topology)

    @property
    def peak_memory_bytes(self) -> int:
        return self._peak.terms.total()

    @property
    def peak_memory_rank(self) -> int:
        return self._peak.rank

    @cached_property
    def predicted(self) -> Prediction:
        """Raises `BadInputError` for costs that were not measured."""
        plan, costs, topology, buckets = self._plan, self._costs, self._topology, self._held.buckets
        chain = dict(plan.model.modules())
        sharding = micro_batch_seconds(plan, costs, topology, buckets)
        passes = [replica_pass(plan, costs, topology, chain, replica, sharding) for replica in topology.classes]
        synced = sync_end(plan, costs, topology, buckets, passes)
        optimizer = max(map(costs.optimizer, {round(elements) for elements in self._memory.owned.values()}))
        straggler = _straggler_seconds(passes)
        step_seconds = synced + straggler + optimizer + costs.overhead.other_seconds_per_step
        terms = _terms(plan, passes, synced + straggler, optimizer, costs.overhead.other_seconds_per_step)
        outlook = factors(
            plan,
            step_seconds=step_seconds,
            state_bytes_per_rank=checkpoint_bytes_per_rank(plan),
            failures=self._failures,
        )
        tokens_per_second = plan.training.tokens_per_step / step_seconds
        return Prediction(
            step_time_seconds=step_seconds,
            step_terms=terms,
            tokens_per_second=tokens_per_second,
            goodput_tokens_per_second=tokens_per_second * outlook.factor,
            renewal_factor=outlook.renewal_factor,
            degraded_factor=outlook.degraded_factor,
            checkpoint_interval_seconds=outlook.checkpoint_interval_seconds,
            peak_memory_bytes=self.peak_memory_bytes,
            peak_memory_rank=self.peak_memory_rank,
            peak_memory_terms=self._peak.terms,
            stage_memory_bytes=self._peak.by_stage,
            estimated=costs.estimated or any(stage.estimated for item in passes for stage in item.stages),
        )


def _straggler_seconds(passes: Sequence[ReplicaPass]) -> float:
    """Replicas wait for the slowest of them: expected maximum of their independent spread over a step."""
    num_replicas = sum(item.replica.count for item in passes)
    deviation = max(math.sqrt(item.num_micro_batches * max(stage.variance for stage in item.stages)) for item in passes)
    return deviation * expected_maximum(num_replicas)


def _terms(
    plan: Plan, passes: Sequence[ReplicaPass], sync_end: float, optimizer: float, other_per_step: float
) -> StepTerms:
    """Means over ranks; they add up to the step time."""
    totals: defaultdict[str, float] = defaultdict(float)
    for item in passes:
        m = item.num_micro_batches
        pipeline = plan.pipelines[item.replica.pipeline]
        for index, stage in enumerate(item.stages):
            weight = item.replica.count * pipeline.stages[index].num_ranks / plan.world_size
            busy = m * (stage.forward + stage.backward)
            computing = m * (stage.mean_forward + stage.mean_backward)
            totals["forward"] += weight * m * stage.mean_forward
            totals["backward"] += weight * m * stage.mean_backward
            totals["data"] += weight * m * stage.data
            totals["other"] += weight * (m * stage.other + other_per_step)
            totals["tp_communication"] += weight * max(
                0.0, busy - computing - m * (stage.data + stage.other + stage.sharding)
            )
            totals["pipeline_idle"] += weight * (item.timing.finish_seconds[index] - busy)
            totals["gradient_sync"] += weight * (sync_end - item.timing.finish_seconds[index] + m * stage.sharding)
    totals["optimizer"] = optimizer
    # Differences of equal sums leave some 1e-18 s.
    least = ROUNDING * sum(totals.values())
    return StepTerms(**{name: seconds if seconds > least else 0.0 for name, seconds in totals.items()})


@dataclass(frozen=True, slots=True)
class _Peak:
    """The fullest rank of a plan, and the fullest of each stage of its first pipeline."""

    rank: int
    terms: MemoryTerms
    by_stage: tuple[int, ...]


def _peak_memory(plan: Plan, memory: PlanMemory, topology: Topology) -> _Peak:
    fullest: list[tuple[int, int, MemoryTerms]] = []
    by_stage: dict[int, list[int]] = {}
    for replica in topology.classes:
        if replica.pipeline in by_stage:
            continue
        totals = by_stage.setdefault(replica.pipeline, [])
        for stage in range(len(plan.pipelines[replica.pipeline].stages)):
            terms = memory.stage(replica.pipeline, stage)
            sizes = {id(own): own.total() for own in {id(own): own for own in terms}.values()}  # many are one
            rank = max(range(len(terms)), key=lambda rank: sizes[id(terms[rank])])
            totals.append(sizes[id(terms[rank])])
            fullest.append((totals[-1], topology.stage_ranks(replica, stage)[rank], terms[rank]))
    _, rank, peak = max(fullest, key=lambda entry: entry[0])
    return _Peak(rank, peak, tuple(by_stage[min(by_stage)]))
