"""Experiment 3: one rank at half speed (CPU quota): the even cuts of a healthy cluster against cuts by speed.

Healthy ranks and the slow one take turns in one set of processes, whose quotas change.  A rank at share s of its
speed among n leaves n - 1 + s of n ranks' work, so that no cut can do better than the healthy time times
n / (n - 1 + s).  Recovered is the part of the way from the even cuts' time to that bound which the cuts by speed go.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.hosts import Bed
from benchmarks.testbed.measure import NUM_TURNS, Measured, chosen_plan, profile_of, take_turns
from benchmarks.testbed.plans import MODEL, SEQ_LEN
from benchmarks.testbed.progress import Progress
from benchmarks.testbed.quotas import share_of_core
from specs.cluster import ClusterSpec
from specs.plan import Plan

SLOW_RANK, SHARE = 1, 0.5
HEALTHY, EVEN, BY_SPEED = "healthy", "even cuts", "cuts by speed"
BATCH = 36  # by speed 24 and 12, so that whole sequences can be dealt as 2 to 1


@dataclass(frozen=True)
class Recovery:
    """Seconds of a step: even cuts on healthy ranks, even cuts with the slow rank, cuts by speed with it."""

    num_ranks: int
    plans: dict[str, Plan]
    healthy: Measured
    even: Measured
    by_speed: Measured

    @property
    def bound(self) -> float:
        """The least that the slow rank leaves possible, where all time is work that can be moved."""
        return self.healthy.seconds * self.num_ranks / (self.num_ranks - 1 + SHARE)

    @property
    def recovered(self) -> float:
        """Share of the avoidable loss."""
        return (self.even.seconds - self.by_speed.seconds) / (self.even.seconds - self.bound)


def run(folder: Path, progress: Progress, *, num_turns: int = NUM_TURNS) -> Recovery:
    """Two ranks of one host, healthy and slow in turns."""
    folder.mkdir(parents=True, exist_ok=True)
    model = str(folder / "model.json")
    MODEL.save(Path(model))
    bed = Bed(1, 2)
    even = [share_of_core(bed.world_size)] * bed.world_size
    slow = [share * (SHARE if rank == SLOW_RANK else 1.0) for rank, share in enumerate(even)]
    with bed.up() as hosts:
        progress.say("slow rank: profile of the healthy hosts")
        profile = profile_of(hosts, folder, model=model, seq_len=SEQ_LEN)
        by_speed = profile.cluster.model_copy(update={"slow": {SLOW_RANK: SHARE}})
        plans = {EVEN: _plan(folder, model, profile.cluster), BY_SPEED: _plan(folder, model, by_speed)}
        plans[HEALTHY] = plans[EVEN]
        shares = {HEALTHY: even, EVEN: slow, BY_SPEED: slow}
        with progress.count("slow rank", num_turns * len(plans)) as advance:
            measured = take_turns(hosts, folder, plans, advance=advance, num_turns=num_turns, shares=shares)
    return Recovery(bed.world_size, plans, measured[HEALTHY], measured[EVEN], measured[BY_SPEED])


def _plan(folder: Path, model: str, cluster: ClusterSpec) -> Plan:
    path = folder / ("cluster-slow.json" if cluster.slow else "cluster.json")
    cluster.save(path)
    return chosen_plan(folder, model, batch=BATCH, seq_len=SEQ_LEN, cluster=path)
