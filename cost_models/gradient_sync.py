"""When the gradients of a step are summed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cost_models.buckets import Bucket, Member
from cost_models.interface import CostModel
from cost_models.memory import GRADIENT_BYTES, WEIGHT_BYTES
from cost_models.passes import ReplicaPass
from cost_models.sharding import Collectives, bucket_collectives
from cost_models.topology import Span, Topology
from specs.cluster import Precision
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
    known: dict[tuple[object, ...], float] = {}  # of buckets as large among as many
    for bucket, span in zip(buckets, topology.groups([bucket.members for bucket in buckets]), strict=True):
        alike = span, bucket.num_elements, bucket.zero, bucket.num_modules
        if alike not in known:
            known[alike] = bucket_seconds(costs, span, bucket, plan.training.precision)
        seconds = known[alike]
        together = max(finish[pipeline, stage] for pipeline, stage, _ in bucket.members)
        for member in bucket.members:
            ready[member] = max(ready[member], together if seconds else finish[member[0], member[1]])
            (sharded if bucket.zero else whole)[member] += seconds

    def exposed(member: Member) -> float:
        beside = last_backward[member[0], member[1]]
        left = costs.exposed_gradient_sync(whole[member], beside)
        return left + costs.exposed_gradient_sync(sharded[member], beside, sharded=True)

    return max(start + exposed(member) for member, start in ready.items())


def bucket_seconds(costs: CostModel, span: Span, bucket: Bucket, precision: Precision) -> float:
    """Collectives of one bucket among its holders once a step, alone.

    # zero 0  all-reduce of 4 N bytes             zero 1  reduce-scatter of 4 N, after the update all-gather of w N
    # zero 2  after the update all-gather of w N  zero 3  none
    #   N elements, w bytes of a weight; what goes beside every micro-batch is `cost_models.sharding`
    """
    scatter: Collectives = (("reduce_scatter", GRADIENT_BYTES),)
    gather: Collectives = (("all_gather", WEIGHT_BYTES[precision]),)
    once: dict[int, Collectives] = {0: (("all_reduce", GRADIENT_BYTES),), 1: scatter + gather, 2: gather, 3: ()}
    return bucket_collectives(costs, span, bucket, once[bucket.zero])
