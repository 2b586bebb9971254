"""The outer space: stages, ranks per stage, replicas, micro-batch, schedule and optimizer sharding.

One layout, one name.  Blocks of a stage and separate replicas are the same thing when all degrees of a stage are
equal, so the ranks of a stage grow only to the largest degree in use: to the scale-up domain, or beyond it only when
nothing fits inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.topology import Span
from specs.cluster import ClusterSpec, LinkLevel
from specs.layout import block_starts
from specs.plan import Schedule, TrainingSpec
from specs.schedule import most_held, stage_actions

RankOrder = Literal["replica", "stage"]
# Levels that send gradients (2) and gather weights (3) in every micro-batch.
SHARDED: tuple[Literal[2, 3], ...] = (2, 3)
# Where there are several stages and micro-batches; else they are all one.
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "zb-h1")
# Most stages of a pipeline under zb-h1, which holds P micro-batches on every stage, or with gradients sent in every
# micro-batch: in deeper ones the bounds of both stay far below what fits, and searching them takes long.
MOST_STAGES = 8
Positions = npt.NDArray[np.int64]


class Flight(NamedTuple):
    """Micro-batches that a stage holds: their activations, and what waits for its weight gradients alone."""

    kept: int
    deferred: int = 0


@lru_cache(maxsize=4096)
def _split_flights(stage: int, num_stages: int, num_micro_batches: int) -> tuple[Flight, ...]:
    actions = stage_actions("zb-h1", stage=stage, num_stages=num_stages, num_micro_batches=num_micro_batches)
    return tuple(sorted((Flight(held.kept[0], held.deferred[0]) for held in most_held(actions)), reverse=True))


@dataclass(frozen=True)
class Grid:
    """One point of the outer space: P stages of D ranks, R replicas, micro-batches of b sequences.

    `order` says whose ranks are neighbours: the stages of a replica, or the replicas of a stage.  `context`: degree of
    context parallelism.  `num_virtual`: V virtual stages of each stage, more than one under the schedule interleaved.
    """

    num_stages: int
    num_ranks: int
    num_replicas: int
    micro_batch: int
    num_micro_batches: int
    schedule: Schedule
    zero: Literal[0, 1, 2, 3]
    order: RankOrder = "replica"
    context: int = 1
    num_virtual: int = 1

    @property
    def ranks_per_replica(self) -> int:
        return self.num_stages * self.num_ranks

    def stage_positions(self, stage: int) -> Positions:
        """Positions among the usable ranks of a stage, in all replicas: [replica, rank of the stage]."""
        replicas, ranks = np.arange(self.num_replicas)[:, None], np.arange(self.num_ranks)[None, :]
        if self.order == "stage":
            return stage * self.num_replicas * self.num_ranks + replicas * self.num_ranks + ranks
        return replicas * self.ranks_per_replica + stage * self.num_ranks + ranks

    def all_positions(self) -> Positions:
        """Positions of every stage: [stage, replica, rank of the stage]."""
        return np.stack([self.stage_positions(stage) for stage in range(self.num_stages)])

    def flights(self, stage: int) -> tuple[Flight, ...]:
        """What the stage holds at the moments that may be its fullest; first the one that keeps most activations.

        Not of virtual stages, which hold unlike numbers (`planner.interleaved_stage`).
        """
        assert self.num_virtual == 1
        if self.schedule == "zb-h1":  # from P + 1 micro-batches on, more of them only repeat what happens
            return _split_flights(stage, self.num_stages, min(self.num_micro_batches, self.num_stages + 1))
        if self.schedule == "gpipe":
            return (Flight(self.num_micro_batches),)
        return (Flight(min(self.num_micro_batches, self.num_stages - stage)),)

    def late(self, stage: int) -> int:
        """Weight gradients that the stage makes after its last input gradient."""
        return min(stage + 1, self.num_micro_batches) if self.schedule == "zb-h1" else 0


class Topology:
    """Which runs of neighbouring usable ranks lie inside one scale-up domain."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.ranks = np.array(cluster.ranks(), dtype=np.int64)
        self._nodes = np.searchsorted(np.array(cluster.node_starts()), self.ranks, side="right") - 1
        self._levels: dict[int, LinkLevel] = {}
        self._lowest: dict[tuple[int, int, int, tuple[int, ...], int], LinkLevel] = {}

    @property
    def num_ranks(self) -> int:
        return int(self.ranks.size)

    @cached_property
    def domain(self) -> int:
        """Usable ranks of the fullest domain."""
        return int(np.bincount(self._nodes).max()) if self.num_ranks else 0

    def block_level(self, degree: int) -> LinkLevel:
        """Level of the blocks of `degree` neighbours that the usable ranks divide into: scale_up when none of them
        leaves its domain.
        """
        if degree not in self._levels:
            starts = np.arange(0, self.num_ranks - degree + 1, degree)
            inside = bool((self._nodes[starts] == self._nodes[starts + degree - 1]).all())
            self._levels[degree] = "scale_up" if inside else "scale_out"
        return self._levels[degree]

    def level(self, grid: Grid, blocks: tuple[int, ...], size: int) -> LinkLevel:
        """Level of a composition's blocks of a size that no price is below: scale_out where every stage has one that
        leaves its domain, in some replica (the others wait for it), in either order of ranks.
        """
        equal = blocks[0] == blocks[-1]
        if self.block_level(size if equal else grid.num_ranks) == "scale_up":
            return "scale_up"
        key = (grid.num_stages, grid.num_ranks, grid.num_replicas, blocks, size)
        if key not in self._lowest:
            firsts = [start for start, own in zip(block_starts(blocks), blocks, strict=False) if own == size]
            orders: tuple[RankOrder, ...] = ("replica", "stage")
            starts = [replace(grid, order=order).all_positions()[:, :, firsts] for order in orders]
            leaves = (self._nodes[own] != self._nodes[own + size - 1] for own in starts)
            out = all(bool(own.any(axis=(1, 2)).all()) for own in leaves)
            self._lowest[key] = "scale_out" if out else "scale_up"
        return self._lowest[key]

    def span(self, positions: Positions) -> Span:
        """A group of ranks by their positions among the usable ones."""
        nodes = self._nodes[positions]
        together = int((nodes == nodes[0]).sum())
        return Span(len(positions), "scale_up" if together == len(positions) else "scale_out", together)

    def spans(self, groups: Positions) -> set[Span]:
        """What kinds of groups there are, by their positions, [group, member]."""
        nodes = self._nodes[groups]
        size = groups.shape[1]
        together = set((nodes == nodes[:, :1]).sum(axis=1).tolist())
        return {Span(size, "scale_up" if number == size else "scale_out", number) for number in together}


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def enumerate_grids(
    topology: Topology, training: TrainingSpec, *, max_stages: int, max_ranks_per_stage: int, context: int = 1
) -> Iterator[Grid]:
    """Every grid that uses all usable ranks and divides the global batch, from few ranks per stage to many.

    Yields the variant with sharded optimizer and neighbouring stages only; `variants` has the others.  Sharded
    gradients (zero 2) and weights (zero 3) cost something in every micro-batch, so they are points of their own; not
    under gpipe, which is for those who have memory to spare, and like zb-h1 not in pipelines of many stages.
    """
    total = topology.num_ranks
    for num_ranks in divisors(total):
        if num_ranks > max_ranks_per_stage or num_ranks % context:
            continue
        for num_stages in divisors(total // num_ranks):
            num_replicas = total // num_ranks // num_stages
            if num_stages > max_stages or training.global_batch % num_replicas:
                continue
            share = training.global_batch // num_replicas
            shardings: tuple[Literal[1, 2, 3], ...] = (1, *SHARDED) if num_ranks * num_replicas > 1 else (1,)
            for micro_batch in divisors(share):
                m = share // micro_batch
                if micro_batch * training.seq_len < num_ranks:
                    continue  # every rank has tokens
                for schedule in SCHEDULES if num_stages > 1 and m > 1 else SCHEDULES[:1]:
                    deep = num_stages > MOST_STAGES
                    if deep and schedule == "zb-h1":
                        continue
                    for zero in shardings[:1] if deep or schedule == "gpipe" else shardings:
                        yield Grid(num_stages, num_ranks, num_replicas, micro_batch, m, schedule, zero, context=context)


def variants(grid: Grid) -> list[Grid]:
    """A grid with and without sharded optimizer, and in both orders of ranks, where that makes a difference."""
    shardings: tuple[Literal[0, 1, 2, 3], ...] = (1, 0) if grid.num_ranks * grid.num_replicas > 1 else (0,)
    if grid.zero in SHARDED:
        shardings = (grid.zero,)
    orders: tuple[RankOrder, ...] = (
        ("replica", "stage") if grid.num_stages > 1 and grid.num_replicas > 1 else ("replica",)
    )
    return [replace(grid, zero=zero, order=order) for zero in shardings for order in orders]
