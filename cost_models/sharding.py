"""What sharded gradients and weights send beside the passes of every micro-batch (ZeRO-2 and ZeRO-3)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from cost_models.buckets import BUCKET_ELEMENTS, Bucket, Member
from cost_models.interface import CostModel
from cost_models.memory import GRADIENT_BYTES, WEIGHT_BYTES
from cost_models.topology import Span, Topology
from specs.cluster import CollectiveOp
from specs.plan import Plan

# (operation, bytes per element)
Collectives = tuple[tuple[CollectiveOp, int], ...]


class MicroBatchSeconds(NamedTuple):
    """Collectives of a stage beside one micro-batch's passes, nothing hidden."""

    forward: float
    backward: float


def micro_batch_seconds(
    plan: Plan, costs: CostModel, topology: Topology, buckets: Sequence[Bucket]
) -> dict[tuple[int, int], MicroBatchSeconds]:
    """By (pipeline, stage): of the rank that has the most to send in each micro-batch.

    # zero 2  backward: reduce-scatter of 4 N bytes
    # zero 3  forward: all-gather of w N;  backward: the same again (not for embedding and head) and reduce-scatter
    #   N elements, w bytes of a weight
    """
    scatter: Collectives = (("reduce_scatter", GRADIENT_BYTES),)
    gather: Collectives = (("all_gather", WEIGHT_BYTES[plan.training.precision]),)
    forward: defaultdict[Member, float] = defaultdict(float)
    backward: defaultdict[Member, float] = defaultdict(float)
    buckets = [bucket for bucket in buckets if bucket.zero >= 2]
    for bucket, span in zip(buckets, topology.groups([bucket.members for bucket in buckets]), strict=True):
        gathering = bucket_collectives(costs, span, bucket, gather) if bucket.zero == 3 else 0.0
        scattering = bucket_collectives(costs, span, bucket, scatter)
        for member in bucket.members:
            forward[member] += gathering
            backward[member] += scattering + gathering * bucket.gathered_again
    most: dict[tuple[int, int], MicroBatchSeconds] = {}
    for member in backward:
        before = most.get(member[:2], MicroBatchSeconds(0.0, 0.0))
        most[member[:2]] = MicroBatchSeconds(
            max(before.forward, forward[member]), max(before.backward, backward[member])
        )
    return most


def bucket_collectives(costs: CostModel, span: Span, bucket: Bucket, steps: Collectives) -> float:
    """Seconds of some collectives of one bucket among its holders, alone.

    Large buckets go in pieces of BUCKET_ELEMENTS, those whose weights are gathered module by module.
    """
    if span.num_ranks == 1:
        return 0.0
    pieces = max(1, bucket.num_modules if bucket.zero == 3 else 0, round(bucket.num_elements / BUCKET_ELEMENTS))
    return pieces * sum(
        costs.collective(
            op,
            num_ranks=span.num_ranks,
            payload_bytes=math.ceil(bucket.num_elements * size / pieces),
            level=span.level,
            ranks_per_domain=span.ranks_per_domain,
        )
        for op, size in steps
    )
