"""The weight tensors of each module kind: one table that memory models, the executor and checkpoints all read.

Every tensor is stored with the dimension that is cut as its rows (so `output` and `down` are stored transposed),
and a rank always holds a contiguous interval of rows.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

from specs.layout import Interval, kv_groups_of
from specs.model import Attention, Embedding, Head, LatentAttention, Mamba2, Mlp, Moe, Norm

AnyModule = Embedding | Attention | LatentAttention | Mamba2 | Mlp | Moe | Head

# How the rows follow the module's unit cut: "unit" rows_per_unit rows for each unit; "kv" the KV heads (Mamba-2:
# groups) that the rank's heads read; "whole" every rank holds all.
RowCut = Literal["unit", "kv", "whole"]
Init = Literal["normal", "residual", "ones", "zeros"]


class TensorSpec(NamedTuple):
    """One weight tensor: `rows` x `cols` (cols 0: a vector), how rows are cut, how it starts, whether it decays."""

    name: str
    rows: int
    cols: int
    cut: RowCut
    rows_per_unit: int
    init: Init
    decay: bool

    @property
    def num_elements(self) -> int:
        return self.rows * max(self.cols, 1)

    def shape(self, rows: int) -> tuple[int, ...]:
        """Shape of a local piece of that many rows."""
        return (rows, self.cols) if self.cols else (rows,)


def _matrix(name: str, rows: int, cols: int, cut: RowCut, per_unit: int, init: Init = "normal") -> TensorSpec:
    return TensorSpec(name, rows, cols, cut, per_unit, init, decay=True)


def _vector(name: str, rows: int, cut: RowCut = "whole", per_unit: int = 0, init: Init = "zeros") -> TensorSpec:
    return TensorSpec(name, rows, 0, cut, per_unit, init, decay=False)


def _norm(norm: Norm, hidden: int, name: str = "norm") -> list[TensorSpec]:
    weight = _vector(name, hidden, init="zeros" if norm.unit_offset else "ones")
    return [weight, _vector(f"{name}_bias", hidden)] if norm.kind == "layernorm" else [weight]


@cache
def tensors_of(module: AnyModule) -> tuple[TensorSpec, ...]:
    """All tensors of a module, in a fixed order."""
    hidden = module.hidden
    match module:
        case Embedding():
            table = [_matrix("weight", module.vocab, hidden, "unit", 1)]
            if module.num_positions:
                table.append(_matrix("positions", module.num_positions, hidden, "whole", 0))
        case Attention():
            width = module.head_dim
            q_rows, kv_rows = module.num_heads * width, module.num_kv_heads * width
            table = _norm(module.norm, hidden)
            table += [
                _matrix("query", q_rows, hidden, "unit", width),
                _matrix("key", kv_rows, hidden, "kv", width),
                _matrix("value", kv_rows, hidden, "kv", width),
                _matrix("output", q_rows, hidden, "unit", width, "residual"),
            ]
            if module.qkv_bias:
                table += [
                    _vector("query_bias", q_rows, "unit", width),
                    _vector("key_bias", kv_rows, "kv", width),
                    _vector("value_bias", kv_rows, "kv", width),
                ]
            if module.output_bias:
                table.append(_vector("output_bias", hidden))
            if module.qk_norm:
                start: Init = "zeros" if module.norm.unit_offset else "ones"
                table += [_vector("query_norm", width, init=start), _vector("key_norm", width, init=start)]
            if module.post_norm:
                table += _norm(module.norm, hidden, "post_norm")
        case LatentAttention():
            heads, down = module.num_heads, module.kv_rank + module.rope_dim
            table = _norm(module.norm, hidden)
            table += [
                _matrix("query_down", module.query_rank, hidden, "whole", 0),
                _vector("query_norm", module.query_rank, init="ones"),
                _matrix("query", heads * module.key_dim, module.query_rank, "unit", module.key_dim),
                _matrix("kv_down", down, hidden, "whole", 0),
                _vector("kv_norm", module.kv_rank, init="ones"),
                _matrix("key", heads * module.head_dim, module.kv_rank, "unit", module.head_dim),
                _matrix("value", heads * module.value_dim, module.kv_rank, "unit", module.value_dim),
                _matrix("output", heads * module.value_dim, hidden, "unit", module.value_dim, "residual"),
            ]
        case Mamba2():
            table = _norm(module.norm, hidden) + _mamba_tensors(module)
        case Mlp():
            table = _norm(module.norm, hidden)
            if module.gated:
                table.append(_matrix("gate", module.ffn, hidden, "unit", 1))
            table += [
                _matrix("up", module.ffn, hidden, "unit", 1),
                _matrix("down", module.ffn, hidden, "unit", 1, "residual"),
            ]
            if module.bias:
                if module.gated:
                    table.append(_vector("gate_bias", module.ffn, "unit", 1))
                table += [_vector("up_bias", module.ffn, "unit", 1), _vector("down_bias", hidden)]
            if module.post_norm:
                table += _norm(module.norm, hidden, "post_norm")
        case Moe():
            rows = module.num_experts * module.expert_ffn
            table = _norm(module.norm, hidden)
            table.append(_matrix("router", module.num_experts, hidden, "whole", 0))
            table += [
                _matrix("gate", rows, hidden, "unit", module.expert_ffn),
                _matrix("up", rows, hidden, "unit", module.expert_ffn),
                _matrix("down", rows, hidden, "unit", module.expert_ffn, "residual"),
            ]
            if module.shared_ffn:
                table += [
                    _matrix("shared_gate", module.shared_ffn, hidden, "whole", 0),
                    _matrix("shared_up", module.shared_ffn, hidden, "whole", 0),
                    _matrix("shared_down", module.shared_ffn, hidden, "whole", 0, "residual"),
                ]
        case Head():
            table = _norm(module.norm, hidden)
            table.append(_matrix("weight", module.vocab, hidden, "unit", 1))
    return tuple(table)


def _mamba_tensors(module: Mamba2) -> list[TensorSpec]:
    """The in-projection and the convolution by what their rows make: gate, values, B, C, step sizes."""
    hidden, width, heads, state = module.hidden, module.head_dim, module.num_heads, module.state_size
    inner, shared = heads * width, module.num_groups * state
    convolved: list[tuple[str, int, RowCut, int]] = [
        ("value", inner, "unit", width),
        ("b", shared, "kv", state),
        ("c", shared, "kv", state),
    ]
    table = [_matrix("gate", inner, hidden, "unit", width)]
    table += [_matrix(name, rows, hidden, cut, per_unit) for name, rows, cut, per_unit in convolved]
    table.append(_matrix("step", heads, hidden, "unit", 1))
    table += [_matrix(f"{name}_conv", rows, module.conv_kernel, cut, per) for name, rows, cut, per in convolved]
    if module.conv_bias:
        table += [_vector(f"{name}_conv_bias", rows, cut, per) for name, rows, cut, per in convolved]
    return [
        *table,
        _vector("decay", heads, "unit", 1, "ones"),
        _vector("skip", heads, "unit", 1, "ones"),
        _vector("step_bias", heads, "unit", 1),
        _vector("gated_norm", inner, "unit", width, "ones"),
        _matrix("output", inner, hidden, "unit", width, "residual"),
    ]


def parameter_name(module_name: str, module: AnyModule, tensor: TensorSpec) -> str:
    """Global name of a tensor.  A tied head's weight IS the embedding's, so it has that name."""
    if isinstance(module, Head) and module.tied and tensor.name == "weight":
        return "embedding.weight"
    return f"{module_name}.{tensor.name}"


def local_rows(module: AnyModule, tensor: TensorSpec, units: Interval) -> Interval:
    """Rows of `tensor` that a rank holds when it holds `units` of the module."""
    match tensor.cut:
        case "whole":
            return Interval(0, tensor.rows)
        case "unit":
            return Interval(units.start * tensor.rows_per_unit, units.stop * tensor.rows_per_unit)
        case "kv":
            assert isinstance(module, Attention | Mamba2)
            groups = kv_groups_of(units, module.num_heads, module.num_kv_heads)
            return Interval(groups.start * tensor.rows_per_unit, groups.stop * tensor.rows_per_unit)


def sharding_level(tensor: TensorSpec, zero: int) -> int:
    """ZeRO level of one tensor of a module: vectors stay whole where matrices are gathered around each use (3), for
    they are a thousandth of the weights and would need collectives of their own.
    """
    return zero if tensor.cols else min(zero, 2)


def local_num_elements(module: AnyModule, units: Interval) -> int:
    """Weight elements that a rank holds of a module."""
    total = 0
    for tensor in tensors_of(module):
        total += local_rows(module, tensor, units).size * max(tensor.cols, 1)
    return total


def num_parameters(modules: tuple[tuple[str, AnyModule], ...]) -> int:
    """Elements of a model's distinct tensors (tied ones once)."""
    shared: dict[str, int] = {}
    total = 0
    for name, module in modules:
        if isinstance(module, Embedding | Head):
            for tensor in tensors_of(module):
                shared[parameter_name(name, module, tensor)] = tensor.num_elements
        else:
            total += _num_elements(module)
    return total + sum(shared.values())


@cache
def _num_elements(module: AnyModule) -> int:
    return sum(tensor.num_elements for tensor in tensors_of(module))
