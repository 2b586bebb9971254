"""Gradients and weights sharded over their owners (ZeRO-2, ZeRO-3): parity, bytes held, what cannot be sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from pydantic import ValidationError

from cost_models.buckets import holdings
from cost_models.gradient_sync import bucket_seconds
from cost_models.sharding import micro_batch_seconds
from cost_models.topology import Topology
from specs.plan import Plan
from specs.tensors import tensors_of
from tests.layouts import ReplicaShape, StageShape, build, small_model
from tests.parity import OPTIONS, SEED, largest_relative_error, run_rank, run_reference, tokens_of
from tests.plans import rank_memory
from tests.test_parity_families import experts

if TYPE_CHECKING:
    from tests.gloo import GlooPool

NUM_STEPS = 3
KINDS = ("embedding", "attention", "mlp", "head", "moe")
ONES2, ONES4 = dict.fromkeys(KINDS, (1, 1)), dict.fromkeys(KINDS, (1, 1, 1, 1))
MAX_BUCKETS = 30  # of a rank in these plans
TWO_STAGES = [StageShape(2), StageShape(1)]


def cases() -> dict[str, Plan]:
    """Name -> plan: both levels over blocks, replicas, stages, micro-batches, unlike cuts, recomputation."""
    plain, tied = small_model(), small_model(tied=True)
    found = {}
    for zero in (2, 3):
        twins = [ReplicaShape(TWO_STAGES, 1, 3) for _ in range(2)]
        found |= {
            f"zero {zero}, blocks of 1": build(plain, [ReplicaShape([StageShape(4, ONES4)], 4, 8)], zero=zero),
            f"zero {zero}, blocks of 3 and 2": build(
                plain, [ReplicaShape([StageShape(5, {"attention": (3, 2), "mlp": (1, 4)})], 5, 10)], zero=zero
            ),
            f"zero {zero}, replicas of two stages": build(plain, twins, zero=zero),
            f"zero {zero}, full recomputation, tied": build(
                tied, [ReplicaShape([StageShape(4, ONES4)], 4, 8)], zero=zero, recompute="full"
            ),
            f"zero {zero}, selective recomputation": build(
                plain, [ReplicaShape([StageShape(4, ONES4)], 4, 8)], zero=zero, recompute="selective"
            ),
            f"zero {zero}, split backward": build(
                plain, [ReplicaShape([StageShape(2, ONES2), StageShape(2, ONES2)], 2, 8, "zb-h1")], zero=zero
            ),
            f"zero {zero}, KV heads shared": build(plain, [ReplicaShape([StageShape(5)], 1, 3)], zero=zero),
            f"zero {zero}, experts": build(
                experts(), [ReplicaShape([StageShape(4, {"moe": (2, 2), "attention": (1, 3)})], 4, 8)], zero=zero
            ),
        }
    unlike = [ReplicaShape([StageShape(3)], 1, 5), ReplicaShape(TWO_STAGES, 1, 3)]
    return {
        **found,
        "zero 2, unlike replicas and counts of micro-batches": build(plain, unlike, zero=2),
        "zero 2, tied on two stages": build(tied, [ReplicaShape(TWO_STAGES, 1, 4)], zero=2),
    }


CASES = cases()


@pytest.mark.gloo
@pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlapped"])
@pytest.mark.parametrize("name", CASES)
def test_sharded_layout_trains_like_one_process(gloo_pool: GlooPool, name: str, overlap: bool) -> None:
    plan = CASES[name]
    whole = run_reference(plan.model, plan.training.global_batch, plan.training.seq_len, torch.float64, NUM_STEPS)
    ranks = gloo_pool.run(run_rank, plan.world_size, plan.model_dump_json(), torch.float64, NUM_STEPS, overlap)
    for losses, norms, _, _ in ranks:
        assert losses == pytest.approx(whole.losses, rel=1e-10)
        assert norms == pytest.approx(whole.norms, rel=1e-10)
    assert min(whole.norms) > 0.1, "clipping must be active"
    gradients = largest_relative_error([p for rank in ranks for p in rank[2]], whole.gradients, complete=True)
    assert max(gradients.values()) < 1e-10, gradients
    weights = largest_relative_error([p for rank in ranks for p in rank[3]], whole.weights, complete=False)
    assert max(weights.values()) < 1e-10, weights


class SecondPerByte:
    """Collectives take as many seconds as the whole tensor has bytes."""

    def collective(self, op: str, *, payload_bytes: int, **_: object) -> float:
        assert op in ("reduce_scatter", "all_gather")
        return float(payload_bytes)


def held_bytes(plan_json: str) -> tuple[int, int]:
    """Bytes that a rank holds before and after a step."""
    from executor.engine import Engine
    from executor.memory import static_bytes

    plan = Plan.model_validate_json(plan_json)
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=SEED)
    before = static_bytes(engine)
    tokens = tokens_of(plan.model, plan.training.global_batch, plan.training.seq_len, 1)
    engine.step(1, lambda first, count: tokens[first : first + count])
    return before, static_bytes(engine)


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_held_between_steps_are_those_of_the_cost_model(gloo_pool: GlooPool, zero: int) -> None:
    plan = build(small_model(), [ReplicaShape([StageShape(4, {"attention": (2, 2), "mlp": (1, 3)})], 4, 8)], zero=zero)
    measured = gloo_pool.run(held_bytes, 4, plan.model_dump_json())
    for rank, (before, after) in enumerate(measured):
        terms = rank_memory(plan, 0, 0, rank)
        assert before == after
        # Each bucket is padded to a multiple of its owners, and AdamW's moments come in pairs: 16 bytes an element.
        assert after == pytest.approx(terms.weights + terms.gradients + terms.optimizer, abs=16 * 4 * MAX_BUCKETS)


def test_each_level_holds_less() -> None:
    plans = [build(small_model(), [ReplicaShape([StageShape(4, ONES4)], 4, 8)], zero=zero) for zero in range(4)]
    terms = [rank_memory(plan, 0, 0, 0) for plan in plans]
    elements = terms[0].weights // 4
    vectors = sum(t.num_elements for _, m in plans[0].model.modules() for t in tensors_of(m) if not t.cols)
    assert [t.optimizer for t in terms] == [8 * elements, *3 * [2 * elements]]
    assert [t.gradients for t in terms] == [4 * elements, 4 * elements, *2 * [elements]]
    assert [t.weights for t in terms] == [*3 * [4 * elements], 4 * vectors + elements - vectors]


def test_a_micro_batch_sends_gradients_once_and_weights_twice() -> None:
    for zero in (2, 3):
        plan = build(small_model(), [ReplicaShape([StageShape(2, ONES2)], 2, 8)], zero=zero)
        sizes = dict(plan.model.modules())
        matrices = {n: 4 * sum(t.num_elements for t in tensors_of(m) if t.cols) for n, m in sizes.items()}
        vectors = 4 * sum(t.num_elements for m in sizes.values() for t in tensors_of(m) if not t.cols)
        held = holdings(plan).buckets
        costs = SecondPerByte()
        forward, backward = micro_batch_seconds(plan, costs, Topology(plan), held)[0, 0]
        whole = sum(matrices.values())
        ends = matrices["embedding"] + matrices["head"]
        assert forward == pytest.approx(whole if zero == 3 else 0.0, rel=1e-3)
        assert backward == pytest.approx(whole + vectors + (whole - ends if zero == 3 else 0.0), rel=1e-3)
        spans = Topology(plan).groups([bucket.members for bucket in held])
        once = sum(bucket_seconds(costs, span, bucket, "fp32") for span, bucket in zip(spans, held, strict=True))
        assert once == pytest.approx(vectors if zero == 3 else whole + vectors, rel=1e-3)


def test_weights_of_unlike_replicas_are_not_gathered() -> None:
    unlike = [ReplicaShape([StageShape(3)], 1, 5), ReplicaShape(TWO_STAGES, 1, 3)]
    with pytest.raises(ValidationError, match=r"needs equal pipelines .* 2 kinds .* Use zero 2 there"):
        build(small_model(), unlike, zero=3)


def test_tied_weights_on_two_stages_are_not_gathered() -> None:
    with pytest.raises(ValidationError, match=r"tied weights of embedding and head, which lie on two stages"):
        build(small_model(tied=True), [ReplicaShape(TWO_STAGES, 1, 4)], zero=3)


def measured_peak(plan_json: str) -> tuple[int, int]:
    """Peak and kept bytes of a rank's first step."""
    from executor.engine import Engine
    from executor.memory import measure_step

    plan = Plan.model_validate_json(plan_json)
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=SEED)
    tokens = tokens_of(plan.model, plan.training.global_batch, plan.training.seq_len, 1)
    with measure_step(engine) as readings:
        engine.step(1, lambda first, count: tokens[first : first + count])
    return readings[0].peak_bytes, readings[0].activation_bytes


@pytest.mark.gloo
def test_gathered_weights_count_in_the_peak_and_not_as_activations(gloo_pool: GlooPool) -> None:
    plans = [build(small_model(), [ReplicaShape([StageShape(4, ONES4)], 4, 8)], zero=zero) for zero in (2, 3)]
    (two, kept_two), (three, kept_three) = (
        gloo_pool.run(measured_peak, 4, plan.model_dump_json())[0] for plan in plans
    )
    assert kept_three == kept_two
    # Level 2 gathers all weights at once after the update as well.
    assert two - three >= rank_memory(plans[0], 0, 0, 0).weights - rank_memory(plans[1], 0, 0, 0).weights
