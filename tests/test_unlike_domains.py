"""Clusters whose nodes have unlike numbers of ranks: what is planned for them, against equal ranks and enumeration."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cost_models.rank_work import PlanWork
from cost_models.sources import device_costs
from cost_models.step import price
from planner.blocks import blocks_of, describe_blocks, stage_degrees
from planner.make import make_plan
from planner.problem import Problem
from planner.space import divisors
from planner.unlike_domains import as_whole
from planner.work_bound import rank_seconds
from specs.cluster import NodeGroup
from specs.errors import PlaitError
from specs.model import SEQUENCE_KINDS, num_units
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Replica, Stage, TrainingSpec
from specs.presets import load_cluster, load_model
from tests.synthetic_costs import SyntheticCosts, cluster, tiny_model

MADE = Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z")
ROOT = Path(__file__).resolve().parents[1]
RUNG = "+ unlike domains"


@given(st.integers(1, 200))
def test_every_degree_has_one_composition_of_few_even_blocks(num_ranks):
    degrees = stage_degrees(num_ranks)
    for degree in degrees:
        blocks = blocks_of(degree, num_ranks)
        assert sum(blocks) == num_ranks
        assert max(blocks) == degree
        assert max(blocks) - min(blocks) <= 1
        assert len(blocks) == -(-num_ranks // degree)
        assert list(blocks) == sorted(blocks, reverse=True)
    assert set(degrees) >= {d for d in range(1, num_ranks + 1) if num_ranks % d == 0}
    if num_ranks & (num_ranks - 1) == 0:
        assert all(num_ranks % degree == 0 for degree in degrees)
    else:
        assert all(blocks_of(t, num_ranks) in {blocks_of(d, num_ranks) for d in degrees} for t in range(1, num_ranks))


def test_blocks_in_words():
    assert describe_blocks((4, 4)) == "4"
    assert describe_blocks((4, 3)) == "4+3"
    assert describe_blocks((2, 2, 2, 1)) == "3x2+1"


def test_a_cluster_is_made_whole():
    """A rank missing, a node missing, both; nodes of unlike sizes; the real ranks' names come back."""
    whole = as_whole(cluster(2, 4).model_copy(update={"missing": (1,)}))
    assert whole.cluster.num_devices == 8
    assert whole.names == (4, 5, 6, 7, 0, 2, 3, -1)
    assert whole.absent == (7,)
    assert as_whole(cluster(2, 4)) is None
    assert as_whole(cluster(2, 4).model_copy(update={"missing": (0, 1, 2, 3)})) is None
    both = as_whole(cluster(3, 2).model_copy(update={"missing": (0, 1, 4)}))
    assert both.cluster.num_devices == 4
    assert both.names == (2, 3, 5, -1)
    unlike = cluster(1, 2)
    unlike = unlike.model_copy(update={"nodes": (*unlike.nodes, NodeGroup(count=1, devices_per_node=4, device="d"))})
    assert as_whole(unlike).names == (2, 3, 4, 5, 0, 1, -1, -1)


def unlike_plans(model, machine, training, costs):
    """Plans of two replicas of one stage on nodes of two ranks and one: all blocks, micro-batches and shares."""
    names = [name for name, _ in model.modules()]
    two = [list(blocks) for blocks in product([(2,), (1, 1)], repeat=len(names))]
    large, small = (tuple(ranks) for ranks in machine.node_ranks())
    large, small = (tuple(r for r in own if r not in machine.missing) for own in (large, small))
    if len(large) < len(small):
        large, small = small, large
    for share in range(1, training.global_batch):
        for first, second in product(divisors(share), divisors(training.global_batch - share)):
            for blocks in two:
                stages = [
                    Stage(
                        num_ranks=size,
                        modules=tuple(
                            ModulePlacement(module=name, blocks=b, zero=1) for name, b in zip(names, own, strict=True)
                        ),
                    )
                    for size, own in ((2, blocks), (1, [(1,)] * len(names)))
                ]
                try:
                    plan = Plan(
                        made=MADE,
                        model=model,
                        cluster=machine,
                        training=training,
                        pipelines=tuple(
                            Pipeline(micro_batch=size, stages=(stage,))
                            for size, stage in zip((first, second), stages, strict=True)
                        ),
                        replicas=(
                            Replica(pipeline=0, ranks=large, sequences=share),
                            Replica(pipeline=1, ranks=small, sequences=training.global_batch - share),
                        ),
                    )
                except ValidationError:
                    continue
                yield price(plan, costs)


@pytest.mark.parametrize("seed", range(8))
def test_against_all_plans_of_two_unlike_replicas(seed):
    """Three ranks of two nodes of two: no plan is below the bound, and the plan is as good as any, or nearly."""
    machine = cluster(2, 2).model_copy(update={"missing": (seed % 4,)})
    model, training, costs = tiny_model(seed), TrainingSpec(global_batch=4, seq_len=6), SyntheticCosts(seed)
    best = min(found.step_time_seconds for found in unlike_plans(model, machine, training, costs))
    problem = Problem(model, machine, training, MADE)
    plan = make_plan(problem, lambda *_: costs, objective="step-time", freedom="modules")
    assert plan.ladder[-1].freedom == RUNG
    assert plan.ladder[-1].gain_over_previous > 0.03
    assert plan.certificate.bound <= min(best, plan.certificate.objective_value) * (1 + 1e-9)
    assert price(plan, costs).step_time_seconds == plan.certificate.objective_value
    assert plan.certificate.objective_value <= best * 1.001


