"""Experiment 3: one rank at half speed (CPU quota): the even cuts of a healthy cluster against cuts by speed.

The healthy hosts and those with the slow rank take turns.  A rank at share s of its speed among n leaves n - 1 + s of
n ranks' work, so that no cut can do better than the healthy time times n / (n - 1 + s).  Recovered is the part of the
way from the even cuts' time to that bound which the cuts by speed go.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.testbed.hosts import Bed
from benchmarks.testbed.measure import NUM_TURNS, Measured, chosen_plan, profile_of, take_turns
from benchmarks.testbed.plans import BATCH, SEQ_LEN
from benchmarks.testbed.progress import Progress
from specs.cluster import ClusterSpec
from specs.plan import Plan

SLOW_RANK, SHARE = 1, 0.5
EVEN, BY_SPEED = "even cuts", "cuts by speed"


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


def run(folder: Path, progress: Progress, *, model: str = "demo", num_turns: int = NUM_TURNS) -> Recovery:
    """Two ranks of one host."""
    healthy_bed = Bed(1, 2)
    slow_bed = replace(healthy_bed, slow={SLOW_RANK: SHARE})
    healthy, slow = folder / "healthy", folder / "slow"
    for place in (healthy, slow):
        place.mkdir(parents=True, exist_ok=True)
    with healthy_bed.up() as hosts:
        progress.say("slow rank: profile of the healthy hosts")
        profile = profile_of(hosts, folder, model=model, seq_len=SEQ_LEN)
    plans = {
        EVEN: _plan(folder, model, profile.cluster),
        BY_SPEED: _plan(folder, model, profile.cluster.model_copy(update={"slow": {SLOW_RANK: SHARE}})),
    }
    measured: dict[str, Measured] = {}
    with progress.count("slow rank: turns of both hosts", num_turns * 3) as advance:
        for turn in range(1, num_turns + 1):
            with healthy_bed.up() as hosts:
                found = take_turns(hosts, healthy, {EVEN: plans[EVEN]}, advance=lambda _: None, num_turns=turn)
                measured["healthy"] = found[EVEN]
            with slow_bed.up() as hosts:
                measured.update(take_turns(hosts, slow, plans, advance=lambda _: None, num_turns=turn))
            advance(3 * turn)
    return Recovery(2, plans, measured["healthy"], measured[EVEN], measured[BY_SPEED])


def _plan(folder: Path, model: str, cluster: ClusterSpec) -> Plan:
    path = folder / ("cluster-slow.json" if cluster.slow else "cluster.json")
    cluster.save(path)
    return chosen_plan(folder, model, batch=BATCH, seq_len=SEQ_LEN, cluster=path)
