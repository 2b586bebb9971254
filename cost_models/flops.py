"""Floating-point operations of a module's forward pass on one rank; backward takes twice the matrix products."""

from __future__ import annotations

from specs.layout import Interval, balanced_cuts, interval_of, kv_groups_of
from specs.model import Attention, Embedding, Head, LatentAttention, Mamba2, Mlp, Module, Moe, num_units
from specs.plan import Recompute

# Attention's scores and their product with the values: backward recomputes the scores and forms four products
# where forward forms two, so 5 / 2.  [FlashAttention-2, arXiv 2307.08691, section 4.1]
ATTENTION_BACKWARD_RATIO = 2.5
# Modules whose weight gradients a split backward pass leaves for later.
SPLIT_KINDS = (Attention, Mlp)


def largest_units(module: Module, degree: int) -> Interval:
    """The largest interval of an even cut, the one that the block's other ranks wait for."""
    units = num_units(module)
    cuts = balanced_cuts(units, degree)
    return max((interval_of(cuts, part) for part in range(degree)), key=lambda interval: interval.size)


def local_kv_heads(module: Attention | Mamba2, heads: Interval) -> int:
    """KV heads (or groups) that a rank with these heads computes; one shared with a neighbour counts on both."""
    return kv_groups_of(heads, module.num_heads, module.num_kv_heads).size


def gathered_width(module: Module) -> int:
    """Numbers per token that a block gathers for a module: the residual stream, or the low-rank vectors."""
    return module.latent_width if isinstance(module, LatentAttention) else module.hidden


def routed_tokens(module: Moe, block_tokens: int, experts: Interval) -> float:
    """Token copies that a rank's experts receive when the router is balanced."""
    return block_tokens * module.experts_per_token * experts.size / module.num_experts


def matrix_flop(module: Module, block_tokens: int, units: Interval) -> float:
    """Forward matrix products with weights, one rank.

    # 2 x tokens x rows x columns for each weight matrix that the rank holds
    """
    hidden = module.hidden
    match module:
        case Embedding():
            return 0.0
        case Attention():
            rows = (2 * units.size + 2 * local_kv_heads(module, units)) * module.head_dim
            return 2.0 * block_tokens * hidden * rows
        case LatentAttention():
            # each rank forms the low-rank vectors of its own tokens, and its heads of all tokens
            down = hidden * module.latent_width * units.size / module.num_heads
            expand = module.query_rank * module.key_dim + module.kv_rank * (module.head_dim + module.value_dim)
            return 2.0 * block_tokens * (down + units.size * (expand + module.value_dim * hidden))
        case Mamba2():
            inner, shared = units.size * module.head_dim, 2 * local_kv_heads(module, units) * module.state_size
            projections = hidden * (3 * inner + shared + units.size)
            return 2.0 * block_tokens * (projections + module.conv_kernel * (inner + shared))
        case Mlp():
            return 2.0 * block_tokens * hidden * units.size * (3 if module.gated else 2)
        case Moe():
            routed = 2.0 * routed_tokens(module, block_tokens, units) * hidden * module.expert_ffn * 3
            shared_columns = module.shared_ffn * units.size / module.num_experts
            router = 2.0 * block_tokens * hidden * units.size  # of the rank's own tokens, all experts
            return routed + router + 2.0 * block_tokens * hidden * shared_columns * 3
        case Head():
            return 2.0 * block_tokens * hidden * units.size


def score_flop(module: Module, block_tokens: int, seq_len: int, units: Interval) -> float:
    """Forward products without weights, one rank: attention's scores and those times values, Mamba-2's scan.

    # 2 x tokens x s x (key + value width) x heads, halved by the causal mask; a window w < s leaves s w - w^2 / 2 pairs
    #   s sequence length.  Leaves out the diagonal's other half, 1 / s.  Scan: `_scan_products`
    """
    match module:
        case Attention():
            width = 2 * module.head_dim
            window = seq_len if module.window is None else min(module.window, seq_len)
        case LatentAttention():
            width, window = module.key_dim + module.value_dim, seq_len
        case Mamba2():
            return 2.0 * block_tokens * _scan_products(module, seq_len, units)
        case _:
            return 0.0
    pairs_per_token = window - window * window / (2.0 * seq_len)
    return 2.0 * block_tokens * pairs_per_token * width * units.size


def _scan_products(module: Mamba2, seq_len: int, units: Interval) -> float:
    """Multiplications per token of the state-space scan by chunks [Mamba-2, arXiv 2405.21060, section 6].

    # G Q N + H (Q P + 2 P N): C B^T of a group and its product with the values, inside chunks of Q = min(chunk, s)
    #   tokens; a chunk's state from its values, and its outputs from the state before
    #   H heads, G groups of them, P head_dim, N state_size.  Chunks are formed whole, the masked half too.  Leaves out
    #   decays and the recurrence of states, H P N / Q.
    """
    chunk, width, state = min(module.chunk, seq_len), module.head_dim, module.state_size
    within = local_kv_heads(module, units) * chunk * state + units.size * chunk * width
    return float(within + 2 * units.size * width * state)


def score_backward_ratio(module: Module) -> float:
    """Backward's part of forward's `score_flop`: a scan's products have two gradients each."""
    return 2.0 if isinstance(module, Mamba2) else ATTENTION_BACKWARD_RATIO


def weight_gradient_share(
    module: Module, *, block_tokens: int, seq_len: int, units: Interval, recompute: Recompute
) -> float:
    """Part of a module's backward that a split one may do later: the products that make weight gradients.

    # w / (2 w + 5/2 s + r), attention and mlp only
    #   w products with weights, s attention's scores, r what is recomputed: w + s (full), s (selective), 0
    """
    if not isinstance(module, SPLIT_KINDS):
        return 0.0
    products = matrix_flop(module, block_tokens, units)
    scores = score_flop(module, block_tokens, seq_len, units)
    again = {"keep": 0.0, "none": 0.0, "selective": scores, "full": products + scores}[recompute]
    return products / (2.0 * products + ATTENTION_BACKWARD_RATIO * scores + again)


def forward_flop(module: Module, *, block_tokens: int, seq_len: int, units: Interval) -> float:
    """All counted operations of a forward pass on a rank that holds `units` of a block with `block_tokens` tokens."""
    return matrix_flop(module, block_tokens, units) + score_flop(module, block_tokens, seq_len, units)
