"""Bytes that a module keeps from forward to backward, as this project's executor keeps them.

A module's input chunk stays on its rank and is gathered again in backward, so that what grows with the block is only
what is cut by its degree.
"""

from __future__ import annotations

from functools import lru_cache

from cost_models.context import key_tokens, piece_sums
from cost_models.dispatch import dispatched_tokens
from cost_models.flops import local_kv_heads, routed_tokens
from cost_models.share import Share
from specs.cluster import Precision
from specs.layout import Interval, kv_groups_of
from specs.model import Attention, Embedding, Head, LatentAttention, Mamba2, Mlp, Module, Moe
from specs.plan import Recompute

ACTIVATION_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp8": 2}
LOG_SUM_EXP_BYTES = 4
TOKEN_ID_BYTES = 8


@lru_cache(maxsize=65536)
def activation_bytes(module: Module, share: Share, precision: Precision, recompute: Recompute = "none") -> int:
    """Bytes kept from forward to backward of one micro-batch on one rank.

    # attention  a (n c h + (2 T q + 2 K k) d) + 4 T q       mlp        a (n c h + (3 | 2) T f)
    # head       a (n c h + v h)                           embedding  8 T       moe  `_moe_bytes`
    # mamba2     `_mamba_bytes`
    # keep: the gathered input instead of its chunk, a (T - c) h more.
    # full recompute: a c h (head: + 8 T).  selective: attention without its output and log-sum-exp, mlp without
    #   its product.  A norm of a module's output keeps that: a c h
    #   c tokens of the rank's chunk, T tokens of its block, h hidden, d head_dim, a bytes of an activation;
    #   q query heads, k KV heads, f columns (3 gated, 2 not), v vocabulary rows on this rank.  n = 2, the input and
    #   the normalised input; the head keeps the finished gradients of its input and weight instead of logits.
    #   Leaves out statistics of norms (4 or 8 bytes per token) and the rotary table.
    """
    size, block_tokens, units = ACTIVATION_BYTES[precision], share.block_tokens, share.units
    chunk = size * share.chunk_tokens * module.hidden
    if isinstance(module, Embedding):
        return (TOKEN_ID_BYTES + (size if share.degree > 1 and recompute != "full" else 0)) * block_tokens
    if recompute == "full":
        return chunk + (TOKEN_ID_BYTES * block_tokens if isinstance(module, Head) else 0)
    selective = recompute == "selective"
    chunks = 2 * chunk
    if recompute == "keep":
        chunks += size * (share.block_tokens - share.chunk_tokens) * module.hidden
    if isinstance(module, Attention | Mlp) and module.post_norm:
        chunks += chunk
    match module:
        case Attention():
            return chunks + _attention_bytes(module, share, precision, selective)
        case LatentAttention():
            return chunks + _latent_attention_bytes(module, share, precision, selective)
        case Mamba2():
            return chunks + _mamba_bytes(module, share, precision, selective)
        case Mlp():
            return chunks + size * block_tokens * units.size * (1 + module.gated + (not selective))
        case Moe():
            return chunks + _moe_bytes(module, share, size, selective)
        case Head():
            return chunks + size * units.size * module.hidden


def _moe_bytes(module: Moe, share: Share, size: int, selective: bool) -> int:
    """What routing keeps on the rank's own tokens, and its experts of the tokens that a balanced router sends them.

    # router   c (4 E + 12 e + 4)     E experts, e of them a token
    # experts  a R (2 h + 3 f + 1) + 16 R       R = T e u / E choices of the rank's u experts: inputs, columns, outputs,
    #          weights, two lists of places
    # shared   a 3 c f'
    # in a block of several also the places of what was sent, 8 S;  S of the own tokens' rows to all members
    # selective: router, and a c e (weights, in a block of one) or places and what arrived, A (a h + (a + 8) e)
    """
    own, chosen = share.chunk_tokens, module.experts_per_token
    router = own * (4 * module.num_experts + (TOKEN_ID_BYTES + 4) * chosen + 4)
    shared = 3 * size * own * module.shared_ffn
    sent = arrived = 0.0
    if share.degree > 1:
        sent = share.degree * dispatched_tokens(module, own, share.units)
        arrived = dispatched_tokens(module, share.block_tokens, share.units)
    places = TOKEN_ID_BYTES * sent
    if selective:
        inputs = arrived * (size * module.hidden + (size + TOKEN_ID_BYTES) * chosen) if arrived else size * own * chosen
        return router + shared + round(places + inputs)
    routed = routed_tokens(module, share.block_tokens, share.units)
    experts = size * (2 * module.hidden + 3 * module.expert_ffn + 1) + 2 * TOKEN_ID_BYTES
    return router + shared + round(places + routed * experts)


