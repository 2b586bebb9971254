"""Where a plan's groups lie on the cluster, with equal replicas counted once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

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


class Topology:
    """Placement of a plan's ranks on nodes."""

    def __init__(self, plan: Plan) -> None:
        starts = plan.cluster.node_starts()
        self._node: list[int] = []
        for node, (start, stop) in enumerate(pairwise(starts)):
            self._node += [node] * (stop - start)
        self._stage_starts = [pipeline.stage_starts() for pipeline in plan.pipelines]
        self._ranks: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for replica in plan.replicas:
            self._ranks[replica.pipeline].append(replica.ranks)
        self.classes = self._classes(plan)

    def _classes(self, plan: Plan) -> tuple[ReplicaClass, ...]:
        slow = plan.cluster.slow
        found: dict[tuple[object, ...], ReplicaClass] = {}
        for replica in plan.replicas:
            nodes = [self._node[rank] for rank in replica.ranks]
            borders = bytes(left != right for left, right in pairwise(nodes))
            speeds = None
            if slow and any(rank in slow for rank in replica.ranks):
                speeds = tuple(slow.get(rank, 1.0) for rank in replica.ranks)
            key = (replica.pipeline, replica.sequences, borders, speeds)
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
        node = self._node
        first = node[ranks[0]]
        together = sum(node[rank] == first for rank in ranks)
        return Span(len(ranks), "scale_up" if together == len(ranks) else "scale_out", together)

    def group(self, members: Iterable[Member]) -> Span:
        """The members' ranks in all replicas of their pipelines."""
        ranks = []
        for pipeline, stage, rank in members:
            position = self._stage_starts[pipeline][stage] + rank
            ranks += [replica[position] for replica in self._ranks[pipeline]]
        return self.span(ranks)

    def stage_ranks(self, replica: ReplicaClass, stage: int) -> tuple[int, ...]:
        """Cluster ranks of a stage of a class's example, in chunk order."""
        starts = self._stage_starts[replica.pipeline]
        return replica.ranks[starts[stage] : starts[stage + 1]]
