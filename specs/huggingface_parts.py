"""What most decoder families share in a Hugging Face `config.json`: attention, rotary embedding, MLP, the chain."""

from __future__ import annotations

from itertools import groupby

from specs.huggingface_keys import ConfigKeys
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec, Norm, RopeScaling


def attention_of(
    config: ConfigKeys,
    *,
    norm_epsilon: float,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
    default_rope_theta: float = 10000.0,
    window: int | None = None,
    rope: bool = True,
) -> Attention:
    """Attention of the Llama family and its relatives; `rope` False: the caller reads the rotary embedding."""
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    theta, scaling = rope_of(config, default_rope_theta) if rope else (default_rope_theta, None)
    return Attention(
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=config.size_or("num_key_value_heads", num_heads),
        head_dim=head_dim_of(config, hidden, num_heads, default_head_dim),
        norm=Norm(epsilon=config.number_or("rms_norm_eps", norm_epsilon)),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        rope_theta=theta,
        rope_scaling=scaling,
        window=window,
    )


def head_dim_of(config: ConfigKeys, hidden: int, num_heads: int, default: int | None) -> int:
    """Width of a head: stated, the family's default, or the width over the heads."""
    if config.has("head_dim"):
        return config.size("head_dim")
    if default is not None:
        return default
    if hidden % num_heads:
        raise config.fail(f"hidden size {hidden} is not a multiple of {num_heads} heads and no head_dim is given.")
    return hidden // num_heads


def rope_of(config: ConfigKeys, default_theta: float) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding, from `rope_parameters` (transformers 5) or the older keys."""
    config.refuse("partial_rotary_factor", (1, 1.0), "the whole head is rotated")
    parameters = config.part("rope_parameters")
    scaling = parameters if parameters.keys else config.part("rope_scaling")
    theta = parameters.number_or("rope_theta", config.number_or("rope_theta", default_theta))
    kind = scaling.keys.get("rope_type", scaling.keys.get("type", "default"))
    scaling.refuse("partial_rotary_factor", (1, 1.0), "the whole head is rotated")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise scaling.fail(f"rope type {kind!r} is not supported; supported are default and llama3.")
    return theta, RopeScaling(
        factor=scaling.number("factor"),
        low_frequency_factor=scaling.number("low_freq_factor"),
        high_frequency_factor=scaling.number("high_freq_factor"),
        original_positions=scaling.size("original_max_position_embeddings"),
    )


def gated_mlp_of(config: ConfigKeys, *, norm: Norm, bias: bool = False) -> Mlp:
    """Gated feed-forward part of the Llama family."""
    return Mlp(
        hidden=config.size("hidden_size"),
        ffn=config.size("intermediate_size"),
        activation=config.activation("hidden_act", "silu"),
        bias=bias,
        norm=norm,
    )


def decoder_of(config: ConfigKeys, name: str, layers: list[Layer], *, tied: bool = False) -> ModelSpec:
    """Embedding, the layers (equal neighbours collapsed) and the head of a Llama-like model."""
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    attention = layers[0].attention
    assert attention is not None
    return ModelSpec(
        name=name,
        embedding=Embedding(hidden=hidden, vocab=vocab),
        layers=tuple(layer.model_copy(update={"repeat": len(list(equal))}) for layer, equal in groupby(layers)),
        head=Head(hidden=hidden, vocab=vocab, tied=config.flag("tie_word_embeddings", tied), norm=attention.norm),
        max_positions=config.size("max_position_embeddings") if config.has("max_position_embeddings") else None,
    )