def _attention_bytes(module: Attention, share: Share, precision: Precision, selective: bool) -> int:
    """What attention keeps between its two projections.

    # K tokens whose keys and values the rank has: T, or s where blocks share a sequence.  In several pieces the output
    #   once more as a whole, a T q d.
    # with a cap on scores, which no fused kernel takes: queries, the keys and values of each query head, the output,
    #   and the scores after the cap and as probabilities: 2 a (T + M) q d + q N (a + 4, and a beside fp32)
    #   M keys and N pairs of a query and a key, each in every piece
    """
    size, tokens = ACTIVATION_BYTES[precision], share.block_tokens
    queries, kv_heads = share.units.size, local_kv_heads(module, share.units)
    if selective:
        return size * tokens * (queries + 2 * kv_heads) * module.head_dim
    sums, keys = piece_sums(module, share), key_tokens(share)
    normed = queries + kv_heads if module.qk_norm else 0
    if module.score_cap is not None:
        scores = queries * sums.pairs * (size + 4 + (size if size < 4 else 0))
        return size * (tokens * (2 * queries + normed) + 2 * queries * sums.keys) * module.head_dim + scores
    held = kv_heads if _whole_kv_groups(module, share.units) else queries
    outputs = 2 if sums.pieces > 1 else 1
    heads = tokens * ((1 + outputs) * queries + normed) + keys * 2 * held
    return size * heads * module.head_dim + LOG_SUM_EXP_BYTES * tokens * queries


def _latent_attention_bytes(module: LatentAttention, share: Share, precision: Precision, selective: bool) -> int:
    """Low-rank vectors before and after their norms on the rank's chunk, and the heads' queries, keys and values.

    # a (2 c l + T n (2 d + r + 2 v)) + 4 T n;  selective: a (2 c l + T n (2 d + r + v))
    #   l latent width, n heads, d, r, v widths of a head's part without positions, with them, and of its value; joined
    #   keys add a T n r.  A formula: no executor that was measured runs this module.
    """
    heads = share.units.size
    width = module.key_dim + module.head_dim + module.value_dim
    if not selective:
        width += module.rope_dim + module.value_dim
    kept = 2 * share.chunk_tokens * module.latent_width + share.block_tokens * heads * width
    log_sum_exp = 0 if selective else LOG_SUM_EXP_BYTES * share.block_tokens * heads
    return ACTIVATION_BYTES[precision] * kept + log_sum_exp


def _mamba_bytes(module: Mamba2, share: Share, precision: Precision, selective: bool) -> int:
    """What Mamba-2 keeps between its projections: outputs of the first one, of the convolution, the scan and the norm.

    # a T (5 D + 2 S + H) + 4 T H;  selective: the in-projection's alone, a T (2 D + S + H)
    #   H heads, D = H head_dim, S = 2 groups x state size of B and C on this rank; 4 T H the sums of decays in fp32.
    #   These are what the published kernels save (state-spaces/mamba, MambaChunkScanCombinedFn, causal_conv1d, gated
    #   RMSNorm); a chunk's states and products inside it are formed again.  No executor that was measured runs this.
    """
    heads = share.units.size
    inner, shared = heads * module.head_dim, 2 * local_kv_heads(module, share.units) * module.state_size
    size = ACTIVATION_BYTES[precision]
    projected = size * (2 * inner + shared + heads)
    return share.block_tokens * (projected if selective else projected + size * (3 * inner + shared) + 4 * heads)


def _whole_kv_groups(module: Attention, heads: Interval) -> bool:
    """Whether torch can repeat the KV heads itself; else each query head gets a copy of its group."""
    per_group = module.num_heads // module.num_kv_heads
    groups = kv_groups_of(heads, module.num_heads, module.num_kv_heads)
    return groups.size == 1 or (heads.start % per_group == 0 and heads.size == groups.size * per_group)


@lru_cache(maxsize=65536)
def deferred_bytes(module: Module, share: Share, precision: Precision, recompute: Recompute = "none") -> int:
    """Bytes that wait from the gradient of the input (I) to the gradients of the weights (W), where those are split.

    # attention  a (c h + T (2 q + 2 k) d + T h)        mlp  a (c h + T (3 | 2) f + T h)        others 0
    #   input chunk (keep: the gathered one, T h), gradients of the first projections' outputs, input of the last one
    #   and its gathered output gradient
    """
    if not isinstance(module, (Attention, Mlp)):
        return 0
    if isinstance(module, Attention):
        width = (2 * share.units.size + 2 * local_kv_heads(module, share.units)) * module.head_dim
    else:
        width = share.units.size * (2 + module.gated)
    inputs = share.block_tokens if recompute == "keep" else share.chunk_tokens
    kept = inputs * module.hidden + share.block_tokens * (width + module.hidden)
    return ACTIVATION_BYTES[precision] * kept
