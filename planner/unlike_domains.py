"""Clusters whose nodes have unlike numbers of usable ranks, seen as whole ones that have lost some.

Equal stages and replicas need equal nodes.  So a layout is made for the nodes as if each had as many ranks as the
largest has room for, and then loses those that are not there, as it would in a run (`planner.contingency`): stages and
replicas of fewer ranks, blocks such as 4 + 3, other shares of the batch, or ranks left idle.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from cost_models.interface import CostModel
from cost_models.step import price
from planner.contingency import Replanner
from planner.problem import Problem
from planner.shares import Worker, deal, finish_seconds
from planner.space import Grid
from specs.cluster import ClusterSpec, NodeGroup
from specs.contingency import plan_after
from specs.errors import BadInputError, NoPlanFitsError, TimeLimitError
from specs.plan import Plan, Prediction

_ABSENT = -1


@dataclass(frozen=True)
class Whole:
    """`cluster` of equal nodes, the fullest first; `names[i]` is what its rank i is in the real one (-1: absent)."""

    cluster: ClusterSpec
    names: tuple[int, ...]

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks that the real cluster does not have: the last ones of their nodes."""
        return tuple(rank for rank, name in enumerate(self.names) if name == _ABSENT)


@dataclass(frozen=True)
class Fitted:
    """A plan for the ranks that are there, its price, and what became of the whole cluster's layout."""

    plan: Plan
    predicted: Prediction
    words: str


def as_whole(cluster: ClusterSpec) -> Whole | None:
    """The smallest cluster of equal nodes that holds every node with a usable rank; None where all are full."""
    nodes: list[tuple[str, list[int]]] = []
    first, room, gone = 0, 0, set(cluster.missing)
    for group in cluster.nodes:
        for _ in range(group.count):
            usable = [rank for rank in range(first, first + group.devices_per_node) if rank not in gone]
            first += group.devices_per_node
            if usable:
                nodes.append((group.device, usable))
                room = max(room, group.devices_per_node)
    if all(len(usable) == room for _, usable in nodes):
        return None
    nodes.sort(key=lambda node: -len(node[1]))
    groups = tuple(
        NodeGroup(count=len(list(alike)), devices_per_node=room, device=device)
        for device, alike in groupby(device for device, _ in nodes)
    )
    names = tuple(rank for _, usable in nodes for rank in [*usable, *[_ABSENT] * (room - len(usable))])
    return Whole(cluster.model_copy(update={"nodes": groups, "missing": ()}), names)


def slowed(grid: Grid, whole: Whole) -> float:
    """About how much longer than all its work, spread evenly, a grid point takes without the absent ranks: pipelines
    filled and drained, whole micro-batches dealt anew.  `inf` when no shares add up to the batch.
    """
    size, fill = grid.ranks_per_replica, grid.num_stages - 1.0
    lost = Counter(rank // size for rank in whole.absent)
    left = Counter(size - number for number in lost.values() if number < size)
    workers = [Worker(count, grid.micro_batch, size / ranks, fill * size / ranks) for ranks, count in left.items()]
    if len(lost) < grid.num_replicas:
        workers.append(Worker(grid.num_replicas - len(lost), grid.micro_batch, 1.0, fill))
    shares = deal(grid.num_replicas * grid.num_micro_batches * grid.micro_batch, workers) if workers else None
    if shares is None:
        return float("inf")
    return finish_seconds(workers, shares) / grid.num_micro_batches


def fit(
    plan: Plan, whole: Whole, problem: Problem, costs: CostModel, *, deadline: float, quickly: bool
) -> Fitted | None:
    """What a plan for the whole cluster becomes on the real one, `quickly` of fewer ways; None when nothing of it can
    run, or not with the whole batch.
    """
    try:
        way = Replanner(plan, costs).solve(whole.absent, deadline=deadline, ahead=quickly)
    except (BadInputError, NoPlanFitsError, TimeLimitError):
        return None
    if way.global_batch < problem.training.global_batch:
        return None
    after = plan_after(plan, way)
    real = Plan(
        made=problem.provenance,
        model=problem.model,
        cluster=problem.cluster,
        training=problem.training,
        memory_cap_bytes=problem.memory_cap_bytes,
        pipelines=after.pipelines,
        replicas=tuple(
            replica.model_copy(update={"ranks": tuple(whole.names[rank] for rank in replica.ranks)})
            for replica in after.replicas
        ),
    )
    return Fitted(real, price(real, costs), f"{way.policy}: {way.layout}")
