"""Operations of a module's forward pass as torch counts them, on the meta device: no memory, no time."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from executor.clock import Clock
from executor.collectives import Block
from executor.layout import ModuleLayout
from executor.stage import build_module
from specs.layout import Interval
from specs.model import Embedding, Head


class _MetaBlock(Block):
    """A block whose collectives only have shapes."""

    def all_gather(self, chunk: torch.Tensor) -> torch.Tensor:
        return chunk.new_empty((self.num_tokens, *chunk.shape[1:]))

    def reduce_scatter(self, partial: torch.Tensor) -> torch.Tensor:
        return partial.new_empty((self.token_counts[self.position], *partial.shape[1:]))

    def all_to_all(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:  # noqa: ARG002
        return rows.new_empty((sum(received), *rows.shape[1:]))

    def all_reduce(self, value: torch.Tensor, op: object = None) -> torch.Tensor:  # noqa: ARG002
        return value


def counted_flop(layout: ModuleLayout, *, seq_len: int) -> float:
    """Forward operations of one rank's part; attention counted over all pairs, masked ones too."""
    meta = torch.device("meta")
    block = _MetaBlock(None, layout.position, layout.token_counts, Clock(torch.device("cpu")))
    own = layout.token_counts[layout.position]
    chunk = Interval(0, own)
    module = build_module(layout, block, chunk=chunk, seq_len=seq_len, dtype=torch.bfloat16, device=meta)
    x = torch.empty((own, layout.module.hidden), dtype=torch.bfloat16, device=meta)
    ids = torch.empty(layout.block_tokens.stop, dtype=torch.int64, device=meta)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        if isinstance(layout.module, Embedding):
            module(ids)
        elif isinstance(layout.module, Head):
            module(x, ids, 1.0)
        else:
            module(x)
    return float(counter.get_total_flops())
