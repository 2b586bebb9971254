"""The `config.json` of a model, for `transformers`: the inverse of `specs.huggingface`, checked by reading it back."""

from __future__ import annotations

from specs.errors import BadInputError
from specs.huggingface import model_from_config
from specs.model import Activation, Attention, Mlp, ModelSpec, Moe

_ACTIVATION_NAMES: dict[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "openelm": "OpenELMForCausalLM",
}


def config_of(model: ModelSpec) -> dict[str, object]:
    """A configuration that describes exactly this model.

    Raises `BadInputError` when no family can: layers that differ in ways the format cannot say, for one.
    """
    layers = [layer for layer in model.layers for _ in range(layer.repeat)]
    attention = next((layer.attention for layer in layers if layer.attention is not None), None)
    forward = [layer.feed_forward for layer in layers]
    sparse = next((part for part in forward if isinstance(part, Moe)), None)
    dense = next((part for part in forward if isinstance(part, Mlp)), None)
    if attention is not None and (sparse is not None or dense is not None):
        if attention.norm.kind == "layernorm":
            config = _gpt2(model, attention, dense)
        else:
            config = _decoder(model, attention, dense, sparse, [layer.attention for layer in layers], forward)
        for written in (config, _openelm(model)):
            try:
                read = model_from_config(written, name=model.name, where="the written config.json")
            except BadInputError:
                continue
            if read == model:
                return {"architectures": [_ARCHITECTURES[str(written["model_type"])]], **written}
    raise BadInputError(
        f"model {model.name} cannot be written as a Hugging Face model: no family of {', '.join(_ARCHITECTURES)} has "
        "exactly these layers. Its checkpoints stay usable here."
    )


def _family(attention: Attention, sparse: Moe | None) -> str:
    if attention.post_norm:
        return "gemma3_text" if attention.qk_norm else "gemma2"
    if attention.qk_norm:
        return "qwen3" if sparse is None else "qwen3_moe"
    if sparse is not None:
        return "mixtral"
    if attention.qkv_bias and not attention.output_bias:
        return "qwen2"
    return "llama" if attention.window is None else "mistral"


def _decoder(
    model: ModelSpec,
    attention: Attention,
    dense: Mlp | None,
    sparse: Moe | None,
    attentions: list[Attention | None],
    forward: list[Mlp | Moe | None],
) -> dict[str, object]:
    family = _family(attention, sparse)
    part = dense if dense is not None else sparse
    assert part is not None
    config: dict[str, object] = {
        "model_type": family,
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": _ACTIVATION_NAMES[part.activation],
        "rms_norm_eps": attention.norm.epsilon,
        "rope_theta": attention.rope_theta,
        "tie_word_embeddings": model.head.tied,
    }
    if dense is not None:
        config["intermediate_size"] = dense.ffn
    if model.max_positions is not None:
        config["max_position_embeddings"] = model.max_positions
    if family in ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"):
        config["attention_bias"] = attention.output_bias
    if family == "llama":
        config["mlp_bias"] = dense is not None and dense.bias
    scaling = attention.rope_scaling
    if scaling is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    windows = [part.window if part is not None else None for part in attentions]
    if attention.post_norm:
        config["hidden_activation"] = config.pop("hidden_act")
        return config | _gemma(model, [part for part in attentions if part is not None])
    if family in ("mistral", "mixtral"):
        config["sliding_window"] = windows[0]
    elif any(window is not None for window in windows):
        config["use_sliding_window"] = True
        config["sliding_window"] = next(window for window in windows if window is not None)
        config["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in windows]
        config["max_window_layers"] = 0
    if family == "mixtral" and sparse is not None:
        config |= {"num_local_experts": sparse.num_experts, "intermediate_size": sparse.expert_ffn}
        config["num_experts_per_tok"] = sparse.experts_per_token
    if family == "qwen3_moe" and sparse is not None:
        config |= {"num_experts": sparse.num_experts, "moe_intermediate_size": sparse.expert_ffn}
        config |= {"num_experts_per_tok": sparse.experts_per_token, "norm_topk_prob": True, "decoder_sparse_step": 1}
        config["mlp_only_layers"] = [i for i, part in enumerate(forward) if not isinstance(part, Moe)]
        config.setdefault("intermediate_size", sparse.expert_ffn)
    return config


def _gemma(model: ModelSpec, attentions: list[Attention]) -> dict[str, object]:
    """What Gemma says beyond the common keys."""
    first = attentions[0]
    scale = first.score_scale if first.score_scale is not None else first.head_dim**-0.5
    near = next((part for part in attentions if part.window is not None), None)
    far = next((part for part in attentions if part.window is None), None)
    config: dict[str, object] = {
        "query_pre_attn_scalar": round(scale**-2, 6),
        "attn_logit_softcapping": first.score_cap,
        "final_logit_softcapping": model.head.logit_cap,
        "layer_types": ["full_attention" if part.window is None else "sliding_attention" for part in attentions],
    }
    if near is not None:
        config |= {"sliding_window": near.window, "rope_local_base_freq": near.rope_theta}
    if far is not None:
        config["rope_theta"] = far.rope_theta
        if far.rope_factor != 1.0:
            config["rope_scaling"] = {"rope_type": "linear", "factor": far.rope_factor}
    return config


def _openelm(model: ModelSpec) -> dict[str, object]:
    """The one format whose layers may have unlike widths."""
    layers = [layer for layer in model.layers for _ in range(layer.repeat)]
    attentions = [layer.attention for layer in layers if layer.attention is not None]
    forward = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, Mlp)]
    first = attentions[0]
    return {
        "model_type": "openelm",
        "vocab_size": model.vocab,
        "model_dim": model.hidden,
        "num_transformer_layers": model.num_layers,
        "head_dim": first.head_dim,
        "num_query_heads": [part.num_heads for part in attentions],
        "num_kv_heads": [part.num_kv_heads for part in attentions],
        "ffn_multipliers": [part.ffn / model.hidden for part in forward],
        "ffn_dim_divisor": 1,
        "ffn_with_glu": all(part.gated for part in forward),
        "activation_fn_name": _ACTIVATION_NAMES[forward[0].activation] if forward else None,
        "normalize_qk_projections": first.qk_norm,
        "share_input_output_layers": model.head.tied,
        "rope_freq_constant": first.rope_theta,
        "max_context_length": model.max_positions,
    }


def _gpt2(model: ModelSpec, attention: Attention, dense: Mlp | None) -> dict[str, object]:
    return {
        "model_type": "gpt2",
        "vocab_size": model.vocab,
        "n_embd": model.hidden,
        "n_layer": model.num_layers,
        "n_head": attention.num_heads,
        "n_positions": model.embedding.num_positions,
        "n_inner": None if dense is None else dense.ffn,
        "activation_function": None if dense is None else _ACTIVATION_NAMES[dense.activation],
        "layer_norm_epsilon": attention.norm.epsilon,
        "tie_word_embeddings": model.head.tied,
    }
