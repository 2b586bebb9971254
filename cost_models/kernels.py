"""What a module's forward and backward pass ask of a device: matrix operations, bytes moved, kernels started."""

from __future__ import annotations

from typing import NamedTuple

from cost_models.flops import local_kv_heads, matrix_flop, routed_tokens
from cost_models.share import Share
from specs.model import Attention, Embedding, Head, Mlp, Module, Moe
from specs.tensors import local_num_elements


class Work(NamedTuple):
    """`matrix_bytes` are operands and results of matrix products, `traffic_bytes` those of element-wise kernels."""

    matrix_flop: float
    matrix_bytes: float
    traffic_bytes: float
    num_kernels: int


def forward_work(module: Module, share: Share, activation_bytes: int) -> Work:
    """Forward pass on one rank.  Element-wise traffic in passes over tensors:

    # norm 2 c h, residual 3 c h; rotary 2 T (q + k) d; gate 3 T f (2 T f without gate); cross-entropy 10 bytes T v
    #   c chunk tokens, T block tokens, h hidden
    """
    size, hidden, block_tokens, units = activation_bytes, module.hidden, share.block_tokens, share.units
    chunk = 5.0 * size * share.chunk_tokens * hidden
    ends = size * 2.0 * block_tokens * hidden
    weights = size * float(local_num_elements(module, units))
    flop = matrix_flop(module, block_tokens, units)
    match module:
        case Embedding():
            return Work(0.0, 0.0, ends, 3)
        case Attention():
            kv_heads = local_kv_heads(module, units)
            inner = size * block_tokens * (2 * units.size + 2 * kv_heads) * module.head_dim
            rotary = 2.0 * size * block_tokens * (units.size + kv_heads) * module.head_dim if module.rope_theta else 0.0
            return Work(flop, weights + ends + inner, chunk + rotary + inner, 8)
        case Mlp():
            columns = size * block_tokens * units.size
            count = 3 if module.gated else 2
            return Work(flop, weights + ends + columns * count, chunk + columns * count, 6)
        case Moe():
            routed = size * routed_tokens(module, block_tokens, units)
            moved = routed * (2 * hidden + 3 * module.expert_ffn)
            return Work(flop, weights + moved, chunk + moved + 2.0 * routed * hidden, 20)
        case Head():
            # the executor's loss forms logits and both gradients at once
            logits = float(block_tokens * units.size)
            return Work(3.0 * flop, 3.0 * (weights + ends / 2 + size * logits), chunk + 20.0 * logits, 12)


def backward_work(module: Module, share: Share, activation_bytes: int) -> Work:
    """Backward pass: two products for each of forward's and twice its traffic; every pass adds the new gradients of
    the weights to those of the step in fp32.  The head only scales the gradients that its forward pass has made.
    """
    gradients = (activation_bytes + 8.0) * local_num_elements(module, share.units)
    chunk = activation_bytes * share.chunk_tokens * module.hidden
    match module:
        case Embedding():
            return Work(0.0, 0.0, 2.0 * activation_bytes * share.block_tokens * module.hidden + gradients, 4)
        case Head():
            scaled = 2.0 * activation_bytes * local_num_elements(module, share.units)
            return Work(0.0, 0.0, 6.0 * chunk + scaled + gradients, 4)
        case _:
            forward = forward_work(module, share, activation_bytes)
            return Work(
                2.0 * forward.matrix_flop,
                2.0 * forward.matrix_bytes,
                2.0 * forward.traffic_bytes + gradients,
                2 * forward.num_kernels,
            )


def repeated_work(module: Module, share: Share, activation_bytes: int) -> Work:
    """What selective recomputation does again beside attention's scores: rotary embeddings, activation functions."""
    size, tokens, units = activation_bytes, share.block_tokens, share.units
    match module:
        case Attention():
            heads = 2.0 * (units.size + local_kv_heads(module, units)) if module.rope_theta else 0.0
            return Work(0.0, 0.0, size * tokens * heads * module.head_dim, 4)
        case Mlp():
            return Work(0.0, 0.0, float(size * tokens * units.size * (3 if module.gated else 2)), 2)
        case Moe():
            return Work(0.0, 0.0, 3.0 * size * routed_tokens(module, tokens, units) * module.expert_ffn, 2)
        case _:
            return Work(0.0, 0.0, 0.0, 0)
