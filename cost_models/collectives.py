"""Collective times from published curves where one exists, else from link rates."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from functools import cache
from pathlib import Path

from cost_models.interpolate import log_log
from specs.cluster import Link
from specs.profile import CollectiveOp

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


def scale_up_seconds(
    curve_set: str | None, link: Link, efficiency: float, op: CollectiveOp, num_ranks: int, payload_bytes: int
) -> float:
    """A collective inside one scale-up domain.

    Between and beyond the measured group sizes the curve of the nearest size is used with its bytes on the wire
    scaled; a set without the operation takes all-gather and reduce-scatter as half an all-reduce.
    """
    available = curves().get(curve_set, {}) if curve_set is not None else {}
    candidates: tuple[tuple[CollectiveOp, float], ...] = ((op, 1.0), ("all_reduce", _PASSES.get(op, 1.0) / 2.0))
    for candidate, factor in candidates:
        sizes = [n for o, n in available if o == candidate]
        if not sizes or op == "point_to_point":
            continue
        nearest = min(sizes, key=lambda n: (abs(n - num_ranks), n))
        xs, ys = available[candidate, nearest]
        scaled = payload_bytes * wire_share(candidate, num_ranks) / wire_share(candidate, nearest)
        return factor * log_log(xs, ys, scaled)
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
    curve_set: str | None,
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
    inside = scale_up_seconds(curve_set, scale_up, scale_up_efficiency, op, members, payload_bytes)
    return max(inside, between) + min(scale_up.latency_seconds, scale_out.latency_seconds)
