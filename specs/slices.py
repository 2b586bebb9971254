"""Context parallelism: how sequences that several attention blocks share are cut, and which keys a query needs.

A sequence of s tokens is cut into 2 c slices, and the token list holds them in pairs of an early and a late one: 0,
2 c - 1, 1, 2 c - 2 and so on.  Under the causal mask every pair is the same work, so that neighbouring blocks with
equally many pairs wait for nobody.  Every other module works token by token and does not notice the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from specs.layout import Interval

# Most queries of one piece where keys precede all of them, so that its mask stays small beside the scores it spares.
MAX_ROWS = 1024
# Fewest queries of one piece of windowed attention, so that kernels have something to do.
MIN_ROWS = 128


class Piece(NamedTuple):
    """Queries (places in a view) and the keys (positions) that they look at; the last query is at the last key."""

    rows: Interval
    keys: Interval

    def is_causal(self, window: int | None) -> bool:
        """Whether the plain causal mask does: as many keys as queries, all in reach."""
        return self.rows.size == self.keys.size and (window is None or window >= self.keys.size)


@lru_cache(maxsize=1024)
def slices(part: Interval, seq_len: int, context: int) -> tuple[Interval, ...]:
    """Positions of a part of one sequence's token list, slice by slice.

    The part begins and ends between slices; `context` 1 leaves sequences in order.
    """
    if context == 1:
        return (part,)
    width = seq_len // (2 * context)
    order = [number for pair in range(context) for number in (pair, 2 * context - 1 - pair)]
    return tuple(Interval(n * width, (n + 1) * width) for n in order[part.start // width : part.stop // width])


def view_of(tokens: Interval, seq_len: int) -> Interval:
    """What a block's tokens are of a sequence: all of it (some whole sequences), or the part that it holds of one."""
    if tokens.size >= seq_len:
        return Interval(0, seq_len)
    start = tokens.start % seq_len
    return Interval(start, start + tokens.size)


@lru_cache(maxsize=1024)
def attention_pieces(part: Interval, seq_len: int, context: int, window: int | None) -> tuple[Piece, ...]:
    """The pieces in which a block computes causal attention for its part of a sequence; one where that is all of it."""
    return tuple(_pieces(part, seq_len, context, window))


def _pieces(part: Interval, seq_len: int, context: int, window: int | None) -> Iterator[Piece]:
    near = window is not None and window < seq_len
    most = max(window, MIN_ROWS) if near and window is not None else MAX_ROWS
    row = 0
    for positions in slices(part, seq_len, context):
        rows = most if near or context > 1 else positions.size
        for start in range(positions.start, positions.stop, rows):
            stop = min(start + rows, positions.stop)
            first = max(0, start - window + 1) if near and window is not None else 0
            yield Piece(Interval(row, row + stop - start), Interval(first, stop))
            row += stop - start


def mask_shape(pieces: tuple[Piece, ...], window: int | None, capped: bool) -> tuple[int, int] | None:
    """Rows and columns of the one mask whose corners serve all pieces; None when the kernel's causal mask serves them,
    which scores with a cap never use.
    """
    masked = [piece for piece in pieces if capped or not piece.is_causal(window)]
    if not masked:
        return None
    return max(piece.rows.size for piece in masked), max(piece.keys.size for piece in masked)
