"""The search of interleaved schedules: splits, stages and whole problems by enumeration; plans that run."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise, product
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cost_models.rank_work import PlanWork, seat_of
from cost_models.step import price
from executor.dry_run import dry_run
from planner.constraints import Constraints
from planner.grid_search import Incumbent
from planner.interleaved_held import Moments, held_at_first, moments_on
from planner.interleaved_split import splits
from planner.interleaved_stage import Columns, Relaxed, StageSolver
from planner.make import make_plan
from planner.outcome import Outcome
from planner.problem import Pricer, Problem, make_searcher
from planner.search import TOLERANCE, Searcher
from planner.space import Grid, Topology, enumerate_grids, variants
from reports.plan import headline
from reports.plan_record import as_json
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Replica, Stage, TrainingSpec
from specs.schedule import most_held, stage_actions
from tests.layouts import small_model
from tests.parity import largest_relative_error, run_rank, run_reference
from tests.synthetic_costs import SyntheticCosts, cluster, some_options, tiny_model

if TYPE_CHECKING:
    from tests.gloo import GlooPool

MADE = Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z")
CLOSE = 2.1e-4


# ---- splits


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40), st.integers(2, 6), st.integers(2, 5))
def test_splits_are_even_and_whole(num_layers: int, num_stages: int, num_virtual: int) -> None:
    model = small_model()
    model = model.model_copy(update={"layers": (model.layers[0].model_copy(update={"repeat": num_layers}),)})
    named = model.modules()
    found = list(splits(model, num_stages, num_virtual))
    assert len(set(found)) == len(found)
    assert found or num_layers % (num_stages * num_virtual)
    for boundaries in found:
        assert (boundaries[0], boundaries[-1]) == (0, len(named))
        runs = [named[a:b] for a, b in pairwise(boundaries)]
        assert len(runs) == num_stages * num_virtual
        assert all(runs)
        layers = [len({name.split(".")[1] for name, _ in run if name.startswith("layer")}) for run in runs]
        assert sum(layers) == num_layers  # no layer is in two runs
        assert len(set(layers[1:-1])) == 1
        assert 0 <= layers[1] - layers[0] <= 1
        assert 0 <= layers[1] - layers[-1] <= 3


# ---- one stage


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(2, 14), st.integers(2, 4))
def test_what_is_held_is_what_the_schedule_holds(num_stages: int, num_micro_batches: int, num_virtual: int) -> None:
    grid = Grid(num_stages, 1, 1, 1, num_micro_batches, "interleaved", 1, num_virtual=num_virtual)
    sizes = {"num_stages": num_stages, "num_micro_batches": num_micro_batches, "num_virtual": num_virtual}
    for stage, (moments, first) in enumerate(zip(moments_on(grid), held_at_first(grid).tolist(), strict=True)):
        expected = most_held(stage_actions("interleaved", stage=stage, **sizes))
        found = zip(map(tuple, moments.held.tolist()), moments.working.tolist(), strict=True)
        assert sorted(found) == sorted((of.kept, of.working) for of in expected)
        backward = [of.kept for of in expected if of.working == num_virtual - 1]
        assert any(all(a <= b for a, b in zip(first, kept, strict=True)) for kept in backward)


def some_columns(generator: np.random.Generator, num_kinds: int, num_options: int) -> Columns:
    shape = (num_kinds, num_options)
    return Columns(
        *(generator.integers(1, 20, shape).astype(float) for _ in range(5)),
        static=generator.integers(0, 6, shape).astype(float),
        activation=generator.integers(0, 9, shape).astype(float),
        working=generator.integers(0, 12, shape).astype(float),
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_stage_is_solved_like_enumeration(seed: int) -> None:
    generator = np.random.default_rng(seed)
    columns = some_columns(generator, 2, 3)
    counts = generator.integers(0, 3, (2, 2))
    counts[0, 0] += 1
    held = generator.integers(1, 4, (generator.integers(1, 3), 2))
    moments = Moments(held, generator.integers(0, 2, len(held)))
    weighted = generator.integers(1, 9, (2, 3)).astype(float)
    capacity = float(generator.integers(10, 90))
    solver, best = StageSolver(columns, capacity), float("inf")
    places = list(product((0, 1), (0, 1)))
    ways = (combinations_with_replacement(range(3), int(counts[place])) for place in places)
    for chosen in product(*ways):
        taken = {
            place: tuple((o, own.count(o)) for o in sorted(set(own))) for place, own in zip(places, chosen, strict=True)
        }
        selection = tuple(tuple(taken[v, k] for k in (0, 1)) for v in (0, 1))
        if solver.most_bytes(moments, selection) <= capacity:
            best = min(best, sum(n * weighted[k, o] for (_, k), own in taken.items() for o, n in own))
    found = solver.solve(counts, moments, weighted)
    bound = Relaxed(columns, [moments], weighted, capacity).bounds(counts[None].astype(float))[0]
    assert bound <= best + 1e-9
    if found is None:
        assert best == float("inf") or len(held) > 1
        return
    assert solver.most_bytes(moments, found.selection) <= capacity
    own = sum(
        n * weighted[k, o] for of_kinds in found.selection for k, chosen in enumerate(of_kinds) for o, n in chosen
    )
    assert found.weighted == pytest.approx(own)
    assert own >= best - 1e-9
    if len(held) == 1:
        assert own == pytest.approx(best)


# ---- whole problems by enumeration


@dataclass(frozen=True)
class Entry:
    """A layout of a point (grid without its virtual stages, split): its price, and m (f + b) by stage."""

    grid: Grid
    boundaries: tuple[int, ...]
    seconds: float
    memory: tuple[int, ...]
    own: tuple[float, ...]


def every_interleaved_layout(problem: Problem, costs: SyntheticCosts) -> list[Entry]:
    """Each module's option taken freely, within a domain."""
    model, training = problem.model, problem.training
    named, topology, found = model.modules(), Topology(problem.cluster), []
    options = {
        (name, num_ranks): [
            ModulePlacement(module=name, blocks=(t,) * (num_ranks // t), recompute=mode)
            for kind, t, mode in sorted(costs.known)
            if kind == module.kind and num_ranks % t == 0
        ]
        for name, module in named
        for num_ranks in (1, 2)
    }
    for base in enumerate_grids(topology, training, max_stages=len(named), max_ranks_per_stage=topology.domain):
        if base.schedule != "1f1b" or base.zero > 1 or base.num_stages == 1 or base.num_micro_batches == 1:
            continue
        for num_virtual in range(2, len(named)):
            for boundaries in splits(model, base.num_stages, num_virtual):
                for placed in product(*(options[name, base.num_ranks] for name, _ in named)):
                    for grid in variants(base):
                        entry = priced(problem, costs, grid, boundaries, placed)
                        found += [] if entry is None else [entry]
    return found


def priced(problem, costs, grid: Grid, boundaries, placed) -> Entry | None:
    runs = [tuple(p.model_copy(update={"zero": grid.zero}) for p in placed[a:b]) for a, b in pairwise(boundaries)]
    of_stages = [runs[s :: grid.num_stages] for s in range(grid.num_stages)]
    stages = tuple(
        Stage(num_ranks=grid.num_ranks, modules=sum(own, ()), virtual_stages=tuple(map(len, own))) for own in of_stages
    )
    replicas = []
    for r in range(grid.num_replicas):
        seats = [
            s * grid.num_replicas + r if grid.order == "stage" else r * grid.num_stages + s
            for s in range(grid.num_stages)
        ]
        ranks = tuple(seat * grid.num_ranks + i for seat in seats for i in range(grid.num_ranks))
        replicas.append(Replica(pipeline=0, ranks=ranks, sequences=grid.micro_batch * grid.num_micro_batches))
    pipeline = Pipeline(micro_batch=grid.micro_batch, stages=stages, schedule="interleaved")
    try:
        plan = Plan(
            made=MADE,
            model=problem.model,
            cluster=problem.cluster,
            training=problem.training,
            pipelines=(pipeline,),
            replicas=tuple(replicas),
        )
    except ValidationError:  # blocks without whole sequences
        return None
    predicted, chain = price(plan, costs), dict(problem.model.modules())
    tokens, own = grid.micro_batch * problem.training.seq_len // grid.num_ranks, []
    for stage in stages:
        work = [
            costs.module(
                chain[p.module],
                degree=p.degree,
                block_tokens=tokens * p.degree,
                seq_len=problem.training.seq_len,
                recompute=p.recompute,
                level="scale_up",
            ).seconds
            for p in stage.modules
        ]
        own.append(sum(work))
    return Entry(grid, boundaries, predicted.step_time_seconds, predicted.stage_memory_bytes, tuple(own))


def bounds_of(searcher: Searcher) -> Iterator[tuple[list[Grid], tuple[int, ...], float]]:
    """Every split: whatever its memory, within it, and in every variant before that is solved.  The variants that are
    meant, where the runs begin, and the bound.
    """
    nothing = Incumbent(lambda _: float("inf"))
    for shape in searcher.interleaved.nodes:
        for split in shape.refine(nothing):
            plain = replace(split.grid, schedule="1f1b", num_virtual=1)
            yield variants(plain), split.boundaries, split.bound
            assert list(split.refine(nothing)) == [split]
            yield variants(plain), split.boundaries, split.bound
            for point in split.refine(nothing):
                yield [replace(point.grid, schedule="1f1b", num_virtual=1)], point.boundaries, point.bound


SEEDS = range(18)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_stage_takes_its_fastest_options_and_no_layout_beats_a_bound(seed: int) -> None:
    generator = random.Random(seed)
    nodes, per_node, num_layers, degrees = generator.choice([(2, 1, 4, (1,)), (1, 2, 3, (1,)), (2, 2, 3, (1, 2))])
    known = some_options(seed, degrees)
    if degrees == (1,):
        known |= {("attention", 1, "none"), ("attention", 1, "full")} if seed % 2 else {("mlp", 1, "full")}
    costs = SyntheticCosts(seed, known=known, jitter=generator.choice([0.0, 0.05]))
    model, training = tiny_model(seed, num_layers=num_layers), TrainingSpec(global_batch=2, seq_len=8)
    problem = Problem(model, cluster(nodes, per_node), training, MADE)
    layouts = every_interleaved_layout(problem, costs)
    if not layouts:  # nothing divides
        assert not list(bounds_of(make_searcher(problem, costs)))
        return
    cap = generator.choice(sorted({max(entry.memory) for entry in layouts}))
    points = defaultdict(list)
    for entry in layouts:
        points[entry.grid, entry.boundaries].append(entry)
    own: list[float] = []  # the slowest of those whose stages all take their fastest options, by point
    for entries in points.values():
        least = [
            min((e.own[s] for e in entries if e.memory[s] <= cap), default=float("inf"))
            for s in range(entries[0].grid.num_stages)
        ]
        alike = [
            e.seconds
            for e in entries
            if max(e.memory) <= cap and all(a <= b * (1 + 1e-12) for a, b in zip(e.own, least, strict=True))
        ]
        own += [max(alike)] if alike else []
    searcher = make_searcher(Problem(model, problem.cluster, training, MADE, cap), costs)
    unequal = any(m.kind == "attention" and m.num_heads == 3 for _, m in model.modules()) and 2 in degrees
    if not unequal:  # then memory is counted exactly
        for grids, boundaries, bound in bounds_of(searcher):
            within = [e.seconds for grid in grids for e in points[grid, boundaries] if max(e.memory) <= cap]
            assert bound <= min(within, default=float("inf")) * (1 + 1e-9)
    incumbent = Incumbent(Pricer(Problem(model, problem.cluster, training, MADE, cap), searcher).seconds)
    outcome = Outcome(None, float("inf"), float("inf"), complete=True)
    searcher.interleaved.search(incumbent, outcome, None, tolerance=TOLERANCE, deadline=time.monotonic() + 60.0)
    assert outcome.complete
    assert outcome.bound <= incumbent.seconds * (1 + 1e-9)
    best = min((e.seconds for e in layouts if max(e.memory) <= cap), default=float("inf"))
    assert best <= incumbent.seconds * (1 + 1e-9)
    if not unequal:
        assert incumbent.seconds <= min(own, default=float("inf")) * (1 + CLOSE)
        assert incumbent.seconds <= best * 1.05


# ---- plans


class Pipelined(SyntheticCosts):
    """Only pipelines are cheap: blocks and replicas talk much, transfers take nothing."""

    def __init__(self) -> None:
        super().__init__(3, once=1e-3)
        self._communicate, self._point_to_point = 30.0, 0.0


def job(constraints: Constraints | None = None) -> Problem:
    training = TrainingSpec(global_batch=4, seq_len=8, precision="fp32")
    model = small_model()
    model = model.model_copy(update={"layers": (model.layers[0].model_copy(update={"repeat": 8}),)})
    return Problem(model, cluster(2, 1), training, MADE, None, constraints or Constraints())


def planned(problem: Problem, **words) -> Plan:
    return make_plan(problem, lambda *_: Pipelined(), **{"objective": "step-time", **words})


def test_a_plan_says_that_it_is_interleaved() -> None:
    plan = planned(job())
    (pipeline,) = plan.pipelines
    assert (pipeline.schedule, pipeline.num_virtual) == ("interleaved", 5)
    assert price(plan, Pipelined()) == plan.predicted
    before, rung = plan.ladder[-2:]
    assert (before.freedom, rung.freedom) == ("+ stage cuts inside layers", "+ interleaved schedules")
    assert rung.gain_over_previous > 0.01
    assert "interleaved with 5 virtual stages" in rung.layout
    assert plan.certificate.freedom == "interleaved"
    assert plan.certificate.bound <= plan.predicted.step_time_seconds
    assert planned(job(), freedom="cuts").predicted.step_time_seconds == before.step_time_seconds
    delivering = planned(job(), objective="goodput")
    assert delivering.pipelines[0].schedule == "interleaved"
    assert delivering.predicted.goodput_tokens_per_second >= plan.predicted.goodput_tokens_per_second * (1 - CLOSE)
    peak = plan.predicted.peak_memory_bytes
    least = planned(job(), objective="memory", slowdown=0.0)
    assert least.predicted.peak_memory_bytes <= peak
    assert least.predicted.step_time_seconds <= plan.predicted.step_time_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("constraints", "meets"),
    [
        (Constraints(pins=("layer.1.mlp.recompute=full",)), {"layer.1.mlp": {"full"}}),
        (Constraints(forbids=("layer.*.attention.recompute=none",)), {"layer.0.attention": {"selective", "full"}}),
    ],
)
def test_constraints_are_met(constraints: Constraints, meets: dict[str, set[str]]) -> None:
    plan = planned(job(constraints))
    assert plan.pipelines[0].schedule == "interleaved"
    modes = {p.module: p.recompute for p in plan.pipelines[0].chain()}
    assert all(modes[name] in allowed for name, allowed in meets.items())


def test_given_stages_leave_the_rung_out() -> None:
    plan = planned(job(Constraints(stages="0-3,4-7")))
    assert plan.ladder[-1].freedom == "+ stage cuts inside layers"
    assert plan.pipelines[0].num_virtual == 1


def test_reports_name_the_layers_of_all_virtual_stages() -> None:
    plan = planned(job())
    (pipeline,) = plan.pipelines
    data = as_json(plan)["pipelines"][0]["stages"]
    assert [tuple(stage["virtual_stages"]) for stage in data] == [stage.virtual_stages for stage in pipeline.stages]
    assert "interleaved with 5 virtual stages" in headline(plan)
    names = {run["modules"] for stage in data for run in stage["modules"]}
    assert any("," in name for name in names)
    assert not any("-" in name for name in names)  # neighbours lie on different stages


@pytest.mark.parametrize("stage", [0, 1])
def test_a_planned_pipeline_plays_as_priced(stage: int) -> None:
    """The executor's own code, with tensors that hold nothing."""
    plan = planned(job(Constraints(pins=("layer.2.*.recompute=full",))))
    assert plan.pipelines[0].schedule == "interleaved"
    formulas, played = PlanWork(plan).of(seat_of(plan, stage)), dry_run(plan, stage)
    assert played.weight_bytes == pytest.approx(formulas.weight_bytes, rel=1e-6)
    assert played.optimizer_bytes == pytest.approx(formulas.optimizer_bytes, rel=1e-6)
    most = 0.05 * formulas.activation_bytes  # in so small a model statistics of norms count
    assert played.activation_bytes == pytest.approx(formulas.activation_bytes, abs=most)
    assert played.flop == pytest.approx(formulas.flop, rel=1e-9)
    assert played.sent_bytes == pytest.approx(formulas.sent_bytes, rel=1e-6)


@pytest.mark.gloo
def test_a_planned_pipeline_trains_like_one_process(gloo_pool: GlooPool) -> None:
    """Each of two ranks holds several runs of the chain, one layer recomputed, as the solver chose."""
    plan = planned(job(Constraints(pins=("layer.2.*.recompute=full",))))
    assert (plan.world_size, plan.pipelines[0].schedule, plan.pipelines[0].num_virtual) == (2, "interleaved", 5)
    training, num_steps = plan.training, 3
    whole = run_reference(plan.model, training.global_batch, training.seq_len, torch.float64, num_steps)
    ranks = gloo_pool.run(run_rank, plan.world_size, plan.model_dump_json(), torch.float64, num_steps)
    for losses, norms, _, _ in ranks:
        assert losses == pytest.approx(whole.losses, rel=1e-10)
        assert norms == pytest.approx(whole.norms, rel=1e-10)
    gradients = largest_relative_error([p for rank in ranks for p in rank[2]], whole.gradients, complete=True)
    assert max(gradients.values()) < 1e-10, gradients
    weights = largest_relative_error([p for rank in ranks for p in rank[3]], whole.weights, complete=False)
    assert max(weights.values()) < 1e-10, weights
