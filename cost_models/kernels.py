"""What a module's forward and backward pass ask of a device: matrix operations, bytes moved, kernels started."""

from __future__ import annotations

import math
from typing import NamedTuple

from cost_models.flops import local_kv_heads, routed_tokens
from cost_models.share import Share
from specs.model import Attention, Embedding, Head, LatentAttention, Mamba2, Mlp, Module, Moe
from specs.tensors import local_num_elements


class Matrix(NamedTuple):
    """Equal products [m, k] x [k, n], so many of them."""

    m: float
    n: float
    k: float
    number: int = 1

    def for_input(self) -> Matrix:
        """The gradient of the left operand: [m, n] x [n, k]."""
        return Matrix(self.m, self.k, self.n, self.number)

    def for_weight(self) -> Matrix:
        """The gradient of the right operand: [k, m] x [m, n]."""
        return Matrix(self.k, self.n, self.m, self.number)

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.number


TILE = (128, 256)


def matrix_seconds(matrix: Matrix, rate: float, depth_overhead: float, kernel_seconds: float) -> float:
    """# t = 2 ceil(m / 128) 128 ceil(n / 256) 256 (k + k0) / R + t0
    #   R operations/s of large products, k0 the prologue and epilogue of a tile in units of depth, t0 one kernel
    #   Fits XLA's 65 measured H100 products above 20 GFLOP with a median error of 0.7 %, 2.3 % at the 90th
    #   percentile (R = 0.83 of peak, k0 = 140, t0 = 3.2 us).  Leaves out the quantization of waves, which that
    #   table does not show.
    """
    tall = math.ceil(matrix.m / TILE[0]) * TILE[0] * math.ceil(matrix.n / TILE[1]) * TILE[1]
    wide = math.ceil(matrix.m / TILE[1]) * TILE[1] * math.ceil(matrix.n / TILE[0]) * TILE[0]
    return matrix.number * (2.0 * min(tall, wide) * (matrix.k + depth_overhead) / rate + kernel_seconds)


class Work(NamedTuple):
    """Matrix products with weights; `traffic_bytes` of element-wise kernels and how many those are."""

    products: tuple[Matrix, ...]
    traffic_bytes: float
    num_kernels: int


def products_of(module: Module, share: Share) -> tuple[Matrix, ...]:
    """Forward matrix products with weights on one rank."""
    tokens, hidden, units = share.block_tokens, module.hidden, share.units
    match module:
        case Embedding():
            return ()
        case Attention():
            width = module.head_dim
            rows = (units.size + 2 * local_kv_heads(module, units)) * width
            return (Matrix(tokens, rows, hidden), Matrix(tokens, hidden, units.size * width))
        case LatentAttention():
            keys, values = units.size * module.head_dim, units.size * module.value_dim
            return (
                Matrix(share.chunk_tokens, module.query_rank, hidden),
                Matrix(share.chunk_tokens, module.kv_rank + module.rope_dim, hidden),
                Matrix(tokens, units.size * module.key_dim, module.query_rank),
                Matrix(tokens, keys, module.kv_rank),
                Matrix(tokens, values, module.kv_rank),
                Matrix(tokens, hidden, values),
            )
        case Mamba2():
            inner, groups = units.size * module.head_dim, local_kv_heads(module, units)
            rows = 2 * inner + 2 * groups * module.state_size + units.size
            return (Matrix(tokens, rows, hidden), Matrix(tokens, hidden, inner))
        case Mlp():
            first = Matrix(tokens, units.size, hidden)
            return (*((first,) * (1 + module.gated)), Matrix(tokens, hidden, units.size))
        case Moe():
            routed = routed_tokens(module, tokens, units) / units.size
            expert = (
                Matrix(routed, module.expert_ffn, hidden, 2 * units.size),
                Matrix(routed, hidden, module.expert_ffn, units.size),
            )
            own, columns = share.chunk_tokens, module.shared_ffn
            shared = (*((Matrix(own, columns, hidden),) * 2), Matrix(own, hidden, columns)) if columns else ()
            return (*expert, *shared, Matrix(own, module.num_experts, hidden))
        case Head():
            return (Matrix(tokens, units.size, hidden),)


