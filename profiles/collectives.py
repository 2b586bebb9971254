"""Collective times by operation, group size, link level and payload; all groups of a size run at the same time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from executor.collectives import all_gather, reduce_scatter
from profiles.statistics import gathered_timing, undisturbed
from specs.cluster import CollectiveOp, LinkLevel
from specs.profile import CollectiveTiming

OPS: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point")
SMALLEST_PAYLOAD_BYTES = 4096
NUM_REPETITIONS = 8  # at most; a slow link's large payloads are repeated less, since they vary less
NUM_WARM_UP = 2
SECONDS_PER_PAYLOAD = 0.4  # of an operation in one round, beyond which it is not repeated


def group_layouts(world_size: int, local_size: int) -> list[tuple[int, LinkLevel, list[list[int]]]]:
    """(group size, level, disjoint groups that cover most ranks) for every size worth knowing.

    Inside a node: neighbours, by every divisor of the node's ranks.  Across nodes: one rank of each of k nodes, for
    every divisor k of the number of nodes, and all ranks.
    """
    layouts: list[tuple[int, LinkLevel, list[list[int]]]] = []
    for size in range(2, local_size + 1):
        if local_size % size == 0:
            groups = [list(range(start, start + size)) for start in range(0, world_size, size)]
            layouts.append((size, "scale_up", groups))
    num_nodes = world_size // local_size
    for size in range(2, num_nodes + 1):
        if num_nodes % size == 0:
            groups = [
                [(node + i) * local_size + slot for i in range(size)]
                for node in range(0, num_nodes, size)
                for slot in range(local_size)
            ]
            layouts.append((size, "scale_out", groups))
    if num_nodes > 1 and local_size > 1:
        layouts.append((world_size, "scale_out", [list(range(world_size))]))
    return layouts


def payloads(largest_bytes: int) -> list[int]:
    """Powers of four from the smallest payload to the largest."""
    sizes = [SMALLEST_PAYLOAD_BYTES]
    while sizes[-1] * 4 <= largest_bytes:
        sizes.append(sizes[-1] * 4)
    return sizes


@dataclass
class CollectiveTimings:
    """Measures every operation on every group layout."""

    device: torch.device
    local_size: int
    largest_payload_bytes: int
    _samples: defaultdict[tuple[CollectiveOp, int, LinkLevel, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def __post_init__(self) -> None:
        self._groups = []
        for size, level, groups in group_layouts(dist.get_world_size(), self.local_size):
            made = [dist.new_group(ranks) for ranks in groups]
            index = next(i for i, ranks in enumerate(groups) if dist.get_rank() in ranks)
            self._groups.append((size, level, groups[index], made[index]))

    @property
    def num_units(self) -> int:
        """Times that `run` yields."""
        return len(self._groups) * len(OPS) * len(payloads(self.largest_payload_bytes))

    def run(self) -> Iterator[None]:
        """One round over everything, yielding after every operation and payload."""
        for size, level, ranks, group in self._groups:
            for op in OPS:
                for payload in payloads(self.largest_payload_bytes):
                    call = self._call(op, ranks, group, payload)
                    for _ in range(self._repetitions(call, group)):
                        self._samples[op, size, level, payload].append(self._timed(call, group))
                    yield

    def _repetitions(self, call: Callable[[], object], group: dist.ProcessGroup) -> int:
        """Warm-up calls; how often to repeat, the same on all ranks."""
        slowest = torch.tensor(self._timed(call, group), dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        fitting = int(SECONDS_PER_PAYLOAD / max(float(slowest), 1e-9))
        for _ in range(min(NUM_WARM_UP - 1, fitting)):
            call()
        return max(1, min(NUM_REPETITIONS, fitting))

    def _timed(self, call: Callable[[], object], group: dist.ProcessGroup) -> float:
        dist.barrier(group=group)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def _call(self, op: CollectiveOp, ranks: list[int], group: dist.ProcessGroup, payload: int) -> Callable[[], object]:
        size, position = len(ranks), ranks.index(dist.get_rank())
        part = max(1, payload // 4 // size)
        whole = torch.zeros(part * size, device=self.device)
        own = whole[:part].clone()
        counts = [part] * size
        if op == "all_gather":
            return lambda: all_gather(own, counts, group)
        if op == "reduce_scatter":
            return lambda: reduce_scatter(whole, counts, position, group)
        if op == "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        if op == "all_to_all":
            out = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(out, whole, group=group)
        return lambda: _pass_on(whole, ranks, position, group)

    def timings(self) -> tuple[CollectiveTiming, ...]:
        """Over all ranks; a collective."""
        return tuple(
            CollectiveTiming(
                op=op,
                num_ranks=size,
                level=level,
                payload_bytes=payload,
                timing=gathered_timing([samples[repetition] for repetition in undisturbed(samples)]),
            )
            for (op, size, level, payload), samples in self._samples.items()
        )


def _pass_on(tensor: torch.Tensor, ranks: list[int], position: int, group: dist.ProcessGroup) -> None:
    """Even members send to the next one: the traffic of a pipeline boundary, every link in one direction."""
    if position % 2 == 0 and position + 1 < len(ranks):
        dist.send(tensor, ranks[position + 1], group=group)
    elif position % 2 == 1:
        dist.recv(tensor, ranks[position - 1], group=group)
