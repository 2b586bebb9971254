"""What only some families have trains like one process too: Gemma's norms, caps and scales, mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec, Moe, Norm
from specs.plan import Plan
from tests.layouts import ReplicaShape, StageShape, build
from tests.parity import largest_relative_error, run_rank, run_reference

if TYPE_CHECKING:
    from tests.gloo import GlooPool

NUM_STEPS = 4
HIDDEN = 24


def gemma(tied: bool = False) -> ModelSpec:
    """Post-norms, 1 + weight, scaled embedding, both caps, q/k norms, near and far layers with unlike rotations."""
    norm = Norm(unit_offset=True)

    def layer(ffn: int, heads: int, groups: int, **options: Any) -> Layer:
        attention = Attention(
            hidden=HIDDEN,
            num_heads=heads,
            num_kv_heads=groups,
            head_dim=4,
            norm=norm,
            qk_norm=True,
            post_norm=True,
            score_scale=0.4,
            score_cap=2.0,
            **options,
        )
        mlp = Mlp(hidden=HIDDEN, ffn=ffn, activation="gelu_tanh", norm=norm, post_norm=True)
        return Layer(attention=attention, feed_forward=mlp)

    return ModelSpec(
        name="gemma",
        embedding=Embedding(hidden=HIDDEN, vocab=61, scale=HIDDEN**0.5),
        layers=(layer(50, 8, 4, window=3), layer(37, 6, 3, rope_theta=1e6, rope_factor=8.0)),
        head=Head(hidden=HIDDEN, vocab=61, tied=tied, norm=norm, logit_cap=0.5),
    )


def experts() -> ModelSpec:
    """A dense first layer, then experts with and without shared ones."""
    attention = Attention(hidden=HIDDEN, num_heads=8, num_kv_heads=4, head_dim=4)
    moe = {"hidden": HIDDEN, "num_experts": 7, "experts_per_token": 2, "expert_ffn": 5}
    return ModelSpec(
        name="experts",
        embedding=Embedding(hidden=HIDDEN, vocab=61),
        layers=(
            Layer(attention=attention, feed_forward=Mlp(hidden=HIDDEN, ffn=50)),
            Layer(attention=attention, feed_forward=Moe(**moe, shared_ffn=9)),
            Layer(attention=attention, feed_forward=Moe(**moe)),
        ),
        head=Head(hidden=HIDDEN, vocab=61),
    )


def _one(num_ranks: int, micro_batch: int, sequences: int, **blocks: tuple[int, ...]) -> list[ReplicaShape]:
    return [ReplicaShape([StageShape(num_ranks, dict(blocks))], micro_batch, sequences)]


UNLIKE = [ReplicaShape([StageShape(4)], 1, 2), ReplicaShape([StageShape(1), StageShape(2)], 1, 1)]
CASES: dict[str, Plan] = {
    "gemma, tp 3": build(gemma(), _one(3, 1, 3)),
    "gemma, tied, mixed 4": build(gemma(tied=True), _one(4, 2, 2, attention=(2, 2), mlp=(1, 3), head=(2, 2))),
    "gemma, unlike replicas, zero 1": build(gemma(), UNLIKE, zero=1),
    "gemma, selective recompute": build(gemma(), _one(2, 1, 2), recompute="selective"),
    "experts, one rank": build(experts(), _one(1, 2, 4)),
    "experts, tp 4": build(experts(), _one(4, 1, 2)),
    "experts, mixed 5": build(experts(), _one(5, 5, 5, attention=(1,) * 5, moe=(2, 3), mlp=(5,), head=(4, 1))),
    "experts, unlike replicas": build(experts(), UNLIKE),
    "experts, zero 1, cuts on purpose": build(
        experts(),
        [ReplicaShape([StageShape(3, cuts={"moe": ((0, 4, 6, 7),)})], 1, 2), ReplicaShape([StageShape(2)], 1, 1)],
        zero=1,
    ),
    "experts, selective recompute": build(experts(), _one(2, 1, 2), recompute="selective"),
    "experts, full recompute, pp": build(
        experts(), [ReplicaShape([StageShape(2), StageShape(1)], 1, 3)], recompute="full"
    ),
}


@pytest.mark.gloo
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_family_trains_like_one_process(gloo_pool: GlooPool, name: str, dtype: torch.dtype, bound: float) -> None:
    plan = CASES[name]
    whole = run_reference(plan.model, plan.training.global_batch, plan.training.seq_len, dtype, NUM_STEPS)
    ranks = gloo_pool.run(run_rank, plan.world_size, plan.model_dump_json(), dtype, NUM_STEPS)
    for losses, norms, _, _ in ranks:
        assert losses == pytest.approx(whole.losses, rel=bound)
        assert norms == pytest.approx(whole.norms, rel=bound)
    assert min(whole.norms) > 0.1, "clipping must be active"
    gradients = largest_relative_error([p for rank in ranks for p in rank[2]], whole.gradients, complete=True)
    assert max(gradients.values()) < bound, gradients
    weights = largest_relative_error([p for rank in ranks for p in rank[3]], whole.weights, complete=False)
    assert max(weights.values()) < bound, weights
