"""Collectives over a block of ranks whose chunks may have unlike lengths.

gloo has no uneven all-gather and a slow reduce-scatter, so there both are one all-to-all (and a local sum);
NCCL uses its own.  Tensors are cut along dimension 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from executor.clock import Clock


@dataclass(frozen=True)
class Block:
    """The ranks that together hold one copy of a module, seen from one of them.

    `token_counts` are the lengths of the members' chunks.  A block of one rank has no group.
    """

    group: dist.ProcessGroup | None
    position: int
    token_counts: tuple[int, ...]
    clock: Clock

    @property
    def size(self) -> int:
        return len(self.token_counts)

    @property
    def num_tokens(self) -> int:
        return sum(self.token_counts)

    def all_gather(self, chunk: torch.Tensor) -> torch.Tensor:
        """[own tokens, ...] -> [block's tokens, ...]."""
        if self.size == 1:
            return chunk
        with self.clock.term("tp_communication"):
            return all_gather(chunk.contiguous(), self.token_counts, self.group)

    def reduce_scatter(self, partial: torch.Tensor) -> torch.Tensor:
        """[block's tokens, ...], a summand from every member -> [own tokens, ...], the sum."""
        if self.size == 1:
            return partial
        with self.clock.term("tp_communication"):
            return reduce_scatter(partial.contiguous(), self.token_counts, self.position, self.group)

    def all_reduce(self, value: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce in place over the members."""
        if self.size > 1:
            with self.clock.term("tp_communication"):
                dist.all_reduce(value, op=op, group=self.group)
        return value


def _uses_gloo(group: dist.ProcessGroup | None) -> bool:
    return dist.get_backend(group) == "gloo"


def all_gather(chunk: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Concatenate everybody's chunk; `counts` are their lengths along dimension 0."""
    whole = chunk.new_empty((sum(counts), *chunk.shape[1:]))
    if _uses_gloo(group):
        copies = chunk.repeat(len(counts), *(1 for _ in chunk.shape[1:]))
        dist.all_to_all_single(whole, copies, list(counts), [chunk.shape[0]] * len(counts), group=group)
    elif len(set(counts)) == 1:
        dist.all_gather_into_tensor(whole, chunk, group=group)
    else:
        dist.all_gather(list(whole.split(list(counts))), chunk, group=group)
    return whole


def reduce_scatter(
    partial: torch.Tensor, counts: Sequence[int], position: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Sum everybody's `partial` and keep the rows of `position`."""
    own = counts[position]
    if _uses_gloo(group):
        parts = partial.new_empty((len(counts) * own, *partial.shape[1:]))
        dist.all_to_all_single(parts, partial, [own] * len(counts), list(counts), group=group)
        return parts.view(len(counts), own, *partial.shape[1:]).sum(dim=0)
    result = partial.new_empty((own, *partial.shape[1:]))
    if len(set(counts)) == 1:
        dist.reduce_scatter_tensor(result, partial, group=group)
    else:
        dist.reduce_scatter(result, list(partial.split(list(counts))), group=group)
    return result
