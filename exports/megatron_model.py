"""A model as arguments of Megatron-LM."""

from __future__ import annotations

from itertools import groupby

from specs.errors import BadInputError
from specs.model import Attention, FeedForward, LatentAttention, Mlp, ModelSpec, Moe, Norm

Arguments = list[tuple[str, ...]]


def model_arguments(model: ModelSpec) -> Arguments:
    """Raises `BadInputError` for what Megatron-LM's GPT model cannot express."""
    attention, parts = _parts(model)
    norm = _one([attention.norm, *(part.norm for part in parts), model.head.norm], "norms")
    found: Arguments = [
        ("--num-layers", str(model.num_layers)),
        ("--hidden-size", str(model.hidden)),
        *_attention(attention),
        *_positions(model, attention),
        *_norm(norm),
        *_feed_forward(model, parts),
        ("--vocab-size", str(model.vocab)),
    ]
    if not model.head.tied:
        found.append(("--untie-embeddings-and-output-weights",))
    if model.embedding.scale is not None or model.head.logit_cap is not None:
        raise BadInputError("Megatron-LM's GPT model has no scaled embedding and no capped logits")
    return found


def _one(values: list[object], what: str) -> object:
    if any(value != values[0] for value in values):
        raise BadInputError(f"the layers have unlike {what}, Megatron-LM's GPT model has one kind")
    return values[0]


def _parts(model: ModelSpec) -> tuple[Attention | LatentAttention, list[FeedForward]]:
    """The attention of all layers, and the feed-forward part of each."""
    attentions: list[object] = []
    parts: list[FeedForward] = []
    for layer in model.layers:
        if layer.mamba is not None:
            raise BadInputError("a layer has Mamba-2, which this export does not write")
        if layer.attention is None or layer.feed_forward is None:
            raise BadInputError("a layer lacks attention or its feed-forward part, Megatron-LM's GPT layers have both")
        attentions.append(layer.attention)
        parts += [layer.feed_forward] * layer.repeat
    attention = _one(attentions, "attention")
    assert isinstance(attention, (Attention, LatentAttention))
    return attention, parts


def _attention(module: Attention | LatentAttention) -> Arguments:
    heads = ("--num-attention-heads", str(module.num_heads))
    if isinstance(module, LatentAttention):
        return [
            heads,
            ("--multi-latent-attention",),
            ("--q-lora-rank", str(module.query_rank)),
            ("--kv-lora-rank", str(module.kv_rank)),
            ("--qk-head-dim", str(module.head_dim)),
            ("--qk-pos-emb-head-dim", str(module.rope_dim)),
            ("--v-head-dim", str(module.value_dim)),
        ]
    unknown = {
        "a norm after attention": module.post_norm,
        "a scale of the scores": module.score_scale is not None,
        "capped scores": module.score_cap is not None,
        "linearly scaled positions": module.rope_factor != 1.0,
        "a window": module.window is not None,
        "a bias of queries, keys and values, but none of the output,": module.qkv_bias != module.output_bias
        and module.output_bias,
    }
    for what, present in unknown.items():
        if present:
            raise BadInputError(f"attention has {what}, which this export does not write")
    found: Arguments = [heads, ("--kv-channels", str(module.head_dim))]
    if module.num_kv_heads != module.num_heads:
        found += [("--group-query-attention",), ("--num-query-groups", str(module.num_kv_heads))]
    if module.qk_norm:
        found.append(("--qk-layernorm",))
    return found


def _positions(model: ModelSpec, module: Attention | LatentAttention) -> Arguments:
    longest = model.max_positions or model.embedding.num_positions
    found: Arguments = [("--max-position-embeddings", str(longest))] if longest else []
    if module.rope_theta is None:
        return [*found, ("--position-embedding-type", "learned_absolute")]
    found += [("--position-embedding-type", "rope"), ("--rotary-base", str(round(module.rope_theta)))]
    scaling = getattr(module, "rope_scaling", None)
    if scaling is not None:
        # Megatron-LM's scaling is Llama 3's, of which it lets the factor be set.
        fixed = (scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_positions)
        if fixed != (1.0, 4.0, 8192):
            raise BadInputError("rotary embeddings are scaled in another way than Llama 3's, which Megatron-LM has")
        found += [("--use-rope-scaling",), ("--rope-scaling-factor", f"{scaling.factor:g}")]
    return found


def _norm(norm: object) -> Arguments:
    assert isinstance(norm, Norm)
    if norm.unit_offset:
        raise BadInputError("norms with an offset of one are not written by this export")
    name = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[norm.kind]
    return [("--normalization", name), ("--norm-epsilon", f"{norm.epsilon:g}")]


def _feed_forward(model: ModelSpec, parts: list[FeedForward]) -> Arguments:
    dense = [part for part in parts if isinstance(part, Mlp)]
    experts = [part for part in parts if isinstance(part, Moe)]
    attention = model.layers[0].attention
    found: Arguments = []
    if dense:
        mlp = _one(list(dense), "MLPs")
        assert isinstance(mlp, Mlp)
        found += [("--ffn-hidden-size", str(mlp.ffn)), *_activation(mlp.activation, gated=mlp.gated)]
        if mlp.post_norm:
            raise BadInputError("MLPs have a norm after them, which this export does not write")
    else:
        found += [("--ffn-hidden-size", str(experts[0].expert_ffn)), *_activation(experts[0].activation, gated=True)]
    found += _bias(attention, dense)
    if experts:
        moe = _one(list(experts), "experts")
        assert isinstance(moe, Moe)
        found += [
            ("--num-experts", str(moe.num_experts)),
            ("--moe-router-topk", str(moe.experts_per_token)),
            ("--moe-ffn-hidden-size", str(moe.expert_ffn)),
            ("--moe-grouped-gemm",),
            ("--moe-token-dispatcher-type", "alltoall"),
        ]
        if moe.shared_ffn:
            found.append(("--moe-shared-expert-intermediate-size", str(moe.shared_ffn)))
        if dense:
            runs = [(int(kind), len(list(run))) for kind, run in groupby(isinstance(part, Moe) for part in parts)]
            found.append(("--moe-layer-freq", "+".join(f"[{kind}]*{count}" for kind, count in runs)))
    return found


def _activation(name: str, *, gated: bool) -> Arguments:
    if gated and name == "silu":
        return [("--swiglu",)]
    if not gated and name == "gelu_tanh":
        return []  # its default, fused with the bias, is the tanh form
    if not gated and name == "relu2":
        return [("--squared-relu",)]
    if not gated and name == "gelu":
        return [("--no-bias-gelu-fusion",)]
    raise BadInputError(f"the activation {name}{' with a gate' if gated else ''} has no argument of Megatron-LM")


def _bias(attention: object, dense: list[Mlp]) -> Arguments:
    """Megatron-LM has biases everywhere, nowhere, or only of queries, keys and values."""
    qkv = isinstance(attention, Attention) and attention.qkv_bias
    output = isinstance(attention, Attention) and attention.output_bias
    others = {output, *(mlp.bias for mlp in dense)}
    if others == {True} and qkv:
        return []
    if others == {False}:
        return [("--disable-bias-linear",), *([("--add-qkv-bias",)] if qkv else [])]
    raise BadInputError("some linear layers have a bias, some have none: Megatron-LM has no argument for that")
