"""The part of a module that one rank works on."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.flops import largest_units
from specs.layout import Interval
from specs.model import Module


@dataclass(frozen=True, slots=True)
class Share:
    """A rank in a block of `degree` ranks: its own chunk of tokens, the block's gathered tokens, its own units, and the
    length of the sequences.

    `context`: the pipeline's degree of context parallelism; `first_token`: where in a sequence the block's part begins.
    """

    degree: int
    chunk_tokens: int
    block_tokens: int
    units: Interval
    seq_len: int
    context: int = 1
    first_token: int = 0

    @staticmethod
    def of(module: Module, degree: int, block_tokens: int, seq_len: int, units: Interval | None = None) -> Share:
        """Share in an evenly cut block; `units` None: the largest, the one that others wait for.

        Of blocks that share a sequence the last, whose slices have no keys out of a window's reach.
        """
        own = largest_units(module, degree) if units is None else units
        first, context = max(0, seq_len - block_tokens), max(1, seq_len // block_tokens)
        return Share(degree, -(-block_tokens // degree), block_tokens, own, seq_len, context, first)
