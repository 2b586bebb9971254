"""From a model, a cluster and costs to a complete plan: layout, prediction, certificate, ladder, alternatives."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from cost_models.goodput import checkpoint_bytes_per_rank
from cost_models.interface import CostModel
from cost_models.step import price
from planner.alternatives import alternatives
from planner.chain import make_chain
from planner.constraints import Constraints
from planner.fit import changes_that_fit, least_of_all
from planner.goal import make_worth
from planner.grid_search import Incumbent
from planner.ladder import Rung, as_ladder, climb, goodput_rung
from planner.layout import Layout, make_pipeline, make_replicas
from planner.search import TOLERANCE, Engine, Freedom, Outcome, Searcher
from planner.space import Topology
from specs.cluster import ClusterSpec
from specs.errors import BadInputError, NoPlanFitsError, TimeLimitError
from specs.model import ModelSpec
from specs.plan import Certificate, Objective, Plan, Prediction, Provenance, TrainingSpec
from specs.units import num_bytes

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
    constraints: Constraints = Constraints()


def make_plan(
    problem: Problem,
    make_costs: CostMaker,
    *,
    objective: Objective = "goodput",
    freedom: Freedom = "cuts",
    engine: Engine = "dp",
    time_limit_seconds: float = 60.0,
    top_k: int = 3,
) -> Plan:
    """The best plan under a freedom.

    Every rung of the ladder is searched by step time; goodput adds a last one (`planner.goal`).  On a given cluster,
    all of whose ranks are used, tokens per dollar are goodput over a constant.

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
        rules=problem.constraints.resolve(problem.model),
        engine=engine,
    )
    pricer = _Pricer(problem, costs, searcher, topology, memory)
    incumbent = Incumbent(pricer.seconds)
    rungs = climb(searcher, incumbent, freedom, deadline=start + time_limit_seconds)
    best = rungs[-1]
    if best.layout is None:
        raise _nothing_found(problem, make_costs, searcher, best, memory, time_limit_seconds)
    ladder, outcome, chosen = as_ladder(rungs), best.outcome, best.layout
    if objective != "step-time":
        outcome = _deliver(problem, searcher, pricer, freedom, deadline=start + time_limit_seconds)
        assert outcome.layout is not None
        chosen = outcome.layout
        ladder = (*ladder, goodput_rung(pricer.predictions[best.layout], pricer.predictions[chosen], chosen))
    return pricer.plan(chosen).with_results(
        predicted=pricer.predictions[chosen],
        certificate=_certificate([rung.outcome for rung in rungs], outcome, objective, time.monotonic() - start),
        ladder=ladder,
        alternatives=alternatives(searcher, incumbent, pricer.predictions, chosen, memory, top_k),
    )


def _deliver(problem: Problem, searcher: Searcher, pricer: _Pricer, freedom: Freedom, *, deadline: float) -> Outcome:
    """The search by goodput, from the layouts that the search by step time priced."""
    incumbent = Incumbent(pricer.seconds_delivered)
    for layout, prediction in list(pricer.predictions.items()):
        if pricer.fits(prediction):
            incumbent.offer(layout, 0.0)
    some = next(iter(pricer.predictions))
    worth = make_worth(
        num_ranks=searcher.topology.num_ranks,
        devices_per_node=max(group.devices_per_node for group in problem.cluster.nodes),
        state_bytes_per_rank=checkpoint_bytes_per_rank(pricer.plan(some)),
    )
    return searcher.deliver(freedom, incumbent, worth, deadline=deadline)


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
        prediction = self._predicted(layout)
        return prediction.step_time_seconds if self.fits(prediction) else float("inf")

    def seconds_delivered(self, layout: Layout) -> float:
        """Seconds of wall clock per kept step: step seconds / (G X)."""
        prediction = self._predicted(layout)
        tokens = self._problem.training.tokens_per_step
        return tokens / prediction.goodput_tokens_per_second if self.fits(prediction) else float("inf")

    def fits(self, prediction: Prediction) -> bool:
        """Whether the priced memory is within the limit."""
        return prediction.peak_memory_bytes <= self._memory_bytes

    def _predicted(self, layout: Layout) -> Prediction:
        if layout not in self.predictions:
            self.predictions[layout] = price(self.plan(layout), self._costs)
        return self.predictions[layout]


def _memory_bytes(problem: Problem) -> int:
    """What a rank may fill: the cap, or the smallest device's memory."""
    cluster = problem.cluster
    smallest = min(cluster.devices[group.device].memory_bytes for group in cluster.nodes)
    cap = problem.memory_cap_bytes
    return smallest if cap is None else min(cap, smallest)


def _certificate(rungs: list[Outcome], last: Outcome, objective: Objective, seconds: float) -> Certificate:
    """Of the last search, with the work of all of them."""
    searches = rungs if last in rungs else [*rungs, last]
    return Certificate(
        engine="labels",
        objective=objective,
        status="optimal" if last.gap <= TOLERANCE else "feasible",
        objective_value=last.seconds,
        bound=last.bound,
        gap=last.gap,
        seconds=seconds,
        labels=sum(outcome.labels for outcome in searches),
        evaluated=sum(outcome.evaluated for outcome in searches),
        pruned=dict(sum((outcome.pruned for outcome in (rungs[-1], *searches[len(rungs) :])), Counter())),
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
    needed = _rounded_up(least.total_bytes)
    device = _memory_bytes(replace(problem, memory_cap_bytes=None))
    changes = [f"--memory-cap {needed.replace(' ', '')}" if least.total_bytes <= device else f"devices with {needed}"]
    changes += changes_that_fit(problem.cluster, training, make_costs, chain, memory_bytes)
    return NoPlanFitsError(
        f"no plan fits {num_bytes(memory_bytes)}: stage {least.stage} needs {needed} even "
        f"with pp={least.grid.num_stages}, tp={least.degree}, dp={least.grid.num_replicas}, micro-batch "
        f"{least.grid.micro_batch} and full recompute (weights, gradients and optimizer "
        f"{num_bytes(least.static_bytes)}, activations {num_bytes(least.activation_bytes)}, working "
        f"{num_bytes(least.working_bytes - reserved)}, reserved {num_bytes(reserved)}). Try {' or '.join(changes)}."
    )


def _rounded_up(value: float) -> str:
    """The next tenth of a GiB or MiB, so that the printed cap suffices."""
    unit, size = ("GiB", 2**30) if value >= 2**30 else ("MiB", 2**20)
    return f"{math.ceil(10.0 * value / size) / 10.0:.1f} {unit}"
