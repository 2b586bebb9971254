"""One point of a sweep: a job on a cluster, the best plan for it or why there is none, and what its tokens cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specs.cluster import ClusterSpec
from specs.plan import Plan


@dataclass(frozen=True)
class SweepPoint:
    """`plan` None: `problem` says why.  `dollars_per_hour` of the whole cluster, None where a price is not known."""

    cluster: str
    device: str
    num_devices: int
    global_batch: int
    seq_len: int
    plan: Plan | None
    problem: str
    dollars_per_hour: float | None

    @property
    def tokens_per_second(self) -> float | None:
        """Of steps alone, without failures and checkpoints."""
        return None if self.plan is None or self.plan.predicted is None else self.plan.predicted.tokens_per_second

    @property
    def goodput_tokens_per_second(self) -> float | None:
        """Tokens of kept progress per second."""
        found = None if self.plan is None else self.plan.predicted
        return None if found is None else found.goodput_tokens_per_second

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """# dollars = price per hour / 3600 s / goodput x 1e6      kept tokens; installed devices cost, missing too"""
        goodput = self.goodput_tokens_per_second
        if goodput is None or self.dollars_per_hour is None:
            return None
        return self.dollars_per_hour / 3600.0 / goodput * 1e6

    @property
    def peak_memory_bytes(self) -> int | None:
        """Of the fullest rank."""
        return None if self.plan is None or self.plan.predicted is None else self.plan.predicted.peak_memory_bytes

    @property
    def layout(self) -> str:
        """The best layout in short: stages, ranks of a stage, replicas, degrees; empty without a plan."""
        if self.plan is None:
            return ""
        pipeline = self.plan.pipelines[0]
        placements = [placement for stage in pipeline.stages for placement in stage.modules]
        ranks = sorted({stage.num_ranks for stage in pipeline.stages})
        degrees = sorted({size for placement in placements for size in placement.blocks})
        again = sum(placement.recompute in ("selective", "full") for placement in placements)
        return (
            f"{len(pipeline.stages)} x {'-'.join(map(str, ranks))} x {len(self.plan.replicas)}, "
            f"mb {pipeline.micro_batch}, degrees {' '.join(map(str, degrees))}"
            + (f", recompute {again}/{len(placements)}" if again else "")
        )


def cluster_dollars_per_hour(cluster: ClusterSpec, prices: Mapping[str, float]) -> float | None:
    """Price of all installed devices: by device name in lower case, else the cluster's own; None if unknown."""
    total = 0.0
    for group in cluster.nodes:
        price = prices.get(group.device.lower(), cluster.devices[group.device].dollars_per_hour)
        if price is None:
            return None
        total += group.count * group.devices_per_node * price
    return total
