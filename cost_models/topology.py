"""Where a plan's groups lie on the cluster, with equal replicas counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.buckets import Member
from specs.cluster import LinkLevel
from specs.plan import Plan


class Span(NamedTuple):
    """A group of ranks: its size, its level, and how many members share one scale-up domain."""

    num_ranks: int
    level: LinkLevel
    ranks_per_domain: int


@dataclass(frozen=True, slots=True)
class ReplicaClass:
    """Replicas that run alike: `count` of them, one's ranks, and the speed of each (1.0 nominal)."""

    pipeline: int
    sequences: int
    count: int
    ranks: tuple[int, ...]
    speeds: tuple[float, ...] | None


def span_of(nodes: Sequence[int]) -> Span:
    """A group whose members lie on these nodes."""
    together = sum(node == nodes[0] for node in nodes)
    return Span(len(nodes), "scale_up" if together == len(nodes) else "scale_out", together)


class Topology:
    """Placement of a plan's ranks on nodes."""

    def __init__(self, plan: Plan) -> None:
        sizes = np.diff(plan.cluster.node_starts())
        nodes = np.repeat(np.arange(sizes.size), sizes)
        self._node: list[int] = nodes.tolist()
        self._stage_starts = [pipeline.stage_starts() for pipeline in plan.pipelines]
        # Nodes of every pipeline's replicas: [replica, position].
        self._nodes: dict[int, npt.NDArray[np.int64]] = {
            number: nodes[[replica.ranks for replica in plan.replicas if replica.pipeline == number]]
            for number in {replica.pipeline for replica in plan.replicas}
        }
        self.classes = self._classes(plan)

    def _classes(self, plan: Plan) -> tuple[ReplicaClass, ...]:
        slow = plan.cluster.slow
        borders = {number: iter(nodes[:, 1:] != nodes[:, :-1]) for number, nodes in self._nodes.items()}
        found: dict[tuple[object, ...], ReplicaClass] = {}
        for replica in plan.replicas:
            speeds = None
            if slow and any(rank in slow for rank in replica.ranks):
                speeds = tuple(slow.get(rank, 1.0) for rank in replica.ranks)
            key = (replica.pipeline, replica.sequences, next(borders[replica.pipeline]).tobytes(), speeds)
            known = found.get(key)
            found[key] = ReplicaClass(
                replica.pipeline,
                replica.sequences,
                known.count + 1 if known else 1,
                known.ranks if known else replica.ranks,
                speeds,
            )
        return tuple(found.values())

    def span(self, ranks: Sequence[int]) -> Span:
        """A group of cluster ranks."""
        return span_of([self._node[rank] for rank in ranks])

    def groups(self, every: Sequence[Sequence[Member]]) -> list[Span]:
        """Each group's members, their ranks in all replicas of their pipelines."""
        if not every:
            return []
        owner = np.repeat(np.arange(len(every)), [len(members) for members in every])
        pipelines, stages, ranks = np.array([member for members in every for member in members]).T
        first = np.array([self._nodes[p][0, self._stage_starts[p][s] + r] for p, s, r in (m[0] for m in every)])
        sizes, together = np.zeros(len(every), dtype=np.int64), np.zeros(len(every), dtype=np.int64)
        for number, nodes in self._nodes.items():
            own = np.flatnonzero(pipelines == number)
            columns = np.array(self._stage_starts[number])[stages[own]] + ranks[own]
            np.add.at(together, owner[own], np.count_nonzero(nodes[:, columns] == first[owner[own]], axis=0))
            np.add.at(sizes, owner[own], len(nodes))
        return [
            Span(size, "scale_up" if near == size else "scale_out", near)
            for size, near in zip(sizes.tolist(), together.tolist(), strict=True)
        ]

    def pattern(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Nodes of cluster ranks relative to the first one's: groups of equal patterns have equal spans."""
        first = self._node[ranks[0]]
        return tuple(self._node[rank] - first for rank in ranks)

    def stage_ranks(self, replica: ReplicaClass, stage: int) -> tuple[int, ...]:
        """Cluster ranks of a stage of a class's example, in chunk order."""
        starts = self._stage_starts[replica.pipeline]
        return replica.ranks[starts[stage] : starts[stage + 1]]
