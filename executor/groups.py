"""Process groups of a plan.  Every process makes every group, in one sorted order, as `new_group` demands."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from executor.clock import Clock
from executor.collectives import Block
from executor.layout import Channel, Layout, ModuleLayout
from executor.weight_work import WeightWork

Ranks = tuple[int, ...]


class Groups:
    """Groups by member ranks.  Every channel between two stages has one of its own, so that sends cannot cross."""

    def __init__(self, layout: Layout, owner_sets: Iterable[Ranks], device: torch.device) -> None:
        collective = {ranks for ranks in (*layout.all_blocks(), *owner_sets) if len(ranks) > 1}
        self._collective: dict[Ranks, dist.ProcessGroup] = {}
        everyone = tuple(range(dist.get_world_size()))
        for ranks in sorted(collective):
            group = dist.group.WORLD if ranks == everyone else dist.new_group(list(ranks))
            if layout.process in ranks:
                self._collective[ranks] = group
        self._channels: dict[Channel, dist.ProcessGroup] = {}
        for channel in sorted(set(layout.all_channels())):
            group = dist.new_group(sorted({*channel.source, *channel.target}))
            if layout.process in channel.source + channel.target:
                self._channels[channel] = group
        # NCCL builds a group's communicator at its first collective; a first send would wait for it for ever.
        if device.type == "cuda":
            for group in (*self._collective.values(), *self._channels.values()):
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def of(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """The group for collectives among these ranks; None for a single rank."""
        return self._collective[ranks] if len(ranks) > 1 else None

    def channel(self, channel: Channel) -> dist.ProcessGroup:
        """The group for sends from one stage to another."""
        return self._channels[channel]

    def block(self, module: ModuleLayout, clock: Clock, weight_work: WeightWork) -> Block:
        """The block of a module on this rank."""
        group = self.of(module.block_ranks)
        return Block(group, module.position, module.token_counts, clock, weight_work)

    def context(self, module: ModuleLayout, clock: Clock) -> Block:
        """The ranks that hold the other parts of this rank's sequence with the same heads; alone where it is whole."""
        return Block(self.of(module.context_ranks), module.context_position, module.context_counts, clock)
