"""Process groups of a plan.  Every process makes every group, in one sorted order, as `new_group` demands."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from executor.clock import Clock
from executor.collectives import Block
from executor.layout import Layout, ModuleLayout

Ranks = tuple[int, ...]


class Groups:
    """Groups by member ranks.  Neighbouring stages have one group per direction, so that sends cannot cross."""

    def __init__(self, layout: Layout, owner_sets: Iterable[Ranks], device: torch.device) -> None:
        collective = {ranks for ranks in (*layout.all_blocks(), *owner_sets) if len(ranks) > 1}
        self._collective: dict[Ranks, dist.ProcessGroup] = {}
        everyone = tuple(range(dist.get_world_size()))
        for ranks in sorted(collective):
            group = dist.group.WORLD if ranks == everyone else dist.new_group(list(ranks))
            if layout.process in ranks:
                self._collective[ranks] = group
        self._boundary: dict[tuple[Ranks, str], dist.ProcessGroup] = {}
        for ranks in sorted(set(layout.all_boundaries())):
            for direction in ("F", "B"):
                group = dist.new_group(list(ranks))
                if layout.process in ranks:
                    self._boundary[ranks, direction] = group
        # NCCL builds a group's communicator at its first collective; a first send would wait for it for ever.
        if device.type == "cuda":
            for group in (*self._collective.values(), *self._boundary.values()):
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def of(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """The group for collectives among these ranks; None for a single rank."""
        return self._collective[ranks] if len(ranks) > 1 else None

    def boundary(self, ranks: Iterable[int], direction: str) -> dist.ProcessGroup:
        """The group for sends in one direction between two neighbouring stages."""
        return self._boundary[tuple(sorted(ranks)), direction]

    def block(self, module: ModuleLayout, clock: Clock) -> Block:
        """The block of a module on this rank."""
        return Block(self.of(module.block_ranks), module.position, module.token_counts, clock)