def forward_work(module: Module, share: Share, activation_bytes: int) -> Work:
    """Forward pass on one rank.  Element-wise traffic in passes over tensors:

    # norm 2 c h, residual 3 c h; rotary 2 T (q + k) d; gate 3 T f (2 T f without gate); cross-entropy 20 bytes T v
    #   c chunk tokens, T block tokens, h hidden.  The executor's loss forms logits and both gradients at once.
    """
    size, hidden, block_tokens, units = activation_bytes, module.hidden, share.block_tokens, share.units
    chunk = 5.0 * size * share.chunk_tokens * hidden
    products = products_of(module, share)
    match module:
        case Embedding():
            return Work((), 2.0 * size * block_tokens * hidden, 3)
        case Attention():
            heads = 2.0 * (units.size + local_kv_heads(module, units)) if module.rope_theta else 0.0
            return Work(products, chunk + size * block_tokens * heads * module.head_dim, 6)
        case LatentAttention():
            joined = 2.0 * units.size * (module.rope_dim + module.key_dim)  # rotary queries; keys from both their parts
            latents = 2.0 * size * share.chunk_tokens * module.latent_width
            return Work(products, chunk + latents + size * block_tokens * joined, 12)
        case Mamba2():
            return Work(products, chunk + _mamba_traffic(module, share, size), 14)
        case Mlp():
            return Work(products, chunk + size * block_tokens * units.size * (3.0 if module.gated else 2.0), 4)
        case Moe():
            routed = size * routed_tokens(module, block_tokens, units)
            return Work(products, chunk + routed * (4.0 * hidden + 3.0 * module.expert_ffn), 16)
        case Head():
            both = (products[0].for_input(), products[0].for_weight())
            return Work((*products, *both), chunk + 20.0 * block_tokens * units.size, 8)


def _mamba_traffic(module: Mamba2, share: Share, size: int) -> float:
    """Forward bytes of convolution, scan and gated norm.

    # a T (4 D + 5 S + H) + 16 D N T / Q + 3 a T D
    #   D = H P inner numbers, S = 2 G N of B and C on this rank: the convolution reads and writes D + S; the scan reads
    #   them (B and C twice) and steps and writes D, and its states, in fp32, are written and read twice; the norm reads
    #   two and writes one.  Kernels of the scan: decays, states, recurrence, C B^T, outputs.
    """
    inner = share.units.size * module.head_dim
    shared = 2 * local_kv_heads(module, share.units) * module.state_size
    states = 16.0 * inner * module.state_size / min(module.chunk, share.seq_len)
    return share.block_tokens * (size * (7.0 * inner + 4.0 * shared + share.units.size) + states)


def backward_work(module: Module, share: Share, activation_bytes: int) -> Work:
    """Backward pass: two products for each of forward's and twice its traffic; every pass adds the new gradients of
    the weights to those of the step in fp32.  The head only scales the gradients that its forward pass has made.
    """
    gradients = (activation_bytes + 8.0) * local_num_elements(module, share.units)
    chunk = activation_bytes * share.chunk_tokens * module.hidden
    match module:
        case Embedding():
            return Work((), 2.0 * activation_bytes * share.block_tokens * module.hidden + gradients, 4)
        case Head():
            scaled = 2.0 * activation_bytes * local_num_elements(module, share.units)
            return Work((), 6.0 * chunk + scaled + gradients, 4)
        case _:
            forward = forward_work(module, share, activation_bytes)
            both = tuple(half for m in forward.products for half in (m.for_input(), m.for_weight()))
            return Work(both, 2.0 * forward.traffic_bytes + gradients, 2 * forward.num_kernels)


def repeated_work(module: Module, share: Share, activation_bytes: int) -> Work:
    """What selective recomputation does again beside attention's scores or the scan: rotary embeddings, activation
    functions, convolution and gated norm.
    """
    size, tokens, units = activation_bytes, share.block_tokens, share.units
    match module:
        case Attention():
            heads = 2.0 * (units.size + local_kv_heads(module, units)) if module.rope_theta else 0.0
            return Work((), size * tokens * heads * module.head_dim, 4)
        case LatentAttention():
            return Work((), 2.0 * size * tokens * units.size * (module.rope_dim + module.key_dim), 6)
        case Mamba2():
            return Work((), _mamba_traffic(module, share, size), 10)
        case Mlp():
            return Work((), float(size * tokens * units.size * (3 if module.gated else 2)), 2)
        case Moe():
            return Work((), 3.0 * size * routed_tokens(module, tokens, units) * module.expert_ffn, 2)
        case _:
            return Work((), 0.0, 0)
