"""Attention by pieces: what the executor computes, keeps and sends where a window is short or blocks share sequences.

A block that holds T tokens of a sequence of s > T (context parallelism) gathers the keys and values of all s, each rank
those of its own heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from cost_models.flops import local_kv_heads
from cost_models.interface import CostModel, ModuleCost
from cost_models.share import Share
from cost_models.topology import Span
from specs.cluster import CollectiveOp
from specs.layout import Interval
from specs.model import Attention, Module
from specs.plan import Recompute
from specs.slices import attention_pieces, mask_shape


class PieceSums(NamedTuple):
    """Of one rank's attention: pieces of a sequence; over all sequences of the block, in all pieces and in the largest,
    pairs of a query and a key, and keys.
    """

    pieces: int
    pairs: int
    keys: int
    most_pairs: int
    most_keys: int


def piece_sums(module: Attention, share: Share) -> PieceSums:
    """What the pieces of one rank's attention add up to."""
    part, sequences = _view(share)
    pieces = attention_pieces(part, share.seq_len, share.context, module.window)
    return PieceSums(
        pieces=len(pieces),
        pairs=sequences * sum(piece.rows.size * piece.keys.size for piece in pieces),
        keys=sequences * sum(piece.keys.size for piece in pieces),
        most_pairs=sequences * max(piece.rows.size * piece.keys.size for piece in pieces),
        most_keys=sequences * max(piece.keys.size for piece in pieces),
    )


def executed_score_flop(module: Module, share: Share) -> float:
    """Forward products of attention over all pairs of its pieces, masked ones too, as a counter of operations sees it.

    # 4 N d q      N pairs of a query and a key, d head_dim, q query heads
    """
    if not isinstance(module, Attention):
        return 0.0
    return 4.0 * piece_sums(module, share).pairs * module.head_dim * share.units.size


def key_tokens(share: Share) -> int:
    """Tokens whose keys and values a rank has when it attends."""
    return max(share.block_tokens, share.seq_len)


def mask_elements(module: Attention, share: Share) -> int:
    """Elements of the mask that all modules with the same window use; 0 where none is needed."""
    part, _ = _view(share)
    pieces = attention_pieces(part, share.seq_len, share.context, module.window)
    shape = mask_shape(pieces, module.window, module.score_cap is not None)
    return 0 if shape is None else shape[0] * shape[1]


def gathered_width(module: Attention, share: Share) -> int:
    """Numbers per token that ranks of several blocks exchange: keys and values of the own heads; 0 if they do not."""
    if share.block_tokens >= share.seq_len:
        return 0
    return 2 * local_kv_heads(module, share.units) * module.head_dim


def with_exchange(
    cost: ModuleCost,
    costs: CostModel,
    module: Module,
    share: Share,
    span: Span,
    activation_bytes: int,
    recompute: Recompute,
) -> ModuleCost:
    """A module's cost and what its ranks of several blocks exchange, nothing hidden.

    `span`: the ranks that share a sequence; `activation_bytes` of one number.

    # forward: all-gather of 2 s k d a;  backward: reduce-scatter of the same, with recomputation another all-gather
    """
    width = gathered_width(module, share) if isinstance(module, Attention) else 0
    if not width:
        return cost
    ops: tuple[CollectiveOp, CollectiveOp] = ("all_gather", "reduce_scatter")
    gather, scatter = (
        costs.collective(
            op,
            num_ranks=span.num_ranks,
            payload_bytes=share.seq_len * width * activation_bytes,
            level=span.level,
            ranks_per_domain=span.ranks_per_domain,
        )
        for op in ops
    )
    again = gather if recompute in ("selective", "full") else 0.0
    return replace(
        cost,
        forward_communication_seconds=cost.forward_communication_seconds + gather,
        backward_communication_seconds=cost.backward_communication_seconds + scatter + again,
    )


def _view(share: Share) -> tuple[Interval, int]:
    """The part of a sequence that a block holds, and of how many sequences."""
    if share.block_tokens >= share.seq_len:
        return Interval(0, share.seq_len), share.block_tokens // share.seq_len
    return Interval(share.first_token, share.first_token + share.block_tokens), 1
