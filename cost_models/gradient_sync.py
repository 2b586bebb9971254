"""When the gradients of a step are summed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from cost_models.buckets import BUCKET_ELEMENTS, Bucket, Member
from cost_models.interface import CostModel
from cost_models.memory import GRADIENT_BYTES, WEIGHT_BYTES
from cost_models.passes import ReplicaPass
from cost_models.topology import Topology
from specs.cluster import CollectiveOp, Precision
from specs.plan import Plan


def sync_end(
    plan: Plan, costs: CostModel, topology: Topology, buckets: Sequence[Bucket], passes: Sequence[ReplicaPass]
) -> float:
    """Seconds from the start of the step until every gradient is summed (and sharded weights are gathered again).

    A bucket starts when the slowest of its holders has finished its passes.  Collectives hide beside the last
    backward pass as far as the cost model allows.  The update itself is left out here.
    """
    finish: defaultdict[tuple[int, int], float] = defaultdict(float)
    last_backward: dict[tuple[int, int], float] = {}
    for item in passes:
        for stage, seconds in enumerate(item.timing.finish_seconds):
            key = (item.replica.pipeline, stage)
            finish[key] = max(finish[key], seconds)
            last_backward[key] = item.stages[stage].backward
    ready: defaultdict[Member, float] = defaultdict(float)
    whole: defaultdict[Member, float] = defaultdict(float)
    sharded: defaultdict[Member, float] = defaultdict(float)
    for bucket in buckets:
        seconds = bucket_seconds(costs, topology, bucket, plan.training.precision)
        together = max(finish[pipeline, stage] for pipeline, stage, _ in bucket.members)
        for member in bucket.members:
            ready[member] = max(ready[member], together if seconds else finish[member[0], member[1]])
            (sharded if bucket.zero else whole)[member] += seconds

    def exposed(member: Member) -> float:
        beside = last_backward[member[0], member[1]]
        left = costs.exposed_gradient_sync(whole[member], beside)
        return left + costs.exposed_gradient_sync(sharded[member], beside, sharded=True)

    return max(start + exposed(member) for member, start in ready.items())


def bucket_seconds(costs: CostModel, topology: Topology, bucket: Bucket, precision: Precision) -> float:
    """Collectives of one bucket, alone.

    # zero 0: all-reduce of 4 N bytes     zero 1: reduce-scatter of 4 N, and after the update all-gather of w N
    #   N elements, w bytes of a weight; large buckets go in pieces of BUCKET_ELEMENTS
    """
    span = topology.group(bucket.members)
    if span.num_ranks == 1:
        return 0.0
    pieces = max(1, round(bucket.num_elements / BUCKET_ELEMENTS))
    steps: tuple[tuple[CollectiveOp, int], ...] = (("all_reduce", GRADIENT_BYTES),)
    if bucket.zero:
        steps = (("reduce_scatter", GRADIENT_BYTES), ("all_gather", WEIGHT_BYTES[precision]))
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
