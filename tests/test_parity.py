"""Every layout trains like one process: losses, norms, gradients, weights after steps with clipping active."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from specs.plan import Plan
from tests.layouts import ReplicaShape, StageShape, build, small_model
from tests.parity import Trace, largest_relative_error, run_rank, run_reference

if TYPE_CHECKING:
    from tests.gloo import GlooPool

NUM_STEPS = 4
ONES = {n: (1,) * n for n in range(1, 9)}


def _one(num_ranks: int, micro_batch: int, sequences: int, **blocks: tuple[int, ...]) -> list[ReplicaShape]:
    return [ReplicaShape([StageShape(num_ranks, dict(blocks))], micro_batch, sequences)]


def cases() -> dict[str, Plan]:
    """Name -> plan."""
    plain = small_model()
    gpt = small_model(layernorm=True, bias=True, positions=16, tied=True)
    qwen = small_model(bias=True, qk_norm=True)
    tied = small_model(tied=True)
    mixed4 = {"attention": (2, 2), "mlp": (4,), "embedding": (1, 1, 1, 1), "head": (2, 2)}
    mixed7 = {
        "layer.0.attention": (4, 3),
        "layer.1.attention": (4, 3),
        "layer.2.attention": (7,),
        "layer.0.mlp": (7,),
        "layer.1.mlp": ONES[7],
        "layer.2.mlp": (2, 2, 3),
        "embedding": (2, 5),
        "head": (3, 4),
    }
    unequal = {"mlp": ((0, 30, 50),), "layer.1.mlp": ((0, 5, 37),), "layer.2.mlp": ((0, 40, 41),)}
    return {
        "one rank": build(plain, _one(1, 2, 4)),
        "tp 2": build(plain, _one(2, 1, 4)),
        "tp 3": build(plain, _one(3, 1, 3)),
        "tp 4, kv groups shared": build(plain, _one(4, 1, 2)),
        "tp 5, no size divides": build(plain, _one(5, 1, 2)),
        "dp in a stage 4": build(
            plain, _one(4, 4, 4, **dict.fromkeys(("embedding", "attention", "mlp", "head"), ONES[4]))
        ),
        "dp replicas 2": build(plain, [ReplicaShape([StageShape(1)], 1, 2), ReplicaShape([StageShape(1)], 1, 2)]),
        "pp 2": build(plain, [ReplicaShape([StageShape(1), StageShape(1)], 1, 4)]),
        "pp 4": build(plain, [ReplicaShape([StageShape(1)] * 4, 1, 6)]),
        "pp 3, gpipe": build(plain, [ReplicaShape([StageShape(1)] * 3, 1, 4, "gpipe")]),
        "pp 4, fewer micro-batches than stages": build(plain, [ReplicaShape([StageShape(1)] * 4, 1, 2)]),
        "mixed degrees 4": build(plain, _one(4, 2, 4, **mixed4)),
        "mixed degrees 7 with 4+3": build(plain, _one(7, 7, 7, **mixed7)),
        "tp 2 x pp 2 x dp 2": build(
            plain,
            [ReplicaShape([StageShape(2), StageShape(2)], 1, 2), ReplicaShape([StageShape(2), StageShape(2)], 1, 2)],
        ),
        "mixed tp, pp, dp": build(
            plain,
            [
                ReplicaShape([StageShape(2, {"attention": (1, 1)}), StageShape(2, {"mlp": (1, 1)})], 2, 4),
                ReplicaShape([StageShape(2, {"attention": (1, 1)}), StageShape(2, {"mlp": (1, 1)})], 2, 4),
            ],
        ),
        "stages of 3 and 1 ranks": build(plain, [ReplicaShape([StageShape(3), StageShape(1)], 1, 3)]),
        "stages of 1, 4 and 2 ranks": build(plain, [ReplicaShape([StageShape(1), StageShape(4), StageShape(2)], 1, 3)]),
        "replicas tp 4 and tp 3": build(
            plain, [ReplicaShape([StageShape(4)], 1, 5), ReplicaShape([StageShape(3)], 1, 3)]
        ),
        "replicas of unlike depth": build(
            plain,
            [
                ReplicaShape([StageShape(2), StageShape(1)], 1, 3),
                ReplicaShape([StageShape(3, {"mlp": (1, 2)})], 3, 3),
                ReplicaShape([StageShape(1)], 2, 2),
            ],
        ),
        "unequal cuts": build(plain, [ReplicaShape([StageShape(2, cuts=unequal)], 1, 2)]),
        "gpt: biases, positions, tied": build(gpt, _one(3, 1, 3)),
        "gpt tied over stages": build(gpt, [ReplicaShape([StageShape(2), StageShape(1)], 1, 3)]),
        "tied, unlike cuts on one rank": build(tied, _one(4, 2, 2, embedding=(4,), head=(2, 2), attention=(2, 2))),
        "tied, equal cuts": build(tied, _one(2, 1, 2)),
        "qwen: qk norm, biases": build(qwen, _one(4, 2, 2, attention=(2, 2), mlp=(4,))),
        "selective recompute": build(qwen, _one(3, 1, 3), recompute="selective"),
        "gathered inputs kept": build(qwen, _one(3, 3, 3, mlp=(1, 2)), recompute="keep"),
        "full recompute, pp": build(plain, [ReplicaShape([StageShape(2), StageShape(2)], 1, 4)], recompute="full"),
        "zero 1": build(plain, [ReplicaShape([StageShape(2)], 1, 2), ReplicaShape([StageShape(2)], 1, 2)], zero=1),
        "zero 1, mixed degrees": build(plain, _one(4, 4, 4, **mixed4), zero=1),
        "zero 1, replicas tp 4 and tp 3": build(
            gpt, [ReplicaShape([StageShape(4)], 1, 5), ReplicaShape([StageShape(3)], 1, 3)], zero=1
        ),
    }


CASES = cases()


@cache
def _reference(model_json: str, global_batch: int, seq_len: int, dtype: torch.dtype) -> Trace:
    from specs.model import ModelSpec

    return run_reference(ModelSpec.model_validate_json(model_json), global_batch, seq_len, dtype, NUM_STEPS)


@pytest.mark.gloo
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_layout_trains_like_one_process(gloo_pool: GlooPool, name: str, dtype: torch.dtype, bound: float) -> None:
    plan = CASES[name]
    whole = _reference(plan.model.model_dump_json(), plan.training.global_batch, plan.training.seq_len, dtype)
    ranks = gloo_pool.run(run_rank, plan.world_size, plan.model_dump_json(), dtype, NUM_STEPS)
    for losses, norms, _, _ in ranks:
        assert losses == pytest.approx(whole.losses, rel=bound)
        assert norms == pytest.approx(whole.norms, rel=bound)
    assert min(whole.norms) > 0.1, "clipping must be active"
    gradients = largest_relative_error([p for rank in ranks for p in rank[2]], whole.gradients, complete=True)
    assert max(gradients.values()) < bound, gradients
    weights = largest_relative_error([p for rank in ranks for p in rank[3]], whole.weights, complete=False)
    assert max(weights.values()) < bound, weights
