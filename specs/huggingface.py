"""A Hugging Face `config.json` as a `ModelSpec`.

Each supported `model_type` is one function below.  What the file leaves out takes the default that the
configuration class of `transformers` documents for that type; sizes have no default and must be stated.  An
option that would change the arithmetic or the weights in a way `ModelSpec` cannot express is refused by name:
a plan for a slightly different model would be worse than none.  Dropout rates are ignored (none is applied).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from pydantic import ValidationError

from specs.base import first_problem
from specs.errors import BadInputError
from specs.huggingface_hybrid import nemotron_h
from specs.huggingface_keys import ConfigKeys
from specs.huggingface_parts import attention_of, decoder_of, gated_mlp_of, head_dim_of, rope_of
from specs.model import (
    Attention,
    Embedding,
    Head,
    Layer,
    Mlp,
    ModelSpec,
    Moe,
    Norm,
)


def model_from_config(data: object, *, name: str, where: str) -> ModelSpec:
    """The model that a parsed `config.json` describes; `where` names the file in errors.

    Raises `BadInputError` for a missing or wrong key, an unknown `model_type` and an unsupported option.
    """
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise BadInputError(
            f"{where}: neither a plait model (keys embedding, layers, head) nor a Hugging Face config.json "
            "(key model_type)."
        )
    config = ConfigKeys(data, where)
    build = _FAMILIES.get(data["model_type"])
    if build is None:
        raise config.fail(
            f"model_type {data['model_type']!r} is not supported; supported are {', '.join(sorted(_FAMILIES))}. "
            "Write the model as a plait model file instead."
        )
    config.refuse("quantization_config", (), "weights are trained in bf16 or fp32")
    try:
        return build(config, name)
    except ValidationError as error:
        raise config.fail(first_problem(error)) from None


def _llama(config: ConfigKeys, name: str) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    attention = attention_of(config, norm_epsilon=1e-6, qkv_bias=bias, output_bias=bias)
    mlp = gated_mlp_of(config, norm=attention.norm, bias=config.flag("mlp_bias", False))
    return decoder_of(config, name, [Layer(attention=attention, feed_forward=mlp)] * config.num_layers())


def _mistral(config: ConfigKeys, name: str) -> ModelSpec:
    window = config.size("sliding_window") if config.has("sliding_window") else None
    attention = attention_of(config, norm_epsilon=1e-6, window=window)
    mlp = gated_mlp_of(config, norm=attention.norm)
    return decoder_of(config, name, [Layer(attention=attention, feed_forward=mlp)] * config.num_layers())


def _qwen2(config: ConfigKeys, name: str) -> ModelSpec:
    return _qwen(config, name, qkv_bias=True)


def _qwen3(config: ConfigKeys, name: str) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    return _qwen(config, name, qkv_bias=bias, output_bias=bias, qk_norm=True, default_head_dim=128)


def _qwen(
    config: ConfigKeys,
    name: str,
    *,
    qkv_bias: bool,
    output_bias: bool = False,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
) -> ModelSpec:
    layers = []
    for window in _qwen_windows(config):
        attention = attention_of(
            config,
            norm_epsilon=1e-6,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=qk_norm,
            default_head_dim=default_head_dim,
            window=window,
        )
        layers.append(Layer(attention=attention, feed_forward=gated_mlp_of(config, norm=attention.norm)))
    return decoder_of(config, name, layers)


def _qwen_windows(config: ConfigKeys) -> list[int | None]:
    """Sliding window of each layer: by `layer_types`, else from `max_window_layers` on, where it is switched on."""
    num_layers = config.num_layers()
    if not config.flag("use_sliding_window", False):
        return [None] * num_layers
    window = config.size("sliding_window")
    if config.has("layer_types"):
        types = config.strings("layer_types")
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise config.fail(f"layer type {unknown[0]!r} is not supported.")
        if len(types) != num_layers:
            raise config.fail(f"layer_types has {len(types)} entries for {num_layers} layers.")
        return [window if kind == "sliding_attention" else None for kind in types]
    first = config.size("max_window_layers")
    return [window if index >= first else None for index in range(num_layers)]


def _mixtral(config: ConfigKeys, name: str) -> ModelSpec:
    window = config.size("sliding_window") if config.has("sliding_window") else None
    attention = attention_of(config, norm_epsilon=1e-5, default_rope_theta=1e6, window=window)
    moe = Moe(
        hidden=attention.hidden,
        num_experts=config.size("num_local_experts"),
        experts_per_token=config.size("num_experts_per_tok"),
        expert_ffn=config.size("intermediate_size"),
        activation=config.activation("hidden_act", "silu"),
        norm=attention.norm,
    )
    return decoder_of(config, name, [Layer(attention=attention, feed_forward=moe)] * config.num_layers())


def _qwen3_moe(config: ConfigKeys, name: str) -> ModelSpec:
    if not config.flag("norm_topk_prob", False):
        raise config.fail("'norm_topk_prob' is false, which is not supported: expert weights always add up to 1.")
    config.refuse("use_sliding_window", (False,), "windows of this type are not read")
    bias = config.flag("attention_bias", False)
    attention = attention_of(config, norm_epsilon=1e-6, qkv_bias=bias, output_bias=bias, qk_norm=True)
    moe = Moe(
        hidden=attention.hidden,
        # transformers 5 writes the newer name.
        num_experts=config.size("num_local_experts" if config.has("num_local_experts") else "num_experts"),
        experts_per_token=config.size("num_experts_per_tok"),
        expert_ffn=config.size("moe_intermediate_size"),
        activation=config.activation("hidden_act", "silu"),
        norm=attention.norm,
    )
    every = config.size_or("decoder_sparse_step", 1)
    dense = config.keys.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.fail(f"'mlp_only_layers' is {dense!r}, a list of layer numbers is needed.")
    layers = []
    for index in range(config.num_layers()):
        sparse = index not in dense and (index + 1) % every == 0
        part = moe if sparse else gated_mlp_of(config, norm=attention.norm)
        layers.append(Layer(attention=attention, feed_forward=part))
    return decoder_of(config, name, layers)


def _gemma2(config: ConfigKeys, name: str) -> ModelSpec:
    theta, scaling = rope_of(config, 10000.0)
    rope: dict[str, object] = {"rope_theta": theta, "rope_scaling": scaling}
    return _gemma(config, name, {"full_attention": rope, "sliding_attention": rope}, every=2, caps=(50.0, 30.0))


def _gemma3_text(config: ConfigKeys, name: str) -> ModelSpec:
    parameters = config.part("rope_parameters")
    nested = "full_attention" in parameters.keys
    full = parameters.part("full_attention") if nested else config
    scaling = full if nested else config.part("rope_scaling")
    sliding = parameters.part("sliding_attention")
    kind = scaling.keys.get("rope_type", scaling.keys.get("type", "default"))
    if kind not in ("default", "linear") or sliding.keys.get("rope_type", "default") != "default":
        raise scaling.fail(f"rope type {kind!r} is not supported here; supported are default and linear.")
    rope: dict[str, dict[str, object]] = {
        "full_attention": {
            "rope_theta": full.number_or("rope_theta", 1e6),
            "rope_factor": scaling.number("factor") if kind == "linear" else 1.0,
        },
        "sliding_attention": {
            "rope_theta": sliding.number_or("rope_theta", config.number_or("rope_local_base_freq", 1e4))
        },
    }
    every = config.size_or("sliding_window_pattern", config.size_or("_sliding_window_pattern", 6))
    return _gemma(config, name, rope, every=every, caps=(None, None), qk_norm=True)


def _gemma(
    config: ConfigKeys,
    name: str,
    rope: dict[str, dict[str, object]],
    *,
    every: int,
    caps: tuple[float | None, float | None],
    qk_norm: bool = False,
) -> ModelSpec:
    """Gemma 2 and 3: norms on both sides, 1 + weight in them, scaled embedding; each `every`-th layer looks far."""
    config.refuse("use_bidirectional_attention", (False,), "attention is causal")
    config.size("num_key_value_heads")
    score_cap, logit_cap = (
        None if key in config.keys and config.keys[key] is None else config.number_or(key, cap) if cap else None
        for key, cap in zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True)
    )
    num_layers = config.num_layers()
    if config.has("layer_types"):
        types = config.strings("layer_types")
    else:
        types = tuple("sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers))
    if len(types) != num_layers or not set(types) <= set(rope):
        raise config.fail(f"layer_types needs {num_layers} entries, each one of {', '.join(sorted(rope))}.")
    bias = config.flag("attention_bias", False)
    shape = attention_of(
        config, norm_epsilon=1e-6, qkv_bias=bias, output_bias=bias, qk_norm=qk_norm, default_head_dim=256, rope=False
    )
    norm = shape.norm.model_copy(update={"unit_offset": True})
    mlp = Mlp(
        hidden=shape.hidden,
        ffn=config.size("intermediate_size"),
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        norm=norm,
        post_norm=True,
    )
    layers = []
    for kind in types:
        common = {
            "norm": norm,
            "post_norm": True,
            "score_scale": config.number_or("query_pre_attn_scalar", 256.0) ** -0.5,
            "score_cap": score_cap,
            "window": config.size_or("sliding_window", 4096) if kind == "sliding_attention" else None,
        }
        layers.append(Layer(attention=shape.model_copy(update={**common, **rope[kind]}), feed_forward=mlp))
    model = decoder_of(config, name, layers, tied=True)
    return model.model_copy(
        update={
            "embedding": model.embedding.model_copy(update={"scale": shape.hidden**0.5}),
            "head": model.head.model_copy(update={"logit_cap": logit_cap}),
        }
    )


def _gpt2(config: ConfigKeys, name: str) -> ModelSpec:
    config.refuse("scale_attn_weights", (True,), "attention scores are always divided by sqrt(head_dim)")
    config.refuse("scale_attn_by_inverse_layer_idx", (False,), "scores do not depend on the layer")
    config.refuse("add_cross_attention", (False,), "only decoders are planned")
    hidden, num_heads = config.size("n_embd"), config.size("n_head")
    norm = Norm(kind="layernorm", epsilon=config.number_or("layer_norm_epsilon", 1e-5))
    layer = Layer(
        attention=Attention(
            hidden=hidden,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim_of(config, hidden, num_heads, None),
            norm=norm,
            qkv_bias=True,
            output_bias=True,
            rope_theta=None,
        ),
        feed_forward=Mlp(
            hidden=hidden,
            ffn=config.size_or("n_inner", 4 * hidden),
            gated=False,
            activation=config.activation("activation_function", "gelu_new"),
            bias=True,
            norm=norm,
        ),
        repeat=config.num_layers("n_layer"),
    )
    vocab, positions = config.size("vocab_size"), config.size("n_positions")
    return ModelSpec(
        name=name,
        embedding=Embedding(hidden=hidden, vocab=vocab, num_positions=positions),
        layers=(layer,),
        head=Head(hidden=hidden, vocab=vocab, tied=config.flag("tie_word_embeddings", True), norm=norm),
        max_positions=positions,
    )


def _openelm(config: ConfigKeys, name: str) -> ModelSpec:
    """Every layer has its own numbers of heads and of FFN columns (arXiv 2404.14619)."""
    config.refuse("normalization_layer_name", ("rms_norm",), "norms are RMSNorm")
    hidden, vocab, num_layers = (
        config.size("model_dim"),
        config.size("vocab_size"),
        config.num_layers("num_transformer_layers"),
    )
    norm = Norm(epsilon=1e-6)
    queries, groups, multipliers = (
        _by_layer(config, key, num_layers) for key in ("num_query_heads", "num_kv_heads", "ffn_multipliers")
    )
    if not all(isinstance(count, int) for count in (*queries, *groups)):
        raise config.fail("'num_query_heads' and 'num_kv_heads' need whole numbers.")
    divisor = config.size_or("ffn_dim_divisor", 256)
    layers = [
        Layer(
            attention=Attention(
                hidden=hidden,
                num_heads=int(queries[i]),
                num_kv_heads=int(groups[i]),
                head_dim=config.size("head_dim"),
                norm=norm,
                qk_norm=config.flag("normalize_qk_projections", False),
                rope_theta=config.number_or("rope_freq_constant", 10000.0),
            ),
            feed_forward=Mlp(
                hidden=hidden,
                ffn=_nearest_multiple(multipliers[i] * hidden, divisor),
                gated=config.flag("ffn_with_glu", True),
                activation=config.activation("activation_fn_name", "swish"),
                norm=norm,
            ),
        )
        for i in range(num_layers)
    ]
    return ModelSpec(
        name=name,
        embedding=Embedding(hidden=hidden, vocab=vocab),
        layers=tuple(layer.model_copy(update={"repeat": len(list(equal))}) for layer, equal in groupby(layers)),
        head=Head(hidden=hidden, vocab=vocab, tied=config.flag("share_input_output_layers", True), norm=norm),
        max_positions=config.size_or("max_context_length", 2048),
    )


def _by_layer(config: ConfigKeys, key: str, num_layers: int) -> list[float]:
    """A list of positive numbers, one per layer."""
    values = config.keys.get(key)
    if not isinstance(values, list) or len(values) != num_layers or not all(_is_positive(value) for value in values):
        raise config.fail(f"{key!r} is {values!r}, a list of {num_layers} positive numbers is needed.")
    return values


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _nearest_multiple(value: float, divisor: int) -> int:
    """The nearest multiple, but never more than a tenth less than the value: the rule of OpenELM's own code."""
    nearest = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * value else nearest


_FAMILIES: dict[str, Callable[[ConfigKeys, str], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3_text,
    "gpt2": _gpt2,
    "openelm": _openelm,
    "nemotron_h": nemotron_h,
}
MODEL_TYPES = tuple(sorted(_FAMILIES))
