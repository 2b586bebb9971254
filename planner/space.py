"""The outer space: stages, ranks per stage, replicas, micro-batch, schedule and optimizer sharding.

One layout, one name.  Blocks of a stage and separate replicas are the same thing when all degrees of a stage are
equal, so the ranks of a stage grow only to the largest degree in use: to the scale-up domain, or beyond it only when
nothing fits inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from specs.cluster import ClusterSpec, LinkLevel
from specs.plan import Schedule, TrainingSpec


@dataclass(frozen=True)
class Grid:
    """One point of the outer space: P stages of D ranks, R replicas, micro-batches of b sequences."""

    num_stages: int
    num_ranks: int
    num_replicas: int
    micro_batch: int
    num_micro_batches: int
    schedule: Schedule
    zero: Literal[0, 1]

    @property
    def ranks_per_replica(self) -> int:
        return self.num_stages * self.num_ranks

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations the stage holds at its peak."""
        if self.schedule == "gpipe":
            return self.num_micro_batches
        return min(self.num_micro_batches, self.num_stages - stage)


class Topology:
    """Which runs of neighbouring usable ranks lie inside one scale-up domain."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.ranks = np.array(cluster.ranks(), dtype=np.int64)
        self._nodes = np.searchsorted(np.array(cluster.node_starts()), self.ranks, side="right") - 1
        self._levels: dict[tuple[int, int], LinkLevel] = {}

    @property
    def num_ranks(self) -> int:
        return int(self.ranks.size)

    @cached_property
    def domain(self) -> int:
        """Usable ranks of the fullest domain."""
        return int(np.bincount(self._nodes).max()) if self.num_ranks else 0

    def run_level(self, size: int, stride: int) -> LinkLevel:
        """Level of all the runs [k stride, k stride + size): scale_up when none of them leaves its domain."""
        key = (size, stride)
        if key not in self._levels:
            starts = np.arange(0, self.num_ranks - size + 1, stride)
            inside = bool((self._nodes[starts] == self._nodes[starts + size - 1]).all())
            self._levels[key] = "scale_up" if inside else "scale_out"
        return self._levels[key]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def enumerate_grids(
    topology: Topology, training: TrainingSpec, *, max_stages: int, max_ranks_per_stage: int
) -> Iterator[Grid]:
    """Every grid that uses all usable ranks and divides the global batch, from few ranks per stage to many."""
    total = topology.num_ranks
    for num_ranks in divisors(total):
        if num_ranks > max_ranks_per_stage:
            continue
        for num_stages in divisors(total // num_ranks):
            num_replicas = total // num_ranks // num_stages
            if num_stages > max_stages or training.global_batch % num_replicas:
                continue
            share = training.global_batch // num_replicas
            for micro_batch in divisors(share):
                yield from _variants(num_stages, num_ranks, num_replicas, micro_batch, share // micro_batch)


def _variants(
    num_stages: int, num_ranks: int, num_replicas: int, micro_batch: int, num_micro_batches: int
) -> Iterator[Grid]:
    schedules: tuple[Schedule, ...] = ("1f1b",)
    shardings: tuple[Literal[0, 1], ...] = (0, 1) if num_ranks * num_replicas > 1 else (0,)
    for schedule in schedules:
        for zero in shardings:
            yield Grid(num_stages, num_ranks, num_replicas, micro_batch, num_micro_batches, schedule, zero)
