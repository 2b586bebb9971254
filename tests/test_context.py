"""Context parallelism: blocks that share sequences train like one process, and plans say what cannot be shared."""

from __future__ import annotations

import time
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cost_models.rank_work import PlanWork, seat_of
from cost_models.sources import device_costs
from cost_models.step import price
from executor.attention import mask_table
from executor.dry_run import dry_run
from planner.grid_search import Incumbent
from planner.make import make_plan
from planner.problem import Pricer, Problem, make_searcher
from specs import slices as specs_slices
from specs.layout import Interval
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec
from specs.plan import Plan, Provenance, TrainingSpec
from specs.presets import load_cluster
from specs.slices import attention_pieces, mask_shape, slices
from tests.layouts import ReplicaShape, StageShape, build, small_model
from tests.parity import Trace, largest_relative_error, run_rank, run_reference
from tests.test_dry_run import agree
from tests.test_parity_families import experts, gemma

if TYPE_CHECKING:
    from tests.gloo import GlooPool

NUM_STEPS = 3
ONES = {n: (1,) * n for n in range(1, 9)}


def cases() -> dict[str, Plan]:
    """Name -> plan.  Layer 1 of the small model has a window of 3 and shares KV heads."""
    plain = small_model()
    gpt = small_model(layernorm=True, bias=True, positions=16, tied=True)
    qwen = small_model(bias=True, qk_norm=True)
    two = StageShape(4, {"attention": (2, 2)})
    mixed = {"layer.0.attention": (1, 1, 1, 1), "layer.1.attention": (2, 2), "mlp": (4,), "head": (3, 1)}
    return {
        "cp 2": build(plain, [ReplicaShape([StageShape(2, {"attention": ONES[2]})], 1, 2, context=2)]),
        "cp 2 x tp 2": build(qwen, [ReplicaShape([two], 1, 2, context=2)]),
        "cp 4, 2 and 1 by layer": build(plain, [ReplicaShape([StageShape(4, mixed)], 1, 2, context=4)]),
        "cp 3 in blocks of 1, micro-batch 2": build(
            gpt, [ReplicaShape([StageShape(6, {"attention": ONES[6]})], 2, 2, context=3)], seq_len=12
        ),
        "cp 2 x tp 2, selective recompute": build(qwen, [ReplicaShape([two], 1, 2, context=2)], recompute="selective"),
        "cp 2, stages of 4 and 2, zero 1, full recompute": build(
            plain,
            [
                ReplicaShape([two, StageShape(2, {"attention": (1, 1)})], 1, 3, context=2),
                ReplicaShape([StageShape(2)], 1, 2),
            ],
            zero=1,
            recompute="full",
        ),
        "cp 2 x tp 3, zb-h1, KV heads shared": build(
            plain, [ReplicaShape([StageShape(6, {"attention": (3, 3)}), StageShape(1)], 1, 3, "zb-h1", context=2)]
        ),
        "cp 2, caps, windows, norms of outputs": build(gemma(), [ReplicaShape([two], 1, 2, context=2)]),
        "cp 2, experts": build(experts(), [ReplicaShape([two], 1, 2, context=2)]),
    }


CASES = cases()


@cache
def _reference(model_json: str, global_batch: int, seq_len: int, dtype: torch.dtype) -> Trace:
    return run_reference(ModelSpec.model_validate_json(model_json), global_batch, seq_len, dtype, NUM_STEPS)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [(name, torch.float64, 1e-10) for name in CASES]
    + [(name, torch.float32, 1e-5) for name in ("cp 2 x tp 2, selective recompute", "cp 4, 2 and 1 by layer")],
)
def test_shared_sequences_train_like_one_process(
    gloo_pool: GlooPool, name: str, dtype: torch.dtype, bound: float
) -> None:
    plan = CASES[name]
    whole = _reference(plan.model.model_dump_json(), plan.training.global_batch, plan.training.seq_len, dtype)
    ranks = gloo_pool.run(run_rank, plan.world_size, plan.model_dump_json(), dtype, NUM_STEPS)
    for losses, norms, _, _ in ranks:
        assert losses == pytest.approx(whole.losses, rel=bound)
        assert norms == pytest.approx(whole.norms, rel=bound)
    gradients = largest_relative_error([p for rank in ranks for p in rank[2]], whole.gradients, complete=True)
    assert max(gradients.values()) < bound, gradients
    weights = largest_relative_error([p for rank in ranks for p in rank[3]], whole.weights, complete=False)
    assert max(weights.values()) < bound, weights


