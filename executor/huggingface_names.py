"""Where each weight lies in a Hugging Face file, by `model_type`: names, transposes, fused and split tensors.

Our tensors have the cut dimension as rows.  `torch.nn.Linear` stores [out, in], so what is cut by its inputs
(`output`, `down`) lies transposed there; GPT-2's Conv1D stores [in, out], so there it is the other way round, and its
query, key and value are columns of one tensor.  Experts are one tensor each there, rows of one tensor here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from specs.layout import Interval
from specs.model import Attention, Embedding, Head, Mlp, ModelSpec, Moe
from specs.tensors import AnyModule, TensorSpec, parameter_name, tensors_of


class Source(NamedTuple):
    """Rows `rows` of our tensor lie in `name` from `first` on: as rows, or as columns where `transposed`."""

    rows: Interval
    name: str
    transposed: bool = False
    first: int = 0


Shape = tuple[int, ...]
# Names of a tensor's sources, given the module's place, the module and the tensor.
_Names = Callable[[int, AnyModule, TensorSpec], Iterator[Source]]

_LLAMA_ATTENTION = {
    "norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "output_bias": "self_attn.o_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
}
_LLAMA_MLP = {
    "norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
_GEMMA_ATTENTION = {**_LLAMA_ATTENTION, "post_norm": "post_attention_layernorm.weight"}
_GEMMA_MLP = {
    **_LLAMA_MLP,
    "norm": "pre_feedforward_layernorm.weight",
    "post_norm": "post_feedforward_layernorm.weight",
}
_MIXTRAL_MOE = {
    "norm": "post_attention_layernorm.weight",
    "router": "block_sparse_moe.gate.weight",
    "gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "up": "block_sparse_moe.experts.{expert}.w3.weight",
    "down": "block_sparse_moe.experts.{expert}.w2.weight",
}
_QWEN_MOE = {
    "norm": "post_attention_layernorm.weight",
    "router": "mlp.gate.weight",
    "gate": "mlp.experts.{expert}.gate_proj.weight",
    "up": "mlp.experts.{expert}.up_proj.weight",
    "down": "mlp.experts.{expert}.down_proj.weight",
}
_GPT2_ATTENTION = {
    "norm": "ln_1.weight",
    "norm_bias": "ln_1.bias",
    "query": "attn.c_attn.weight",
    "key": "attn.c_attn.weight",
    "value": "attn.c_attn.weight",
    "output": "attn.c_proj.weight",
    "query_bias": "attn.c_attn.bias",
    "key_bias": "attn.c_attn.bias",
    "value_bias": "attn.c_attn.bias",
    "output_bias": "attn.c_proj.bias",
}
_GPT2_MLP = {
    "norm": "ln_2.weight",
    "norm_bias": "ln_2.bias",
    "up": "mlp.c_fc.weight",
    "down": "mlp.c_proj.weight",
    "up_bias": "mlp.c_fc.bias",
    "down_bias": "mlp.c_proj.bias",
}
_OPENELM_ATTENTION = {
    "norm": "attn_norm.weight",
    "query": "attn.qkv_proj.weight",
    "key": "attn.qkv_proj.weight",
    "value": "attn.qkv_proj.weight",
    "output": "attn.out_proj.weight",
    "query_norm": "attn.q_norm.weight",
    "key_norm": "attn.k_norm.weight",
}
_OPENELM_MLP = {
    "norm": "ffn_norm.weight",
    "gate": "ffn.proj_1.weight",
    "up": "ffn.proj_1.weight",
    "down": "ffn.proj_2.weight",
}
_PLACE_IN_C_ATTN = {"query": 0, "key": 1, "value": 2}
_TRANSPOSED_IN_LINEAR = {"output", "down"}
_TRANSPOSED_IN_CONV1D = {"query", "key", "value", "up"}


class _LlamaLike(NamedTuple):
    """The Llama family's names; `moe` those of its expert layers."""

    moe: Mapping[str, str] = {}
    mlp: Mapping[str, str] = _LLAMA_MLP
    attention: Mapping[str, str] = _LLAMA_ATTENTION

    def __call__(self, layer: int, module: AnyModule, tensor: TensorSpec) -> Iterator[Source]:
        whole = Interval(0, tensor.rows)
        prefix = f"model.layers.{layer}."
        transposed = tensor.name in _TRANSPOSED_IN_LINEAR
        match module:
            case Embedding():
                yield Source(whole, "model.embed_tokens.weight")
            case Attention():
                yield Source(whole, prefix + self.attention[tensor.name], transposed)
            case Mlp():
                yield Source(whole, prefix + self.mlp[tensor.name], transposed)
            case Moe() if tensor.cut == "unit":
                for expert in range(module.num_experts):
                    rows = Interval(expert * tensor.rows_per_unit, (expert + 1) * tensor.rows_per_unit)
                    yield Source(rows, prefix + self.moe[tensor.name].format(expert=expert), transposed)
            case Moe():
                yield Source(whole, prefix + self.moe[tensor.name])
            case Head():
                yield Source(whole, "model.norm.weight" if tensor.name == "norm" else "lm_head.weight")


