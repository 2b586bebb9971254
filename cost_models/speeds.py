"""Speeds of unlike devices in one cluster, from shipped data: each kind beside the fastest, on the model at hand."""

from __future__ import annotations

from collections import Counter

from cost_models.device import DeviceCosts
from specs.cluster import ClusterSpec
from specs.model import ModelSpec
from specs.plan import TrainingSpec


def with_speeds(cluster: ClusterSpec, model: ModelSpec, training: TrainingSpec) -> ClusterSpec:
    """The cluster with the speed of every rank of a slower kind in `slow`, times what stands there; a cluster of one
    kind as it is.

    # v = t(fastest kind) / t(own kind)     t forward and backward seconds of the model's modules, one whole sequence
    #   each, nothing cut

    Raises `BadInputError` for a device or a precision without shipped data.
    """
    kinds = dict.fromkeys(group.device for group in cluster.nodes)
    if len(kinds) == 1:
        return cluster
    counts = Counter(module for _, module in model.modules())
    seconds = {}
    for kind in kinds:
        alone = cluster.model_copy(
            update={"nodes": tuple(g for g in cluster.nodes if g.device == kind), "slow": {}, "missing": ()}
        )
        costs = DeviceCosts(alone, training, "plait")
        seconds[kind] = sum(
            number * (cost.forward_seconds + cost.backward_seconds)
            for module, number in counts.items()
            for cost in (
                costs.module(
                    module,
                    degree=1,
                    block_tokens=training.seq_len,
                    seq_len=training.seq_len,
                    recompute="none",
                    level="scale_up",
                ),
            )
        )
    fastest = min(seconds, key=seconds.__getitem__)
    slow, first = dict(cluster.slow), 0
    for group in cluster.nodes:
        stop = first + group.count * group.devices_per_node
        for rank in range(first, stop) if group.device != fastest else ():
            slow[rank] = cluster.slow.get(rank, 1.0) * seconds[fastest] / seconds[group.device]
        first = stop
    return cluster.model_copy(update={"slow": slow})
