"""The cases where unlike degrees are said to pay: their shapes are right and their order is what the page says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.where_it_pays.__main__ import examples
from benchmarks.where_it_pays.cases import CASES, Case, ladder_of, preset
from benchmarks.where_it_pays.damaged import DOMAIN_SEQUENCES, REPLICAS, after_loss, damaged_layouts, short_llama
from benchmarks.where_it_pays.encoders import PAIRS, plan_pair
from benchmarks.where_it_pays.last_stage import PIPELINES, even_stages, fastest
from benchmarks.where_it_pays.shapes import (
    four_kv_heads,
    gemma_shape,
    odd_heads,
    qwen_72b,
    qwen_vision,
    two_kv_heads,
)
from specs.model import Attention
from specs.presets import cluster_preset
from specs.tensors import num_parameters


def test_shapes() -> None:
    gemma = gemma_shape()
    table = gemma.embedding.vocab * gemma.hidden
    assert table == 604_127_232
    norms = (2 * 26 + 1) * gemma.hidden
    assert num_parameters(gemma.modules()) == table + 2_024_275_968 + norms
    attention = dict(odd_heads().modules())["layer.0.attention"]
    assert isinstance(attention, Attention)
    assert attention.num_heads * attention.head_dim == attention.hidden
    assert {layer.attention.num_kv_heads for layer in two_kv_heads().layers if layer.attention} == {2}
    assert short_llama().layers[0].repeat == 8
    assert {layer.attention.num_kv_heads for layer in four_kv_heads().layers if layer.attention} == {4}


@pytest.mark.parametrize(
    ("model", "published", "left_out"),
    [
        (four_kv_heads, 7_615_616_512, 28 * (3584 + 2 * 512)),  # Qwen2.5-7B on Hugging Face, but for biases of q, k, v
        (qwen_72b, 72_706_203_648, 80 * (8192 + 2 * 1024)),
        # encoder of Qwen2.5-VL-7B with its merger, of which the head here holds a quarter
        (
            qwen_vision,
            676_550_144,
            (5120 * 5120 + 5120 + 5120 * 3584 + 3584) - 8704 * 1280,
        ),
    ],
)
def test_weights_are_as_published(model, published, left_out) -> None:
    assert num_parameters(model().modules()) == published - left_out


def test_parts_of_an_encoder_pair_share_the_memory() -> None:
    pair = replace(PAIRS[0], samples=16)
    both = plan_pair(pair, "layers", 20.0, degree=4)
    each = plan_pair(pair, "layers", 20.0)
    assert each.seconds < both.seconds
    assert each.encoder < both.encoder
    assert plan_pair(replace(pair, encoder_gib=3.5), "layers", 20.0) is None


def test_the_head_makes_an_even_last_stage_too_long() -> None:
    job = PIPELINES[1]
    assert even_stages(job.model(), 4).stages == "0-6,7-13,14-19,20-25"
    even, _, _ = fastest(job, "layers", even=True, time_limit_seconds=20.0)
    uneven, layout, _ = fastest(job, "layers", even=False, time_limit_seconds=20.0)
    assert "4 stages" in layout
    assert uneven < 0.75 * even


def test_a_replica_of_a_domain_is_too_much_to_lose() -> None:
    found = after_loss(REPLICAS[1], 20.0)
    dropped, reduced, best = found.seconds.values()
    assert dropped / found.whole > 4 / 3 - 1e-3
    assert best <= reduced < 0.9 * dropped
    assert best / found.whole >= 128 / 127


def test_every_example_has_a_name() -> None:
    names = {case.name for case in CASES} | {pair.name for pair in PAIRS}
    assert names <= set(examples())
    assert len(examples()) == len(CASES) + len(PAIRS) + 4


def test_every_case_can_be_stated() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.problem().cluster.num_devices == cluster_preset(case.cluster).num_devices


def test_a_damaged_domain_gains_by_smaller_blocks_of_attention() -> None:
    seconds = dict(damaged_layouts())
    assert len(seconds) == 6
    whole, mixed = seconds["7 ranks, degree 7 for everything"], seconds["7 ranks, attention 4 + 3, the rest 7"]
    alone = seconds["7 ranks, attention alone on each, the rest 7"]
    assert alone < mixed < whole
    assert whole > seconds["8 ranks, degree 8 for everything"]
    assert DOMAIN_SEQUENCES % 8 == DOMAIN_SEQUENCES % 7 == 0


def test_degrees_save_nothing_where_one_rank_holds_the_model() -> None:
    found = ladder_of(Case("gpt2", preset("gpt2"), "h100x4", 64, 1024).problem(), 10.0)
    assert found.degrees_save is not None
    assert 0.0 <= found.degrees_save < 0.02
    assert found.modules <= found.layers <= found.uniform
