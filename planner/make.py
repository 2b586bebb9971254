"""From a model, a cluster and costs to a complete plan: layout, prediction, certificate, ladder, alternatives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cost_models.interface import CostModel
from cost_models.step import price
from planner.alternatives import alternatives
from planner.chain import make_chain
from planner.fit import GIB, changes_that_fit, least_of_all
from planner.grid_search import Incumbent
from planner.ladder import Rung, as_ladder, climb
from planner.layout import Layout, make_pipeline, make_replicas
from planner.search import TOLERANCE, Freedom, Searcher
from planner.space import Topology
from specs.cluster import ClusterSpec
from specs.errors import BadInputError, NoPlanFitsError, TimeLimitError
from specs.model import ModelSpec
from specs.plan import Certificate, Objective, Plan, Prediction, Provenance, TrainingSpec

CostMaker = Callable[[ClusterSpec, TrainingSpec], CostModel]


@dataclass(frozen=True)
class Problem:
    """What to plan for.  `memory_cap_bytes` is per rank, when lower than the device's memory."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    provenance: Provenance
    memory_cap_bytes: int | None = None


def make_plan(
    problem: Problem,
    make_costs: CostMaker,
    *,
    objective: Objective = "goodput",
    freedom: Freedom = "cuts",
    time_limit_seconds: float = 60.0,
    top_k: int = 3,
) -> Plan:
    """The best plan under a freedom.

    On a given cluster and checkpoint policy goodput and tokens per dollar fall with step time and with nothing else
    that a layout of all ranks changes, so that these objectives share one search.

    Raises `NoPlanFitsError`, `TimeLimitError` (nothing found in time) and `BadInputError` (sizes that no layout
    divides, costs that were not measured).
    """
    if objective == "memory":
        raise BadInputError("the objective memory is not available yet. Use step-time with a lower --memory-cap.")
    start = time.monotonic()
    costs = make_costs(problem.cluster, problem.training)
    topology = Topology(problem.cluster)
    if topology.num_ranks == 0:
        raise BadInputError(f"cluster {problem.cluster.name} has no usable rank: all of them are missing.")
    memory = _memory_bytes(problem)
    searcher = Searcher(
        problem.model,
        problem.training,
        costs,
        topology,
        capacity=memory - costs.reserved_bytes,
        max_ranks_per_stage=topology.domain,
    )
    pricer = _Pricer(problem, costs, searcher, topology, memory)
    incumbent = Incumbent(pricer.seconds)
    rungs = climb(searcher, incumbent, freedom, deadline=start + time_limit_seconds)
    best = rungs[-1]
    if best.layout is None:
        raise _nothing_found(problem, make_costs, searcher, best, memory, time_limit_seconds)
    plan = pricer.plan(best.layout)
    prediction = pricer.predictions[best.layout]
    seconds = time.monotonic() - start
    return plan.with_results(
        predicted=prediction,
        certificate=_certificate(rungs, objective, seconds),
        ladder=as_ladder(rungs),
        alternatives=alternatives(searcher, incumbent, pricer.predictions, best.layout, memory, top_k),
    )


class _Pricer:
    """Prices layouts by the cost models' own word and keeps what they said."""

    def __init__(
        self, problem: Problem, costs: CostModel, searcher: Searcher, topology: Topology, memory_bytes: int
    ) -> None:
        self._problem = problem
        self._costs = costs
        self._searcher = searcher
        self._topology = topology
        self._memory_bytes = memory_bytes
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
            replicas=make_replicas(layout.grid, self._topology),
        )

    def seconds(self, layout: Layout) -> float:
        """Step seconds; `inf` when the priced memory is over the limit after all."""
        prediction = price(self.plan(layout), self._costs)
        self.predictions[layout] = prediction
        return prediction.step_time_seconds if prediction.peak_memory_bytes <= self._memory_bytes else float("inf")


def _memory_bytes(problem: Problem) -> int:
    """What a rank may fill: the cap, or the smallest device's memory."""
    cluster = problem.cluster
    smallest = min(cluster.devices[group.device].memory_bytes for group in cluster.nodes)
    cap = problem.memory_cap_bytes
    return smallest if cap is None else min(cap, smallest)


def _certificate(rungs: list[Rung], objective: Objective, seconds: float) -> Certificate:
    """Of the last rung, with the work of all of them."""
    best = rungs[-1]
    pruned = dict(best.outcome.pruned)
    return Certificate(
        engine="labels",
        objective=objective,
        status="optimal" if best.outcome.gap <= TOLERANCE else "feasible",
        objective_value=best.seconds,
        bound=best.outcome.bound,
        gap=best.outcome.gap,
        seconds=seconds,
        labels=sum(rung.outcome.labels for rung in rungs),
        evaluated=sum(rung.outcome.evaluated for rung in rungs),
        pruned=pruned,
    )


def _nothing_found(
    problem: Problem,
    make_costs: CostMaker,
    searcher: Searcher,
    best: Rung,
    memory_bytes: int,
    time_limit_seconds: float,
) -> Exception:
    """The error that says why there is no plan, and what would change that."""
    if not best.outcome.complete:
        return TimeLimitError(
            f"no plan was found within {time_limit_seconds:g} s. Give more time with --time-limit, or fewer freedoms "
            "with --freedom uniform."
        )
    training = problem.training
    if not searcher.grids:
        return BadInputError(
            f"global batch {training.global_batch} cannot be divided: {searcher.topology.num_ranks} ranks in up to "
            f"{searcher.chain.num_positions - 1} stages of up to {searcher.topology.domain} ranks leave replicas "
            f"whose number does not divide it. Use a multiple of {searcher.topology.num_ranks}."
        )
    least = least_of_all(searcher.chain, searcher.grids, searcher.source)
    if least is None and searcher.source.unmeasured:
        return BadInputError(f"nothing can be priced: {next(iter(searcher.source.unmeasured.values()))}")
    if least is None:
        return BadInputError(
            f"no layout of {searcher.topology.num_ranks} ranks divides global batch {training.global_batch} and the "
            f"modules of {problem.model.name}. Try another number of ranks or a multiple of it as the batch."
        )
    reserved = searcher.source.costs.reserved_bytes
    chain = make_chain(problem.model)
    needed = f"{math.ceil(10.0 * least.total_bytes / GIB) / 10.0:.1f}"
    device = _memory_bytes(replace(problem, memory_cap_bytes=None))
    changes = [f"--memory-cap {needed}GiB" if least.total_bytes <= device else f"devices with {needed} GiB"]
    changes += changes_that_fit(problem.cluster, training, make_costs, chain, memory_bytes)
    return NoPlanFitsError(
        f"no plan fits {memory_bytes / GIB:.1f} GiB: stage {least.stage} needs {needed} GiB even "
        f"with pp={least.grid.num_stages}, tp={least.degree}, dp={least.grid.num_replicas}, micro-batch "
        f"{least.grid.micro_batch} and full recompute (weights, gradients and optimizer "
        f"{least.static_bytes / GIB:.1f}, activations {least.activation_bytes / GIB:.1f}, working "
        f"{(least.working_bytes - reserved) / GIB:.1f}, reserved {reserved / GIB:.1f}). Try {' or '.join(changes)}."
    )
