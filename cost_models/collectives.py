"""Collective times from published curves where one exists, else from link rates."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cost_models.interpolate import log_log
from specs.cluster import ClusterSpec, CollectiveOp, Link, LinkLevel

_DATA = Path(__file__).parent / "data"

# Share of the whole (gathered) tensor that each rank sends, for n ranks.      [NCCL PERFORMANCE.md]
#   all-reduce 2 (n - 1) / n;  all-gather, reduce-scatter and all-to-all (n - 1) / n;  point to point 1
_PASSES: dict[CollectiveOp, float] = {
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_reduce": 2.0,
    "all_to_all": 1.0,
}

Curve = tuple[tuple[float, ...], tuple[float, ...]]
Curves = Mapping[tuple[CollectiveOp, int], Curve]


def wire_share(op: CollectiveOp, num_ranks: int) -> float:
    """Bytes that each rank sends per byte of payload."""
    if op == "point_to_point":
        return 1.0
    return _PASSES[op] * (num_ranks - 1) / num_ranks


def _operation(name: str) -> CollectiveOp:
    for op in _PASSES:
        if op == name:
            return op
    raise ValueError(f"collective_curves.csv: unknown operation {name!r}")


@cache
def curves() -> dict[str, dict[tuple[CollectiveOp, int], Curve]]:
    """By curve set and (operation, ranks): payload bytes and seconds, ascending; all within one scale-up domain."""
    points: defaultdict[tuple[str, CollectiveOp, int], list[tuple[float, float]]] = defaultdict(list)
    with (_DATA / "collective_curves.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            op = _operation(row["op"])
            curve = points[row["curves"], op, int(row["num_ranks"])]
            curve.append((float(row["payload_bytes"]), float(row["seconds"])))
    result: defaultdict[str, dict[tuple[CollectiveOp, int], Curve]] = defaultdict(dict)
    for (name, op, num_ranks), pairs in points.items():
        sizes, seconds = zip(*sorted(pairs), strict=True)
        result[name][op, num_ranks] = (sizes, seconds)
    return dict(result)


def shipped_curves(name: str | None) -> Curves:
    """A shipped curve set; None: none, link rates are used."""
    return curves()[name] if name is not None else {}


def measured_curves(cluster: ClusterSpec, level: LinkLevel, ranks_per_domain: int | None = None) -> Curves:
    """A cluster's own curves of a level; between domains those with that many members in each."""
    return {
        (curve.op, curve.num_ranks): (tuple(float(size) for size in curve.payload_bytes), curve.seconds)
        for curve in cluster.collectives
        if curve.level == level and (ranks_per_domain is None or curve.ranks_per_domain == ranks_per_domain)
    }


def curve_seconds(available: Curves, op: CollectiveOp, num_ranks: int, payload_bytes: int) -> float | None:
    """From the curve of the nearest group size, with its bytes on the wire scaled; None without one for `op`."""
    sizes = [n for o, n in available if o == op]
    if not sizes:
        return None
    nearest = min(sizes, key=lambda n: (abs(n - num_ranks), n))
    xs, ys = available[op, nearest]
    return log_log(xs, ys, payload_bytes * wire_share(op, num_ranks) / wire_share(op, nearest))


def scale_up_seconds(
    available: Curves, link: Link, efficiency: float, op: CollectiveOp, num_ranks: int, payload_bytes: int
) -> float:
    """A collective inside one scale-up domain.  Curves without the operation give all-gather and reduce-scatter as
    half an all-reduce; a transfer from rank to rank is that of its link, unless it was measured.
    """
    seconds = curve_seconds(available, op, num_ranks, payload_bytes)
    if seconds is not None:
        return seconds
    if op != "point_to_point":
        whole = curve_seconds(available, "all_reduce", num_ranks, payload_bytes)
        if whole is not None:
            return whole * _PASSES[op] / 2.0
    return link_seconds(link, efficiency, op, num_ranks, payload_bytes)


def link_seconds(link: Link, efficiency: float, op: CollectiveOp, num_ranks: int, payload_bytes: float) -> float:
    """# t = hops a + share(n) S / (e B)      hops: n - 1 (ring), all-reduce 2 log2 n (tree), point to point 1
    #   S payload bytes, n ranks, B link bytes/s per device and direction, e what a collective reaches of it,
    #   a latency s of one hop      [NCCL PERFORMANCE.md]     leaves out protocol switches and rail conflicts
    """
    hops = 1.0 if op == "point_to_point" else float(num_ranks - 1)
    if op == "all_reduce":
        hops = min(2.0 * hops, 2.0 * math.log2(num_ranks))
    return hops * link.latency_seconds + wire_share(op, num_ranks) * payload_bytes / (
        efficiency * link.bytes_per_second
    )


def scale_out_seconds(
    inside_curves: Curves,
    scale_up: Link,
    scale_up_efficiency: float,
    scale_out: Link,
    scale_out_efficiency: float,
    op: CollectiveOp,
    num_ranks: int,
    payload_bytes: int,
    ranks_per_domain: int,
) -> float:
    """A group over several domains, hierarchical: the parts inside and between domains follow each other in a pipe.

    # t = max( t_up(k ranks, S), a + share(d) (S / k) / (e B) ) + the smaller one's latency
    #   d domains with k members each, every member's own network link carries 1 / k of the payload
    """
    if op == "point_to_point":
        return link_seconds(scale_out, scale_out_efficiency, op, 2, payload_bytes)
    members = max(1, min(ranks_per_domain, num_ranks))
    domains = max(2, -(-num_ranks // members))
    between = link_seconds(scale_out, scale_out_efficiency, op, domains, payload_bytes / members)
    if members == 1:
        return between
    inside = scale_up_seconds(inside_curves, scale_up, scale_up_efficiency, op, members, payload_bytes)
    return max(inside, between) + min(scale_up.latency_seconds, scale_out.latency_seconds)
