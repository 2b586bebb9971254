"""Weight tensors: names and sizes as transformers has them, and local pieces that cover a tensor exactly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specs.huggingface import model_from_config
from specs.layout import Interval, balanced_cuts, interval_of
from specs.model import Attention, Embedding, Head, Mlp, Moe, Norm, num_units
from specs.tensors import AnyModule, local_num_elements, local_rows, num_parameters, parameter_name, tensors_of

LAYERNORM = Norm(kind="layernorm")
MODULES: list[AnyModule] = [
    Embedding(hidden=12, vocab=61, num_positions=9),
    Embedding(hidden=12, vocab=61),
    Attention(hidden=12, num_heads=6, num_kv_heads=3, head_dim=4),
    Attention(hidden=12, num_heads=8, num_kv_heads=8, head_dim=3, norm=LAYERNORM, qkv_bias=True, output_bias=True),
    Attention(hidden=12, num_heads=8, num_kv_heads=2, head_dim=3, qk_norm=True, qkv_bias=True),
    Mlp(hidden=12, ffn=50),
    Mlp(hidden=12, ffn=50, bias=True),
    Mlp(hidden=12, ffn=48, gated=False, bias=True, norm=LAYERNORM),
    Moe(hidden=12, num_experts=8, experts_per_token=2, expert_ffn=5),
    Moe(hidden=12, num_experts=8, experts_per_token=2, expert_ffn=5, shared_ffn=7),
    Head(hidden=12, vocab=61),
    Head(hidden=12, vocab=61, tied=True, norm=LAYERNORM),
]


@given(st.sampled_from(MODULES), st.integers(1, 8))
def test_pieces_cover_every_tensor(module: AnyModule, degree: int) -> None:
    """Rows cut by units are divided; whole ones are on every rank; KV rows at most shared by two ranks."""
    degree = min(degree, num_units(module))
    cuts = balanced_cuts(num_units(module), degree)
    for tensor in tensors_of(module):
        pieces = [local_rows(module, tensor, interval_of(cuts, part)) for part in range(degree)]
        rows = [row for piece in pieces for row in range(piece.start, piece.stop)]
        if tensor.cut == "whole":
            assert pieces == [Interval(0, tensor.rows)] * degree
        elif tensor.cut == "kv":
            assert set(rows) == set(range(tensor.rows))
        else:
            assert rows == list(range(tensor.rows))


@given(st.sampled_from(MODULES))
def test_one_rank_holds_everything(module: AnyModule) -> None:
    everything = sum(tensor.num_elements for tensor in tensors_of(module))
    assert local_num_elements(module, Interval(0, num_units(module))) == everything


@given(st.sampled_from(MODULES))
def test_names_are_distinct_and_vectors_do_not_decay(module: AnyModule) -> None:
    table = tensors_of(module)
    assert len({tensor.name for tensor in table}) == len(table)
    for tensor in table:
        assert tensor.decay == bool(tensor.cols)
        assert tensor.shape(3) == ((3, tensor.cols) if tensor.cols else (3,))
        assert (tensor.init in ("normal", "residual")) == bool(tensor.cols)


def test_a_tied_head_shares_the_embedding() -> None:
    head, embedding = Head(hidden=4, vocab=7, tied=True), Embedding(hidden=4, vocab=7)
    names = [parameter_name("head", head, tensor) for tensor in tensors_of(head)]
    assert names == ["head.norm", "embedding.weight"]
    assert num_parameters((("embedding", embedding), ("head", head))) == 7 * 4 + 4
    untied = head.model_copy(update={"tied": False})
    assert num_parameters((("embedding", embedding), ("head", untied))) == 2 * 7 * 4 + 4


# Where each of our tensors is in a transformers checkpoint: (suffix of the name there, stored transposed).
LLAMA_NAMES = {
    "attention": {
        "norm": "input_layernorm.weight",
        "query": "self_attn.q_proj.weight",
        "key": "self_attn.k_proj.weight",
        "value": "self_attn.v_proj.weight",
        "output": "self_attn.o_proj.weight",
        "query_bias": "self_attn.q_proj.bias",
        "key_bias": "self_attn.k_proj.bias",
        "value_bias": "self_attn.v_proj.bias",
        "query_norm": "self_attn.q_norm.weight",
        "key_norm": "self_attn.k_norm.weight",
    },
    "mlp": {
        "norm": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
    },
    "embedding": {"weight": "embed_tokens.weight"},
    "head": {"norm": "norm.weight", "weight": "lm_head.weight"},
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_each_tensor_has_the_shape_it_has_in_transformers(model_type: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **SIZES)
    with torch.device("meta"):
        theirs = dict(transformers.AutoModelForCausalLM.from_config(config).named_parameters())
    ours = model_from_config(config.to_dict(), name="m", where="config")
    seen: set[str] = set()
    for name, module in ours.modules():
        prefix = f"model.layers.{name.split('.')[1]}." if name.startswith("layer.") else "model."
        for tensor in tensors_of(module):
            suffix = LLAMA_NAMES[module.kind][tensor.name]
            key = suffix if suffix.startswith("lm_head") else prefix + suffix
            shape = tuple(theirs[key].shape)
            transposed = tensor.name in ("output", "down")
            assert tensor.shape(tensor.rows) == (shape[::-1] if transposed else shape), key
            seen.add(key)
    assert seen == set(theirs)


def test_sizes_of_a_gpt2_layer() -> None:
    """Biases and packed QKV: 12 h^2 + 13 h elements per layer with an FFN of 4 h."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config: Any = transformers.GPT2Config(vocab_size=61, n_embd=24, n_layer=1, n_head=4, n_positions=32)
    with torch.device("meta"):
        block = transformers.GPT2LMHeadModel(config).transformer.h[0]
    ours = model_from_config(config.to_dict(), name="m", where="config")
    layer = [module for name, module in ours.modules() if name.startswith("layer.")]
    count = sum(tensor.num_elements for module in layer for tensor in tensors_of(module))
    assert count == sum(parameter.numel() for parameter in block.parameters()) == 12 * 24**2 + 13 * 24
