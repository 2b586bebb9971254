"""Hybrids of Mamba-2, attention and MLP layers in a Hugging Face `config.json`: `nemotron_h`.

Every layer is one part behind a norm of its own, as `hybrid_override_pattern` spells them: `M` Mamba-2, `*` attention
without positions, `-` an MLP.  Experts (`E`) are not read.
"""

from __future__ import annotations

from itertools import groupby

from specs.huggingface_keys import ConfigKeys
from specs.huggingface_parts import attention_of
from specs.model import Embedding, Head, Layer, Mamba2, Mlp, ModelSpec, Norm


def nemotron_h(config: ConfigKeys, name: str) -> ModelSpec:
    """The model of a `nemotron_h` file.  Raises `BadInputError` for a wrong pattern and unsupported options."""
    for key in ("use_bias", "mamba_proj_bias"):
        config.refuse(key, (False,), "projections of Mamba-2 layers have no bias")
    config.refuse("mamba_hidden_act", ("silu",), "the convolution of Mamba-2 layers is followed by silu")
    config.refuse("sliding_window", (), "attention of this type has no window")
    norm = Norm(epsilon=config.number_or("layer_norm_epsilon", 1e-5))
    hidden, vocab, bias = config.size("hidden_size"), config.size("vocab_size"), config.flag("attention_bias", False)
    attention = attention_of(
        config, norm_epsilon=norm.epsilon, qkv_bias=bias, output_bias=bias, default_head_dim=128, rope=False
    )
    kinds = {
        "M": Layer(mamba=_mamba(config, hidden, norm)),
        "*": Layer(attention=attention.model_copy(update={"norm": norm, "rope_theta": None})),
        "-": Layer(feed_forward=_mlp(config, hidden, norm)),
    }
    pattern = _pattern(config, "".join(kinds))
    return ModelSpec(
        name=name,
        embedding=Embedding(hidden=hidden, vocab=vocab),
        layers=tuple(kinds[kind].model_copy(update={"repeat": len(list(equal))}) for kind, equal in groupby(pattern)),
        head=Head(hidden=hidden, vocab=vocab, tied=config.flag("tie_word_embeddings", False), norm=norm),
        max_positions=config.size_or("max_position_embeddings", 4096),
    )


def _pattern(config: ConfigKeys, known: str) -> str:
    pattern, num_layers = config.keys.get("hybrid_override_pattern"), config.num_layers()
    if not isinstance(pattern, str) or len(pattern) != num_layers or not set(pattern) <= set(known):
        raise config.fail(
            f"'hybrid_override_pattern' is {pattern!r}, a text of {num_layers} letters is needed, each one of "
            f"{', '.join(known)}."
        )
    return pattern


def _mamba(config: ConfigKeys, hidden: int, norm: Norm) -> Mamba2:
    return Mamba2(
        hidden=hidden,
        num_heads=config.size("mamba_num_heads"),
        head_dim=config.size("mamba_head_dim"),
        num_groups=config.size("n_groups"),
        state_size=config.size("ssm_state_size"),
        conv_kernel=config.size("conv_kernel"),
        conv_bias=config.flag("use_conv_bias", True),
        chunk=config.size("chunk_size"),
        norm=norm,
    )


def _mlp(config: ConfigKeys, hidden: int, norm: Norm) -> Mlp:
    return Mlp(
        hidden=hidden,
        ffn=config.size("intermediate_size"),
        gated=False,
        activation=config.activation("mlp_hidden_act", "relu2"),
        bias=config.flag("mlp_bias", False),
        norm=norm,
    )
