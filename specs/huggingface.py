"""A Hugging Face `config.json` as a `ModelSpec`.

Each supported `model_type` is one function below.  What the file leaves out takes the default that the
configuration class of `transformers` documents for that type; sizes have no default and must be stated.  An
option that would change the arithmetic or the weights in a way `ModelSpec` cannot express is refused by name:
a plan for a slightly different model would be worse than none.  Dropout rates are ignored (none is applied).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

from pydantic import ValidationError

from specs.base import first_problem
from specs.errors import BadInputError
from specs.model import (
    MAX_LAYERS,
    Activation,
    Attention,
    Embedding,
    Head,
    Layer,
    Mlp,
    ModelSpec,
    Moe,
    Norm,
    RopeScaling,
)

# Names of `transformers.activations.ACT2FN` that are functions we have.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class _Config:
    """The file's keys, read with clear errors; `where` names the file in them."""

    keys: Mapping[str, object]
    where: str

    def fail(self, sentence: str) -> BadInputError:
        return BadInputError(f"{self.where}: {sentence}")

    def has(self, key: str) -> bool:
        return self.keys.get(key) is not None

    def size(self, key: str) -> int:
        """A size that the file must state."""
        if not self.has(key):
            raise self.fail(f"the key {key!r} is missing. Add it, as the model's own config.json has it.")
        return self._integer(key, self.keys[key])

    def num_layers(self, key: str = "num_hidden_layers") -> int:
        count = self.size(key)
        if count > MAX_LAYERS:
            raise self.fail(f"{key!r} is {count:,}, more than {MAX_LAYERS:,} layers are not supported.")
        return count

    def size_or(self, key: str, default: int) -> int:
        return self._integer(key, self.keys[key]) if self.has(key) else default

    def _integer(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{key!r} is {value!r}, a positive whole number is needed.")
        return value

    def number_or(self, key: str, default: float) -> float:
        return self._number(key, self.keys[key]) if self.has(key) else default

    def number(self, key: str) -> float:
        if not self.has(key):
            raise self.fail(f"the key {key!r} is missing. Add it, as the model's own config.json has it.")
        return self._number(key, self.keys[key])

    def _number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise self.fail(f"{key!r} is {value!r}, a positive number is needed.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.keys.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"{key!r} is {value!r}, true or false is needed.")
        return value

    def activation(self, key: str, default: str) -> Activation:
        value = self.keys.get(key) or default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.fail(f"{key!r} is {value!r}; supported are {', '.join(sorted(ACTIVATIONS))}.")
        return ACTIVATIONS[value]

    def refuse(self, key: str, allowed: tuple[object, ...], why: str) -> None:
        """Refuse an option that is present with any other value than those in `allowed`."""
        value = self.keys.get(key)
        if value is not None and value not in allowed:
            raise self.fail(f"{key!r} is {value!r}, which is not supported: {why}.")

    def part(self, key: str) -> _Config:
        """A nested object; absent or null: an empty one."""
        value = self.keys.get(key)
        if value is None:
            return _Config({}, f"{self.where}, {key}")
        if not isinstance(value, dict):
            raise self.fail(f"{key!r} is {value!r}, an object is needed.")
        return _Config(value, f"{self.where}, {key}")

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.keys.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(f"{key!r} is {value!r}, a list of names is needed.")
        return tuple(value)


def model_from_config(data: object, *, name: str, where: str) -> ModelSpec:
    """The model that a parsed `config.json` describes; `where` names the file in errors.

    Raises `BadInputError` for a missing or wrong key, an unknown `model_type` and an unsupported option.
    """
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise BadInputError(
            f"{where}: neither a plait model (keys embedding, layers, head) nor a Hugging Face config.json "
            "(key model_type)."
        )
    config = _Config(data, where)
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


def _llama(config: _Config, name: str) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    attention = _attention(config, norm_epsilon=1e-6, qkv_bias=bias, output_bias=bias)
    mlp = _gated_mlp(config, norm=attention.norm, bias=config.flag("mlp_bias", False))
    return _decoder(config, name, [Layer(attention=attention, feed_forward=mlp)] * config.num_layers())


def _mistral(config: _Config, name: str) -> ModelSpec:
    window = config.size("sliding_window") if config.has("sliding_window") else None
    attention = _attention(config, norm_epsilon=1e-6, window=window)
    mlp = _gated_mlp(config, norm=attention.norm)
    return _decoder(config, name, [Layer(attention=attention, feed_forward=mlp)] * config.num_layers())


def _qwen2(config: _Config, name: str) -> ModelSpec:
    return _qwen(config, name, qkv_bias=True)


def _qwen3(config: _Config, name: str) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    return _qwen(config, name, qkv_bias=bias, output_bias=bias, qk_norm=True, default_head_dim=128)


def _qwen(
    config: _Config,
    name: str,
    *,
    qkv_bias: bool,
    output_bias: bool = False,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
) -> ModelSpec:
    layers = []
    for window in _qwen_windows(config):
        attention = _attention(
            config,
            norm_epsilon=1e-6,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=qk_norm,
            default_head_dim=default_head_dim,
            window=window,
        )
        layers.append(Layer(attention=attention, feed_forward=_gated_mlp(config, norm=attention.norm)))
    return _decoder(config, name, layers)


def _qwen_windows(config: _Config) -> list[int | None]:
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


def _mixtral(config: _Config, name: str) -> ModelSpec:
    window = config.size("sliding_window") if config.has("sliding_window") else None
    attention = _attention(config, norm_epsilon=1e-5, default_rope_theta=1e6, window=window)
    moe = Moe(
        hidden=attention.hidden,
        num_experts=config.size("num_local_experts"),
        experts_per_token=config.size("num_experts_per_tok"),
        expert_ffn=config.size("intermediate_size"),
        activation=config.activation("hidden_act", "silu"),
        norm=attention.norm,
    )
    return _decoder(config, name, [Layer(attention=attention, feed_forward=moe)] * config.num_layers())


def _qwen3_moe(config: _Config, name: str) -> ModelSpec:
    if not config.flag("norm_topk_prob", False):
        raise config.fail("'norm_topk_prob' is false, which is not supported: expert weights always add up to 1.")
    config.refuse("use_sliding_window", (False,), "windows of this type are not read")
    bias = config.flag("attention_bias", False)
    attention = _attention(config, norm_epsilon=1e-6, qkv_bias=bias, output_bias=bias, qk_norm=True)
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
        part = moe if sparse else _gated_mlp(config, norm=attention.norm)
        layers.append(Layer(attention=attention, feed_forward=part))
    return _decoder(config, name, layers)


def _gpt2(config: _Config, name: str) -> ModelSpec:
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
            head_dim=_head_dim(config, hidden, num_heads, None),
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


def _attention(
    config: _Config,
    *,
    norm_epsilon: float,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
    default_rope_theta: float = 10000.0,
    window: int | None = None,
) -> Attention:
    """Attention of the Llama family and its relatives."""
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    theta, scaling = _rope(config, default_rope_theta)
    return Attention(
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=config.size_or("num_key_value_heads", num_heads),
        head_dim=_head_dim(config, hidden, num_heads, default_head_dim),
        norm=Norm(epsilon=config.number_or("rms_norm_eps", norm_epsilon)),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        rope_theta=theta,
        rope_scaling=scaling,
        window=window,
    )


def _head_dim(config: _Config, hidden: int, num_heads: int, default: int | None) -> int:
    if config.has("head_dim"):
        return config.size("head_dim")
    if default is not None:
        return default
    if hidden % num_heads:
        raise config.fail(f"hidden size {hidden} is not a multiple of {num_heads} heads and no head_dim is given.")
    return hidden // num_heads


def _rope(config: _Config, default_theta: float) -> tuple[float, RopeScaling | None]:
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


def _gated_mlp(config: _Config, *, norm: Norm, bias: bool = False) -> Mlp:
    return Mlp(
        hidden=config.size("hidden_size"),
        ffn=config.size("intermediate_size"),
        activation=config.activation("hidden_act", "silu"),
        bias=bias,
        norm=norm,
    )


def _decoder(config: _Config, name: str, layers: list[Layer]) -> ModelSpec:
    """Embedding, the layers (equal neighbours collapsed) and the head of a Llama-like model."""
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    attention = layers[0].attention
    assert attention is not None
    return ModelSpec(
        name=name,
        embedding=Embedding(hidden=hidden, vocab=vocab),
        layers=tuple(layer.model_copy(update={"repeat": len(list(equal))}) for layer, equal in groupby(layers)),
        head=Head(hidden=hidden, vocab=vocab, tied=config.flag("tie_word_embeddings", False), norm=attention.norm),
        max_positions=config.size("max_position_embeddings") if config.has("max_position_embeddings") else None,
    )


_FAMILIES: dict[str, Callable[[_Config, str], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt2": _gpt2,
}
MODEL_TYPES = tuple(sorted(_FAMILIES))
