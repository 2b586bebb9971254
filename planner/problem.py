"""A problem to plan for, and what searches it: a searcher over its layouts and a pricer that has the last word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cost_models.interface import CostModel
from cost_models.step import price
from planner.constraints import Constraints
from planner.layout import Layout, make_pipeline, make_replicas
from planner.search import Engine, Searcher
from planner.space import Topology
from specs.cluster import ClusterSpec
from specs.errors import BadInputError
from specs.model import ModelSpec
from specs.plan import Plan, Prediction, Provenance, TrainingSpec

CostMaker = Callable[[ClusterSpec, TrainingSpec], CostModel]


@dataclass(frozen=True)
class Problem:
    """What to plan for.  `memory_cap_bytes` is per rank, when lower than the device's memory; `constraints` are the
    user's.
    """

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    provenance: Provenance
    memory_cap_bytes: int | None = None
    constraints: Constraints = field(default_factory=Constraints)

    @property
    def device_bytes(self) -> int:
        """Memory of the smallest device."""
        return min(self.cluster.devices[group.device].memory_bytes for group in self.cluster.nodes)

    @property
    def memory_bytes(self) -> int:
        """What a rank may fill: the cap, or the smallest device's memory."""
        cap = self.memory_cap_bytes
        return self.device_bytes if cap is None else min(cap, self.device_bytes)


def make_searcher(problem: Problem, costs: CostModel, engine: Engine = "dp", context: int = 1) -> Searcher:
    """`context`: so many scale-up domains may be one stage, whose attention blocks share sequences.

    Raises `BadInputError` for a cluster without ranks and `NoPlanFitsError` for constraints that contradict.
    """
    topology = Topology(problem.cluster)
    if topology.num_ranks == 0:
        raise BadInputError(f"cluster {problem.cluster.name} has no usable rank: all of them are missing.")
    return Searcher(
        problem.model,
        problem.training,
        costs,
        topology,
        capacity=problem.memory_bytes - costs.reserved_bytes,
        max_ranks_per_stage=topology.domain * context,
        context=context,
        rules=problem.constraints.resolve(problem.model),
        engine=engine,
    )


class Pricer:
    """Prices layouts by the cost models' own word and keeps what they said."""

    def __init__(self, problem: Problem, searcher: Searcher, memory_bytes: int | None = None) -> None:
        """`memory_bytes`: what a rank may fill; None for what the problem says."""
        self._problem = problem
        self._searcher = searcher
        self.memory_bytes = problem.memory_bytes if memory_bytes is None else memory_bytes
        self.predictions: dict[Layout, Prediction] = {}

    def plan(self, layout: Layout) -> Plan:
        problem = self._problem
        return Plan(
            made=problem.provenance,
            model=problem.model,
            cluster=problem.cluster,
            training=problem.training,
            memory_cap_bytes=problem.memory_cap_bytes,
            pipelines=(make_pipeline(layout, self._searcher.chain),),
            replicas=make_replicas(layout.grid, self._searcher.topology),
        )

    def seconds(self, layout: Layout) -> float:
        """Step seconds; `inf` when the priced memory is over the limit after all."""
        prediction = self.predicted(layout)
        return prediction.step_time_seconds if self.fits(prediction) else float("inf")

    def seconds_delivered(self, layout: Layout) -> float:
        """Seconds of wall clock per kept step: step seconds / (G X)."""
        prediction = self.predicted(layout)
        tokens = self._problem.training.tokens_per_step
        return tokens / prediction.goodput_tokens_per_second if self.fits(prediction) else float("inf")

    def fits(self, prediction: Prediction) -> bool:
        """Whether the priced memory is within the limit."""
        return prediction.peak_memory_bytes <= self.memory_bytes

    def predicted(self, layout: Layout) -> Prediction:
        """The price of a layout; each is priced once."""
        if layout not in self.predictions:
            self.predictions[layout] = price(self.plan(layout), self._searcher.source.costs)
        return self.predictions[layout]


def context_degrees(problem: Problem, *, nothing_fits: bool) -> list[int]:
    """Degrees of context parallelism worth a try: powers of two that cut sequences.

    Where something fits without, only if there are too few sequences to give each scale-up domain one.
    """
    topology, training = Topology(problem.cluster), problem.training
    if not nothing_fits and training.global_batch * topology.domain >= topology.num_ranks:
        return []
    limit = topology.num_ranks.bit_length()
    return [2**i for i in range(1, limit) if training.seq_len % 2 ** (i + 1) == 0]
