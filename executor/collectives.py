"""Collectives over a block of ranks whose chunks may have unlike lengths.

gloo has no uneven all-gather and a slow reduce-scatter, so there both are one all-to-all (and a local sum);
NCCL uses its own.  Tensors are cut along dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from executor.clock import Clock
from executor.waiting import wait
from executor.weight_work import WeightWork

# Their names from torch 2.13 on, where the old ones warn.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Waits for a collective that has begun and returns its result.
Finish = Callable[..., torch.Tensor]  # of a sum: given a tensor, it writes there


@dataclass(frozen=True)
class Block:
    """The ranks that together hold one copy of a module, seen from one of them.

    `token_counts` are the lengths of the members' chunks.  A block of one rank has no group.  `weight_work` is shared
    by all blocks of a pipeline that splits its backward passes.
    """

    group: dist.ProcessGroup | None
    position: int
    token_counts: tuple[int, ...]
    clock: Clock
    weight_work: WeightWork = field(default_factory=WeightWork)

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

    def all_to_all(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Rows for each member, one after the other -> rows from each member."""
        if self.size == 1:
            return rows
        with self.clock.term("tp_communication"):
            result = rows.new_empty((sum(received), *rows.shape[1:]))
            wait(dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.group, async_op=True))
            return result

    def exchange_counts(self, sent: list[int], device: torch.device) -> list[int]:
        """How many rows each member gets from this one -> how many this one gets from each.  Waits for the device."""
        return self.all_to_all(torch.tensor(sent, device=device), [1] * self.size, [1] * self.size).tolist()

    def all_reduce(self, value: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce in place over the members."""
        if self.size > 1:
            with self.clock.term("tp_communication"):
                wait(dist.all_reduce(value, op=op, group=self.group, async_op=True))
        return value


def _uses_gloo(group: dist.ProcessGroup | None) -> bool:
    return dist.get_backend(group) == "gloo"


def start_all_gather(
    chunk: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup | None, whole: torch.Tensor
) -> Finish:
    """Begin to fill `whole` with everybody's chunk; `counts` are their lengths along dimension 0."""
    if _uses_gloo(group):
        copies = chunk.repeat(len(counts), *(1 for _ in chunk.shape[1:]))
        sizes = [chunk.shape[0]] * len(counts)
        work = dist.all_to_all_single(whole, copies, list(counts), sizes, group=group, async_op=True)
    elif len(set(counts)) == 1:
        work = _all_gather_single(whole, chunk, group=group, async_op=True)
    else:
        work = dist.all_gather(list(whole.split(list(counts))), chunk, group=group, async_op=True)

    def finish() -> torch.Tensor:
        wait(work)
        return whole

    return finish


def all_gather(chunk: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Concatenate everybody's chunk."""
    return start_all_gather(chunk, counts, group, chunk.new_empty((sum(counts), *chunk.shape[1:])))()


def start_reduce_scatter(
    partial: torch.Tensor, counts: Sequence[int], position: int, group: dist.ProcessGroup | None
) -> Finish:
    """Begin to sum everybody's `partial`, which must not change until the end; the rows of `position` are kept.

    The sum is written to the tensor that the end is given, if any.
    """
    own = counts[position]
    if _uses_gloo(group):
        parts = partial.new_empty((len(counts) * own, *partial.shape[1:]))
        sizes = [own] * len(counts)
        work = dist.all_to_all_single(parts, partial, sizes, list(counts), group=group, async_op=True)
    else:
        parts = partial.new_empty((own, *partial.shape[1:]))
        if len(set(counts)) == 1:
            work = _reduce_scatter_single(parts, partial, group=group, async_op=True)
        else:
            work = dist.reduce_scatter(parts, list(partial.split(list(counts))), group=group, async_op=True)

    def finish(out: torch.Tensor | None = None) -> torch.Tensor:
        wait(work)
        summands = parts.view(-1, own, *parts.shape[1:])
        if out is not None:
            return torch.sum(summands, dim=0, out=out)
        return summands.sum(dim=0) if len(summands) > 1 else summands[0]

    return finish


def reduce_scatter(
    partial: torch.Tensor, counts: Sequence[int], position: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Sum everybody's `partial` and keep the rows of `position`."""
    return start_reduce_scatter(partial, counts, position, group)()