@pytest.mark.parametrize("seed", [0, 3])
def test_never_worse_than_equal_ranks(seed):
    """Plans for what is there stay within memory and its ranks, are priced exactly, and never lose to equal ranks."""
    generator = random.Random(seed)
    nodes, per_node, lost = generator.choice([(2, 2, 1), (1, 4, 1), (2, 4, 1), (2, 4, 2), (3, 2, 1), (1, 8, 1)])
    machine = cluster(nodes, per_node)
    machine = machine.model_copy(update={"missing": tuple(sorted(generator.sample(range(machine.num_devices), lost)))})
    model, training = tiny_model(seed, num_layers=2), TrainingSpec(global_batch=generator.choice([4, 8]), seq_len=8)
    costs = SyntheticCosts(seed)
    roomy = make_plan(Problem(model, machine, training, MADE), lambda *_: costs, freedom="modules")
    for cap in (None, int(roomy.predicted.peak_memory_bytes * generator.uniform(0.6, 1.0))):
        plans = []
        problem = Problem(model, machine, training, MADE, cap)
        for freedom in ("stages", "modules"):  # the first has no such rung, and all of its layouts are equal ranks'
            try:
                plans.append(make_plan(problem, lambda *_: costs, objective="step-time", freedom=freedom))
            except PlaitError:
                plans.append(None)
        equal, plan = plans
        if plan is None:
            assert equal is None
            continue
        assert plan.predicted == price(plan, costs)
        assert plan.predicted.peak_memory_bytes <= problem.memory_bytes
        assert plan.cluster == machine
        assert not set(machine.missing) & {rank for replica in plan.replicas for rank in replica.ranks}
        assert plan.certificate.bound <= plan.certificate.objective_value
        if equal is not None:
            assert plan.certificate.objective_value <= equal.certificate.objective_value * (1 + 1e-12)
            assert plan.certificate.bound <= equal.certificate.objective_value


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.sampled_from([1, 2, 3, 4, 7, 8]), st.sampled_from([1, 3, 8, 64]), st.data())
def test_no_block_does_a_sequence_in_less_than_the_bound_says(tokens, degree, sequences, data):
    """Shipped data, blocks of any size and number of tokens: ranks x seconds for each sequence."""
    training = TrainingSpec(global_batch=64, seq_len=8192)
    costs = device_costs(load_cluster("h100x8"), training)
    models = (load_model("llama-3-8b"), load_model("mixtral-8x7b"), load_model("gpt2"))
    module = data.draw(st.sampled_from([m for model in models for m in dict.fromkeys(m for _, m in model.modules())]))
    if degree > num_units(module):
        return
    whole = module.kind in SEQUENCE_KINDS
    size = 8192 * sequences if whole else max(degree, 8192 * sequences - 97 * tokens)
    cost = costs.module(module, degree=degree, block_tokens=size, seq_len=8192, recompute="none", level="scale_up")
    found = degree * (cost.forward_seconds + cost.backward_seconds) * 8192 / size
    assert found >= rank_seconds(module, training, costs, 8) * (1 - 1e-9)


def test_sixteen_gpus_less_one():
    """Step time beside that of all sixteen, shared by those that are left."""
    model, training = load_model("llama-3-8b"), TrainingSpec(global_batch=128, seq_len=8192)
    whole, machine = load_cluster("h100x16"), load_cluster(str(ROOT / "examples" / "h100x16-one-missing.json"))
    before = make_plan(Problem(model, whole, training, MADE), device_costs, objective="step-time", freedom="layers")
    problem = Problem(model, machine, training, MADE)
    plan = make_plan(problem, device_costs, objective="step-time", freedom="modules")
    assert plan.ladder[-1].freedom == RUNG
    assert plan.ladder[-1].gain_over_previous > 0.10
    assert all("slower" in other.reason for other in plan.alternatives if other.step_time_seconds is not None)
    assert plan.predicted.step_time_seconds <= 1.05 * before.predicted.step_time_seconds * 16 / 15
    assert plan.predicted.peak_memory_bytes <= problem.memory_bytes
    assert plan.certificate.bound <= plan.certificate.objective_value
    seats = PlanWork(plan).fullest_seats()
    assert {seat.rank for seat in seats} <= set(machine.ranks())


def test_what_nothing_divides_is_planned_all_the_same():
    """Thirteen ranks are prime: equal stages would be thirteen of one rank, of which the model has no layers."""
    machine = cluster(2, 8).model_copy(update={"missing": (1, 2, 3)})
    model, training = tiny_model(1, num_layers=2), TrainingSpec(global_batch=16, seq_len=8)
    costs = SyntheticCosts(1)
    with pytest.raises(PlaitError):
        make_plan(Problem(model, machine, training, MADE), lambda *_: costs, freedom="stages")
    plan = make_plan(Problem(model, machine, training, MADE), lambda *_: costs, freedom="modules")
    assert [rung.freedom for rung in plan.ladder] == [RUNG]
    assert plan.world_size <= 13
    with pytest.raises(PlaitError):
        make_plan(Problem(model, machine, training, MADE, 2000), lambda *_: costs, freedom="modules")
