"""The cases where unlike degrees are said to pay: their shapes are right and their order is what the page says."""

from __future__ import annotations

from benchmarks.where_it_pays import (
    CASES,
    DOMAIN_SEQUENCES,
    Case,
    damaged_layouts,
    gemma_shape,
    ladder_of,
    odd_heads,
    preset,
    short_llama,
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
