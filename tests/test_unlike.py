"""Plans adapted to ranks of unlike speeds: cuts and shares against complete enumeration, and what they buy."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cost_models.sources import device_costs
from cost_models.speeds import with_speeds
from cost_models.step import price
from planner.ladder import Climb
from planner.make import make_plan
from planner.problem import Problem
from planner.space import Grid, Topology
from planner.unlike import adapt, proportional_cuts, replace_parts
from planner.unlike_rung import mean_speed
from specs.cluster import ClusterSpec
from specs.errors import BadInputError
from specs.model import num_units
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Replica, Stage, TrainingSpec
from specs.presets import load_cluster, load_model
from tests.synthetic_costs import SyntheticCosts, cluster, tiny_model

MADE = Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z")


def all_cuts(size, parts):
    for inner in combinations(range(1, size), parts - 1):
        yield (0, *inner, size)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(0, 9), st.data())
def test_units_go_by_speed_as_well_as_whole_units_can(parts, more, data):
    weights = [data.draw(st.sampled_from([0.2, 0.5, 0.7, 0.9, 1.0, 1.3])) for _ in range(parts)]
    size = parts + more

    def slowest(cuts):
        return max((b - a) / w for (a, b), w in zip(pairwise(cuts), weights, strict=True))

    found = proportional_cuts(size, weights)
    assert found in set(all_cuts(size, parts))
    assert slowest(found) == pytest.approx(min(slowest(cuts) for cuts in all_cuts(size, parts)))


def plan_of(model, machine, training, *, blocks, replicas, micro_batch, cuts=None):
    """One stage over all ranks of a replica; the same blocks and cuts for every module."""
    placed = tuple(
        ModulePlacement(module=name, blocks=blocks, cuts=None if cuts is None else cuts[name])
        for name, _ in model.modules()
    )
    size = sum(blocks)
    ranks = machine.ranks()
    share = training.global_batch // replicas
    return Plan(
        made=MADE,
        model=model,
        cluster=machine,
        training=training,
        pipelines=(Pipeline(micro_batch=micro_batch, stages=(Stage(num_ranks=size, modules=placed),)),),
        replicas=tuple(
            Replica(pipeline=0, ranks=ranks[r * size : (r + 1) * size], sequences=share) for r in range(replicas)
        ),
    )


@pytest.mark.parametrize("seed", range(20))
def test_cuts_of_a_block_with_a_slow_rank_against_all_cuts(seed):
    """Blocks over the whole stage: every way to cut every module (tokens make no difference to the work there)."""
    generator = random.Random(seed)
    size = generator.choice([2, 2, 3])
    machine = cluster(1, size).model_copy(update={"slow": {generator.randrange(size): generator.choice([0.4, 0.6])}})
    model = tiny_model(seed)
    if any(num_units(module) < size for _, module in model.modules()):
        pytest.skip("fewer units than ranks")
    training = TrainingSpec(global_batch=2, seq_len=6)
    costs = SyntheticCosts(seed)
    plan = plan_of(model, machine, training, blocks=(size,), replicas=1, micro_batch=1)
    found = adapt(plan, costs, 10**9)
    # Modules take a stage one after another, so the best cut of each is the best of all.
    best = 0.0
    for name, module in model.modules():
        seconds = []
        for cut in all_cuts(num_units(module), size):
            stage = plan.pipelines[0].stages[0]
            modules = [p.model_copy(update={"cuts": (cut,) if p.module == name else None}) for p in stage.modules]
            pipeline = plan.pipelines[0].model_copy(
                update={"stages": (stage.model_copy(update={"modules": tuple(modules)}),)}
            )
            seconds.append(price(replace_parts(plan, [pipeline], plan.replicas), costs).step_time_seconds)
        best += price(plan, costs).step_time_seconds - min(seconds)
    least = price(plan, costs).step_time_seconds - best
    assert found.seconds <= price(plan, costs).step_time_seconds
    # Units of attention also carry the KV heads they read, and sums once a step differ: so not to the last digit.
    assert found.seconds <= least * 1.03


@pytest.mark.parametrize("seed", range(12))
def test_shares_of_replicas_against_all_shares(seed):
    generator = random.Random(seed)
    replicas = generator.choice([2, 3, 4])
    slow = {rank: generator.choice([0.3, 0.5, 0.8]) for rank in range(replicas) if generator.random() < 0.5} or {0: 0.5}
    machine = cluster(1, replicas).model_copy(update={"slow": slow})
    model = tiny_model(seed)
    training = TrainingSpec(global_batch=replicas * generator.choice([2, 3, 4]), seq_len=6)
    costs = SyntheticCosts(seed)
    plan = plan_of(model, machine, training, blocks=(1,), replicas=replicas, micro_batch=1)
    found = adapt(plan, costs, 10**9)
    prices = []
    for shares in product(range(1, training.global_batch), repeat=replicas):
        if sum(shares) != training.global_batch:
            continue
        dealt = [r.model_copy(update={"sequences": n}) for r, n in zip(plan.replicas, shares, strict=True)]
        try:
            prices.append(price(replace_parts(plan, plan.pipelines, dealt), costs).step_time_seconds)
        except ValidationError:
            continue
    assert found.seconds == pytest.approx(min(prices), rel=1e-6)
    assert sum(replica.sequences for replica in found.plan.replicas) == training.global_batch


def test_equal_ranks_change_nothing():
    model, training = tiny_model(3), TrainingSpec(global_batch=4, seq_len=6)
    plan = plan_of(model, cluster(1, 2), training, blocks=(1,), replicas=2, micro_batch=1)
    found = adapt(plan, SyntheticCosts(3), 10**9)
    assert found.plan is plan
    assert found.changes == ()


def beside_each_other(*names: str) -> ClusterSpec:
    """One node of each shipped machine."""
    machines = [load_cluster(name) for name in names]
    devices = {kind: device for machine in machines for kind, device in machine.devices.items()}
    links = load_cluster("h100x16").links
    nodes = tuple(machine.nodes[0] for machine in machines)
    return ClusterSpec(name="mixed", devices=devices, nodes=nodes, links=links)


@pytest.mark.parametrize(("unlike", "least"), [({3: 0.8, 12: 0.7}, 0.10), ("another type", 0.15)])
def test_the_rung_pays_on_a_real_model(unlike, least):
    """Two slow GPUs of 16, and a node of H100 beside one of A100."""
    model, training = load_model("llama-3-8b"), TrainingSpec(global_batch=128, seq_len=8192)
    if unlike == "another type":
        mixed = beside_each_other("a100x8", "h100x8")
        with pytest.raises(BadInputError, match=r"unlike devices .*ranks of 2 kinds stand at full speed"):
            device_costs(mixed, training)
        machine = with_speeds(mixed, model, training)
        assert set(machine.slow) == set(range(8)), "the A100 come first, and are the slower ones"
        assert all(0.3 < speed < 0.6 for speed in machine.slow.values())
    else:
        machine = load_cluster("h100x16").model_copy(update={"slow": unlike})
    problem = Problem(model, machine, training, MADE)
    plan = make_plan(problem, device_costs, objective="step-time", freedom="modules", time_limit_seconds=20)
    rung = plan.ladder[-1]
    assert rung.freedom == "+ unlike devices"
    assert rung.gain_over_previous > least
    assert plan.predicted.step_time_seconds == pytest.approx(rung.step_time_seconds)
    again = price(plan, device_costs(machine, training))
    assert again.step_time_seconds == pytest.approx(plan.predicted.step_time_seconds)
    assert plan.predicted.peak_memory_bytes <= problem.memory_bytes
    assert plan.certificate.bound <= plan.certificate.objective_value


def test_shapes_that_the_search_has_not_priced_are_adapted(monkeypatch):
    """Ruled out with equal ranks, or without time for them: here the search knows even stages of whole nodes only."""

    def of_whole_nodes(searcher, pricer, _, *, deadline, **_words):
        own = searcher.within(searcher.capacity)
        own.grids = [grid for grid in own.grids if grid.num_ranks == 8]
        return Climb(own, pricer, "uniform", deadline=deadline)

    for module in ("make", "unlike_rung"):
        monkeypatch.setattr(f"planner.{module}.Climb", of_whole_nodes)
    machine = load_cluster("h100x16").model_copy(update={"slow": {3: 0.8, 12: 0.7}})
    problem = Problem(load_model("llama-3-8b"), machine, TrainingSpec(global_batch=128, seq_len=8192), MADE)
    plan = make_plan(problem, device_costs, objective="step-time", freedom="modules", time_limit_seconds=30, top_k=0)
    assert plan.predicted.step_time_seconds < 7.6
    assert plan.predicted.peak_memory_bytes <= problem.memory_bytes


@pytest.mark.parametrize("shape", [(1, 8, 2), (2, 4, 2), (4, 1, 4)])
def test_a_group_goes_at_the_speed_of_its_slowest_rank(shape):
    machine = load_cluster("h100x16").model_copy(update={"slow": {3: 0.8, 12: 0.7, 13: 0.5}})
    stages, ranks, replicas = shape
    grid = Grid(stages, ranks, replicas, 1, 8, "1f1b", 0)
    expected = {(1, 8, 2): 0.65, (2, 4, 2): (2 + 0.8 + 0.5) / 4, (4, 1, 4): (13 + 0.8 + 0.7 + 0.5) / 16}[shape]
    assert mean_speed(grid, machine, Topology(machine)) == pytest.approx(expected)