def _gpt2(layer: int, module: AnyModule, tensor: TensorSpec) -> Iterator[Source]:
    whole = Interval(0, tensor.rows)
    transposed = tensor.name in _TRANSPOSED_IN_CONV1D
    match module:
        case Embedding():
            yield Source(whole, "transformer.wte.weight" if tensor.name == "weight" else "transformer.wpe.weight")
        case Attention():
            place = _PLACE_IN_C_ATTN.get(tensor.name.removesuffix("_bias"), 0)
            name = f"transformer.h.{layer}.{_GPT2_ATTENTION[tensor.name]}"
            yield Source(whole, name, transposed, first=place * tensor.rows)
        case Mlp():
            yield Source(whole, f"transformer.h.{layer}.{_GPT2_MLP[tensor.name]}", transposed)
        case Head():
            last = {"norm": "transformer.ln_f.weight", "norm_bias": "transformer.ln_f.bias"}
            yield Source(whole, last.get(tensor.name, "lm_head.weight"))


def _openelm(layer: int, module: AnyModule, tensor: TensorSpec) -> Iterator[Source]:
    """Query, key and value are rows of one tensor, and so are gate and up."""
    whole = Interval(0, tensor.rows)
    prefix = f"transformer.layers.{layer}."
    match module:
        case Embedding():
            yield Source(whole, "transformer.token_embeddings.weight")
        case Attention():
            queries, keys = module.num_heads * module.head_dim, module.num_kv_heads * module.head_dim
            first = {"query": 0, "key": queries, "value": queries + keys}.get(tensor.name, 0)
            name = prefix + _OPENELM_ATTENTION[tensor.name]
            yield Source(whole, name, tensor.name in _TRANSPOSED_IN_LINEAR, first)
        case Mlp():
            first = module.ffn if tensor.name == "up" and module.gated else 0
            yield Source(whole, prefix + _OPENELM_MLP[tensor.name], tensor.name in _TRANSPOSED_IN_LINEAR, first)
        case Head():
            yield Source(whole, "transformer.norm.weight" if tensor.name == "norm" else "lm_head.weight")


_FAMILIES: dict[str, _Names] = {
    "llama": _LlamaLike(),
    "mistral": _LlamaLike(),
    "qwen2": _LlamaLike(),
    "qwen3": _LlamaLike(),
    "mixtral": _LlamaLike(_MIXTRAL_MOE),
    "qwen3_moe": _LlamaLike(_QWEN_MOE),
    "gemma2": _LlamaLike(mlp=_GEMMA_MLP, attention=_GEMMA_ATTENTION),
    "gemma3_text": _LlamaLike(mlp=_GEMMA_MLP, attention=_GEMMA_ATTENTION),
    "gpt2": _gpt2,
    "openelm": _openelm,
}

# Some checkpoints hold the bare decoder: the same names without this prefix.
PREFIXES = {"gpt2": "transformer.", "openelm": "transformer."}
DEFAULT_PREFIX = "model."

# Buffers that older files carry; they follow from the configuration.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def sources_of(model: ModelSpec, model_type: str) -> dict[str, tuple[Source, ...]]:
    """For every global tensor of a model (tied ones once) its sources, in chain order."""
    names = _FAMILIES[model_type]
    found: dict[str, tuple[Source, ...]] = {}
    for module_name, module in model.modules():
        layer = int(module_name.split(".")[1]) if module_name.startswith("layer.") else -1
        for tensor in tensors_of(module):
            key = parameter_name(module_name, module, tensor)
            if key not in found:
                found[key] = tuple(names(layer, module, tensor))
    return found


def tensors_by_name(model: ModelSpec) -> dict[str, TensorSpec]:
    """The spec of every global tensor of a model."""
    return {parameter_name(name, module, t): t for name, module in model.modules() for t in tensors_of(module)}


def shapes_of(model: ModelSpec, model_type: str) -> dict[str, Shape]:
    """Name and shape of every tensor that a Hugging Face file of this model holds, in chain order."""
    specs = tensors_by_name(model)
    shapes: dict[str, Shape] = {}
    for key, sources in sources_of(model, model_type).items():
        cols = specs[key].cols
        for source in sources:
            # Parts of one fused tensor come in order, so the last one states its whole size.
            size = source.first + source.rows.size
            shapes[source.name] = ((cols, size) if source.transposed else (size, cols)) if cols else (size,)
    return shapes


def is_ignorable(name: str, model: ModelSpec) -> bool:
    """Whether a file may hold this tensor beyond those needed: a buffer, or a tied head's copy of the embedding."""
    return name.endswith(_BUFFERS) or (model.head.tied and name == "lm_head.weight")