def _allowed(distance: int, window: int | None) -> bool:
    return distance >= 0 and (window is None or distance < window)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 30)),
    st.integers(1, 5),
    st.data(),
)
def test_pieces_hold_every_allowed_pair_once(
    context: int, width: int, ranks: int, window: int | None, rows: int, data: st.DataObject
) -> None:
    """Every query of every part sees exactly the keys that the causal mask and the window allow."""
    seq_len = 2 * context * width
    pairs = sorted({0, context, *data.draw(st.lists(st.integers(0, context), max_size=ranks - 1))})
    seen: dict[int, set[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specs_slices, "MAX_ROWS", rows)
        patch.setattr(specs_slices, "MIN_ROWS", rows)
        for first, last in pairwise(pairs):
            part = Interval(first * 2 * width, last * 2 * width)
            positions = [p for run in slices.__wrapped__(part, seq_len, context) for p in range(*run)]
            pieces = attention_pieces.__wrapped__(part, seq_len, context, window)
            assert [row for piece in pieces for row in range(*piece.rows)] == list(range(part.size))
            shape = mask_shape(pieces, window, False)
            table = None if shape is None else mask_table(*shape, window, torch.float32, torch.device("cpu"))
            for piece in pieces:
                for row in range(*piece.rows):
                    query, at = positions[row], row - piece.rows.start
                    if piece.is_causal(window):
                        keys = set(range(piece.keys.start, piece.keys.start + at + 1))
                    else:
                        assert table is not None
                        own = table[table.shape[0] - piece.rows.size :, table.shape[1] - piece.keys.size :][at]
                        keys = {piece.keys.start + i for i in (own == 0).nonzero().flatten().tolist()}
                    assert seen.setdefault(query, keys) is keys, "every query has one place"
    assert seen == {q: {k for k in range(seq_len) if _allowed(q - k, window)} for q in range(seq_len)}


@given(st.integers(1, 8), st.integers(1, 4))
def test_pairs_of_slices_are_the_same_work(context: int, width: int) -> None:
    seq_len = 2 * context * width
    work = set()
    for pair in range(context):
        runs = slices(Interval(2 * pair * width, 2 * (pair + 1) * width), seq_len, context)
        work.add(sum(position + 1 for run in runs for position in range(*run)))
    assert len(work) == 1


def _changed(plan: Plan, **update: object) -> dict[str, object]:
    content = plan.model_dump(mode="json")
    content["pipelines"][0] |= update
    return content


def test_what_cannot_share_a_sequence_is_refused() -> None:
    plan = CASES["cp 2 x tp 2"]
    with pytest.raises(ValidationError, match=r"do not hold whole sequences.*or context_parallel"):
        Plan.model_validate(_changed(plan, context_parallel=1))
    with pytest.raises(ValidationError, match="context_parallel 3 cuts a sequence into 6 equal slices, its 8 tokens"):
        Plan.model_validate(_changed(plan, context_parallel=3))
    content = _changed(plan)
    attention = content["pipelines"][0]["stages"][0]["modules"][1]  # type: ignore[index]
    attention["blocks"] = [3, 1]
    with pytest.raises(ValidationError, match=r"block 0 of \[3, 1\] holds tokens 0 to 6, which are no whole pairs"):
        Plan.model_validate(content)
    attention["blocks"], attention["cuts"] = [2, 2], [[0, 4, 8], [0, 3, 8]]
    with pytest.raises(ValidationError, match=r"block 1 of .* shares a sequence with block 0, which is cut diff"):
        Plan.model_validate(content)
    wide = build(small_model(), [ReplicaShape([StageShape(4, {"attention": (4,)})], 3, 3, context=4)])
    content = wide.model_dump(mode="json")
    stage = content["pipelines"][0]["stages"][0]
    stage["token_cuts"] = [0, 3, 6, 12, 24]
    for module in stage["modules"]:
        if module["module"].endswith("attention"):
            module["blocks"] = [3, 1]
    with pytest.raises(ValidationError, match="holds tokens 0 to 12: parts of several sequences of 8"):
        Plan.model_validate(content)


def long_model() -> ModelSpec:
    """Eight query heads over two KV heads, hidden 1,024."""
    attention = Attention(hidden=1024, num_heads=8, num_kv_heads=2, head_dim=128)
    layers = (Layer(attention=attention, feed_forward=Mlp(hidden=1024, ffn=4096)),) * 3
    embedding, head = Embedding(hidden=1024, vocab=8192), Head(hidden=1024, vocab=8192)
    return ModelSpec(name="long", embedding=embedding, layers=layers, head=head)


@pytest.mark.parametrize(
    ("model", "recompute"),
    [(long_model(), "none"), (long_model(), "selective"), (long_model(), "full"), (gemma(), "none")],
    ids=["none", "selective", "full", "gemma, windows and caps"],
)
def test_shared_sequences_play_as_the_formulas_say(model: ModelSpec, recompute: str) -> None:
    """Operations, bytes kept and bytes sent of slices in several pieces."""
    shape = StageShape(6, {"attention": (2, 2, 2), "mlp": (6,)})
    plan = build(model, [ReplicaShape([shape], 1, 2, context=3)], recompute=recompute, seq_len=6 * 1280)
    works = PlanWork(plan)
    rotary = 4 * 2 * 2560 * 64 if recompute == "full" else 0  # the table, which the formulas leave out
    for process in (1, 5):
        agree(dry_run(plan, process), works.of(seat_of(plan, process)), passing_bytes=rotary)


@pytest.mark.parametrize(("gib", "alone_fits"), [(9, False), (30, True)])
def test_long_sequences_share_domains(gib: int, alone_fits: bool) -> None:
    """One sequence, two domains of eight devices, eight heads: by stages they take turns, sharing it they do not."""
    problem = Problem(
        model=long_model(),
        cluster=load_cluster("h100x16"),
        training=TrainingSpec(global_batch=1, seq_len=2**20, precision="bf16"),
        provenance=Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z"),
        memory_cap_bytes=gib * 2**30,
    )
    costs = device_costs(problem.cluster, problem.training)
    alone = make_searcher(problem, costs)
    incumbent = Incumbent(Pricer(problem, alone).seconds)
    found = alone.search("modules", incumbent, deadline=time.monotonic() + 60.0)
    assert (found.layout is not None) == alone_fits
    plan = make_plan(problem, lambda *_: costs, freedom="modules")
    (pipeline,) = plan.pipelines
    assert pipeline.context_parallel > 1
    assert any(len(p.blocks) > 1 for stage in pipeline.stages for p in stage.modules if p.module.endswith("attention"))
    assert plan.predicted is not None
    assert plan.predicted.step_time_seconds < found.seconds
    assert plan.predicted.peak_memory_bytes <= gib * 2**30
    assert price(Plan.model_validate(plan.model_dump()), costs).step_time_seconds == plan.predicted.step_time_seconds
    assert plan.alternatives
