"""The blocks that a stage's ranks may form: one composition for every degree.

A degree is the size of the largest block.  Where it divides the stage, all blocks are equal.  Else they are as few and
as even as can be, the larger ones first: of 7 ranks, 4 is 4 + 3, 3 is 3 + 2 + 2 and 2 is 2 + 2 + 2 + 1.  More blocks
with the same largest one would take as long, with more copies of the weights.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from planner.space import Grid, Topology
from specs.cluster import LinkLevel
from specs.layout import balanced_cuts, block_starts
from specs.model import Attention, Module

Blocks = tuple[int, ...]


class Part(NamedTuple):
    """Blocks of one size: the most tokens that one of them gathers, and where its ranks lie."""

    size: int
    tokens: int
    level: LinkLevel


@lru_cache(maxsize=1024)
def stage_degrees(num_ranks: int) -> tuple[int, ...]:
    """Degrees on so many ranks, ascending; of a power of two its divisors."""
    if num_ranks & (num_ranks - 1) == 0:
        return tuple(1 << power for power in range(num_ranks.bit_length()))
    return tuple(sorted({-(-num_ranks // number) for number in range(1, num_ranks + 1)}))


@lru_cache(maxsize=4096)
def blocks_of(degree: int, num_ranks: int) -> Blocks:
    """The composition of a degree."""
    number = -(-num_ranks // degree)
    small, more = divmod(num_ranks, number)
    return (small + 1,) * more + (small,) * (number - more)


def parts_of(blocks: Blocks, grid: Grid, seq_len: int, topology: Topology) -> tuple[Part, ...]:
    """A composition's kinds of blocks at a grid point, whose tokens are cut evenly by rank; the last block's last."""
    tokens, size = grid.micro_batch * seq_len, blocks[-1]
    if size == blocks[0]:
        most = -(-tokens * size // grid.num_ranks)
        return (Part(size, most, topology.level(grid, blocks, size)),)
    cuts, found = balanced_cuts(tokens, grid.num_ranks), dict[int, int]()
    for start, own in zip(block_starts(blocks), blocks, strict=False):
        found[own] = max(found.get(own, 0), cuts[start + own] - cuts[start])
    return tuple(Part(own, most, topology.level(grid, blocks, own)) for own, most in found.items())


def holds_sequences(module: Module, blocks: Blocks, grid: Grid) -> bool:
    """Whether every block holds whole sequences, or equal whole parts of one as the grid point lets them."""
    equal = blocks[0] == blocks[-1]
    borders = blocks[:1] if equal else block_starts(blocks)
    if all(grid.micro_batch * border % grid.num_ranks == 0 for border in borders):
        return True
    sharing, rest = divmod(grid.num_ranks, grid.micro_batch * blocks[0])
    return isinstance(module, Attention) and equal and rest == 0 and grid.context % sharing == 0


def describe_blocks(blocks: Blocks) -> str:
    """`4` for equal blocks, else all of them: `4+3`, `3x2+1`."""
    sizes = {size: blocks.count(size) for size in blocks}
    if len(sizes) == 1:
        return str(blocks[0])
    return "+".join(str(size) if number == 1 else f"{number}x{size}" for size, number in sizes.items())
