"""After a lost rank the layout that goes on trains like one process: every gradient of every kind of tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from planner.contingency import replan
from specs.contingency import plan_after
from specs.layout import Interval
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec
from specs.plan import ContingencyPolicy, Plan
from tests.layouts import ReplicaShape, StageShape, build, small_model
from tests.parity import largest_relative_error, run_rank, run_reference
from tests.synthetic_costs import SyntheticCosts
from tests.test_parity_families import experts, gemma

if TYPE_CHECKING:
    from tests.gloo import GlooPool

NUM_STEPS = 3
BOUND = 1e-10  # float64
COSTS = SyntheticCosts(3)
FOUR_TWICE = [ReplicaShape([StageShape(4)], 1, 4), ReplicaShape([StageShape(4)], 1, 4)]


def after(plan: Plan, lost: int, policy: ContingencyPolicy = "reduced") -> Plan:
    return plan_after(plan, replan(plan, COSTS, [lost], policies=[policy]))


def seven_heads() -> ModelSpec:
    attention = Attention(hidden=28, num_heads=7, num_kv_heads=7, head_dim=4, qk_norm=True, qkv_bias=True)
    return ModelSpec(
        name="seven heads",
        embedding=Embedding(hidden=28, vocab=61),
        layers=(Layer(attention=attention, feed_forward=Mlp(hidden=28, ffn=50), repeat=2),),
        head=Head(hidden=28, vocab=61, tied=True),
    )


def eight_to_seven(blocks: dict[str, tuple[int, ...]], model: ModelSpec, zero: int) -> Plan:
    return build(model, [ReplicaShape([StageShape(7, blocks)], 7, 7)], zero=zero)


BIASES = small_model(layernorm=True, bias=True, positions=16, tied=True)
CASES: dict[str, Plan] = {
    "4 -> 3 beside 4: packed biases, positions, tied": after(build(BIASES, FOUR_TWICE), 1),
    "4 -> 3 beside 4: experts, zero 1": after(build(experts(), FOUR_TWICE, zero=1), 6),
    "4 -> 3: gated, KV heads shared, window": after(build(small_model(), [ReplicaShape([StageShape(4)], 1, 6)]), 0),
    "7 heads over 3": after(build(seven_heads(), FOUR_TWICE), 2),
    "6 -> 5: post-norms, caps, KV heads shared": after(build(gemma(), [ReplicaShape([StageShape(6)], 1, 5)]), 3),
    "8 -> 7 as 7: q/k norms, biases": eight_to_seven({}, small_model(qk_norm=True, bias=True), 0),
    "8 -> 7 as 4 + 3 and 7: q/k norms, biases, zero 1": eight_to_seven(
        {"attention": (4, 3)}, small_model(qk_norm=True, bias=True), 1
    ),
    "8 -> 7 as 4 + 3 and 7: experts": eight_to_seven({"attention": (4, 3), "moe": (7,)}, experts(), 0),
    "stages re-split 2 + 2 -> 3": after(
        build(small_model(), [ReplicaShape([StageShape(2), StageShape(2)], 1, 6)]), 0, "resplit"
    ),
    "split 4 -> 2 + 1 beside 4": after(build(small_model(), FOUR_TWICE), 5, "split"),
    "spare": after(
        build(small_model(), [ReplicaShape([StageShape(2)], 1, 4)]).model_copy(
            update={"cluster": build(small_model(), FOUR_TWICE).cluster}
        ),
        0,
        "spare",
    ),
}


def test_the_cases_are_what_they_are_called() -> None:
    sizes = {name: sorted(len(replica.ranks) for replica in plan.replicas) for name, plan in CASES.items()}
    for name, ranks in sizes.items():
        start = name.split(":")[0]
        expected = {
            "4 -> 3 beside 4": [3, 4],
            "4 -> 3": [3],
            "7 heads over 3": [3, 4],
            "6 -> 5": [5],
            "8 -> 7 as 7": [7],
            "8 -> 7 as 4 + 3 and 7": [7],
            "stages re-split 2 + 2 -> 3": [3],
            "split 4 -> 2 + 1 beside 4": [1, 2, 4],
            "spare": [2],
        }[start]
        assert ranks == expected, name
    units = CASES["7 heads over 3"].pipelines[-1].stages[0].modules[1]
    held = [units.units_of(rank, seven_heads().modules()[1][1]) for rank in range(3)]
    assert held == [Interval(0, 2), Interval(2, 4), Interval(4, 7)]


@pytest.mark.gloo
@pytest.mark.parametrize("name", CASES)
def test_what_is_left_trains_like_one_process(gloo_pool: GlooPool, name: str) -> None:
    plan = CASES[name]
    whole = run_reference(plan.model, plan.training.global_batch, plan.training.seq_len, torch.float64, NUM_STEPS)
    ranks = gloo_pool.run(run_rank, plan.world_size, plan.model_dump_json(), torch.float64, NUM_STEPS)
    for losses, norms, _, _ in ranks:
        assert losses == pytest.approx(whole.losses, rel=BOUND)
        assert norms == pytest.approx(whole.norms, rel=BOUND)
    gradients = largest_relative_error([p for rank in ranks for p in rank[2]], whole.gradients, complete=True)
    assert max(gradients.values()) < BOUND, gradients
    weights = largest_relative_error([p for rank in ranks for p in rank[3]], whole.weights, complete=False)
    assert max(weights.values()) < BOUND, weights
