"""Latent attention is counted right: weights and active weights of DeepSeek-V3, operations, bytes, whole sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_models.activations import activation_bytes
from cost_models.flops import gathered_width, matrix_flop, score_flop
from cost_models.kernels import products_of
from cost_models.share import Share
from cost_models.sources import device_costs
from cost_models.step import price
from cost_models.working import working_bytes
from executor.collectives import Block
from executor.layout import ModuleLayout
from executor.stage import build_module
from specs.errors import BadInputError
from specs.layout import Interval, balanced_cuts, interval_of
from specs.model import Attention, Embedding, Head, LatentAttention, Layer, Mlp, ModelSpec, Moe
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Replica, Stage, TrainingSpec
from specs.presets import cluster_preset, model_preset
from specs.tensors import local_num_elements, num_parameters, tensors_of

SMALL = LatentAttention(hidden=96, num_heads=6, query_rank=24, kv_rank=16, head_dim=16, rope_dim=8, value_dim=12)
MODEL = ModelSpec(
    name="small latent",
    embedding=Embedding(hidden=96, vocab=64),
    layers=(Layer(attention=SMALL, feed_forward=Mlp(hidden=96, ffn=128), repeat=2),),
    head=Head(hidden=96, vocab=64),
)


def test_deepseek_v3_has_its_published_size() -> None:
    """arXiv 2412.19437, section 4.2: 671B in all, 37B for each token."""
    model = model_preset("deepseek-v3")
    assert num_parameters(model.modules()) == pytest.approx(671.0e9, rel=1e-3)
    active = 0.0
    for _, module in model.modules():
        for tensor in tensors_of(module):
            routed = isinstance(module, Moe) and tensor.cut == "unit"
            share = module.experts_per_token / module.num_experts if routed else 1.0
            active += share * tensor.num_elements
    assert active == pytest.approx(37e9, rel=0.02)  # with the embedding 37.6, without it 36.6


@given(degree=st.integers(1, 6), tokens=st.integers(6, 60))
def test_ranks_of_a_block_together_do_the_work_of_one(degree: int, tokens: int) -> None:
    cuts = balanced_cuts(SMALL.num_heads, degree)
    own = [interval_of(cuts, part) for part in range(degree)]
    whole = Interval(0, SMALL.num_heads)
    assert sum(matrix_flop(SMALL, tokens, units) for units in own) == pytest.approx(matrix_flop(SMALL, tokens, whole))
    assert sum(score_flop(SMALL, tokens, 6, units) for units in own) == pytest.approx(
        score_flop(SMALL, tokens, 6, whole)
    )


def test_operations_are_two_per_token_and_weight() -> None:
    matrices = sum(tensor.num_elements for tensor in tensors_of(SMALL) if tensor.cols)
    assert matrix_flop(SMALL, 10, Interval(0, 6)) == 2 * 10 * matrices
    share = Share(3, 10, 30, Interval(2, 4), 6)
    assert sum(product.flop for product in products_of(SMALL, share)) == matrix_flop(SMALL, 30, Interval(2, 4))


def test_scores_are_those_of_equal_heads_where_widths_agree() -> None:
    usual = Attention(hidden=96, num_heads=6, num_kv_heads=6, head_dim=16)
    latent = SMALL.model_copy(update={"head_dim": 12, "rope_dim": 4, "value_dim": 16})
    assert score_flop(latent, 32, 8, Interval(0, 6)) == score_flop(usual, 32, 8, Interval(0, 6))


def test_low_rank_weights_are_on_every_rank() -> None:
    whole = sum(tensor.num_elements for tensor in tensors_of(SMALL) if tensor.cut == "whole")
    assert whole == 96 + 24 * 96 + 24 + 24 * 96 + 16
    cut = sum(tensor.num_elements for tensor in tensors_of(SMALL)) - whole
    assert local_num_elements(SMALL, Interval(1, 3)) == whole + cut // 3


def test_bytes_kept_are_counted_by_hand() -> None:
    share, c, t, n = Share(2, 5, 10, Interval(0, 3), 10), 5, 10, 3
    q, k, v, out = t * n * 24, t * n * 16, t * n * 12, t * n * 12
    latents, joined, log_sum_exp = 2 * c * 48, t * n * 8, 4 * t * n
    assert activation_bytes(SMALL, share, "bf16") == 2 * (2 * c * 96 + latents + q + k + joined + v + out) + log_sum_exp
    assert activation_bytes(SMALL, share, "bf16", "selective") == 2 * (2 * c * 96 + latents + q + k + v)
    assert activation_bytes(SMALL, share, "bf16", "full") == 2 * c * 96
    assert working_bytes(SMALL, share, "bf16", "full") > working_bytes(SMALL, share, "bf16")
    assert gathered_width(SMALL) == 48


def make(degree: int, micro_batch: int) -> Plan:
    blocks = (degree,) * (4 // degree)
    stage = Stage(
        num_ranks=4, modules=tuple(ModulePlacement(module=name, blocks=blocks) for name, _ in MODEL.modules())
    )
    return Plan(
        made=Provenance(created_by="test", created_at="2026-11-30"),
        model=MODEL,
        cluster=cluster_preset("h100x4"),
        training=TrainingSpec(global_batch=4, seq_len=32),
        pipelines=(Pipeline(micro_batch=micro_batch, stages=(stage,)),),
        replicas=(Replica(pipeline=0, ranks=(0, 1, 2, 3), sequences=4),),
    )


def test_a_plan_is_priced_and_keeps_sequences_whole() -> None:
    plan = make(4, 1)
    found = price(plan, device_costs(plan.cluster, plan.training))
    assert found.step_terms.tp_communication > 0
    with pytest.raises(ValueError, match="do not hold whole sequences"):
        make(2, 1)


def test_the_executor_refuses_it_in_one_sentence() -> None:
    layout = ModuleLayout.__new__(ModuleLayout)
    object.__setattr__(layout, "module", SMALL)
    object.__setattr__(layout, "name", "layer.0.attention")
    with pytest.raises(BadInputError, match=r"layer\.0\.attention is of kind latent_attention"):
        build_module(
            layout,
            Block.__new__(Block),
            chunk=Interval(0, 4),
            seq_len=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
