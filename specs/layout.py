"""Integer layout arithmetic: cuts, intervals, blocks.  Pure functions on small tuples.

A *cut* of a dimension of size n over p parts is the tuple of its p + 1 ascending cut points, from 0 to n.
A *composition* of a stage's D ranks is a tuple of block sizes that add up to D; a block is a run of
neighbouring ranks that together hold one full copy of a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

Cuts = tuple[int, ...]


class Interval(NamedTuple):
    """Half-open range of integers."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def overlap(self, other: Interval) -> Interval:
        """The common part; of size <= 0 when there is none."""
        return Interval(max(self.start, other.start), min(self.stop, other.stop))

    def shifted(self, offset: int) -> Interval:
        return Interval(self.start + offset, self.stop + offset)


@lru_cache(maxsize=65536)
def balanced_cuts(size: int, parts: int) -> Cuts:
    """Cut points of the most even integer division: part i is [i*size//parts, (i+1)*size//parts)."""
    return tuple(i * size // parts for i in range(parts + 1))


def interval_of(cuts: Sequence[int], part: int) -> Interval:
    """The `part`-th interval of a cut."""
    return Interval(cuts[part], cuts[part + 1])


def check_cuts(cuts: Sequence[int], size: int, parts: int, what: str) -> None:
    """Raise `ValueError` unless `cuts` divides [0, size) into `parts` intervals, none of them empty."""
    if len(cuts) != parts + 1 or cuts[0] != 0 or cuts[-1] != size:
        raise ValueError(f"{what}: cuts {list(cuts)} must be {parts + 1} points from 0 to {size}")
    for part, (start, stop) in enumerate(pairwise(cuts)):
        if stop <= start:
            raise ValueError(
                f"{what}: rank {part} of the block of {parts} would hold nothing ({size} units over {parts} ranks, "
                f"cuts {list(cuts)}). Use a degree of at most {size}"
            )


def block_starts(blocks: Sequence[int]) -> tuple[int, ...]:
    """First rank of each block, plus the total: (4, 3) -> (0, 4, 7)."""
    return (0, *accumulate(blocks))


def block_of(blocks: Sequence[int], rank: int) -> tuple[int, int]:
    """(index of the block that holds `rank`, position inside it)."""
    start = 0
    for index, size in enumerate(blocks):
        if rank < start + size:
            return index, rank - start
        start += size
    raise ValueError(f"rank {rank} is outside the blocks {list(blocks)}")


def kv_groups_of(heads: Interval, num_heads: int, num_kv_heads: int) -> Interval:
    """KV heads that the query heads of an interval read.  A group shared by two ranks is held by both."""
    per_group = num_heads // num_kv_heads
    return Interval(heads.start // per_group, -(-heads.stop // per_group))


def sequence_token_cuts(blocks: Sequence[int], num_sequences: int, seq_len: int) -> Cuts | None:
    """Token cuts of a stage such that each block of `blocks` holds whole sequences, as evenly as possible.

    Sequences go to blocks in proportion to their sizes (largest remainder), tokens inside a block evenly.
    None when some block would get no sequence.
    """
    num_ranks = sum(blocks)
    shares = [num_sequences * size // num_ranks for size in blocks]
    by_remainder = sorted(range(len(blocks)), key=lambda i: (-(num_sequences * blocks[i] % num_ranks), i))
    for index in by_remainder[: num_sequences - sum(shares)]:
        shares[index] += 1
    if min(shares) < 1:
        return None
    cuts = [0]
    for size, share in zip(blocks, shares, strict=True):
        start = cuts[-1]
        cuts.extend(start + cut for cut in balanced_cuts(share * seq_len, size)[1:])
    return tuple(cuts)


def sharing_blocks(blocks: Sequence[int], cuts: Cuts, seq_len: int) -> tuple[tuple[int, ...], ...]:
    """Blocks that hold parts of the same sequence, together."""
    groups: dict[int, list[int]] = {}
    for block, first in enumerate(block_starts(blocks)[:-1]):
        groups.setdefault(cuts[first] // seq_len, []).append(block)
    return tuple(map(tuple, groups.values()))


def refine(intervals: Iterable[Interval]) -> list[Interval]:
    """Atomic intervals: the coarsest division in which every given interval is a union of parts.

    Only parts covered by at least one given interval are returned.
    """
    given = list(intervals)
    points = sorted({point for interval in given for point in interval})
    atoms = (Interval(a, b) for a, b in pairwise(points))
    return [atom for atom in atoms if any(i.start <= atom.start and atom.stop <= i.stop for i in given)]
