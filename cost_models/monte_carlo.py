"""Monte Carlo of a run: failures, repairs, queues, spares, saves and restarts, second by second.

Nothing of `renewal` or `degraded` is used here: the clock is played out, so that each can be held to the other.
All policies see the same histories, which makes their differences sharper than their values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cost_models.goodput import Rejoin, Times
from cost_models.history import History, draw_history
from cost_models.policies import Geometry, Policy, fixed_speed, packed_speed
from specs.failures import FailureModel
from specs.runlog import Bucket

Array = npt.NDArray[np.float64]
BUCKETS: tuple[Bucket, ...] = (
    "step",
    "checkpoint_save",
    "wasted_progress",
    "other",
    "program_startup",
    "checkpoint_restore",
)


@dataclass(frozen=True, slots=True)
class Job:
    """One policy to play: its speeds by level (`shares`, `slow`) and how repaired devices come back."""

    policy: Policy
    geometry: Geometry
    shares: tuple[float, ...]
    slow: tuple[float, ...]
    rejoin: Rejoin


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one job over all trials: kept progress over what a faultless full-speed run would make, per trial.

    `seconds` are means per trial by run-log bucket; they add up to the horizon.  `step` holds the kept steps, at
    whatever speed; `full_speed_seconds` is their worth at full speed.
    """

    trials: Array
    seconds: dict[Bucket, float]
    full_speed_seconds: float
    failures: float
    planned_restarts: float

    @property
    def mean(self) -> float:
        return float(self.trials.mean())

    @property
    def standard_error(self) -> float:
        return float(self.trials.std(ddof=1)) / math.sqrt(self.trials.size) if self.trials.size > 1 else math.inf

    def quantiles(self) -> tuple[float, float, float]:
        """The 5, 50 and 95 % points over trials."""
        low, middle, high = np.quantile(self.trials, (0.05, 0.5, 0.95))
        return float(low), float(middle), float(high)


@dataclass(slots=True)
class _Clock:
    """A run in progress.  `up_at`: when work last began or will begin; `until`: what has been accounted for."""

    times: Times
    speed: float
    up_at: float = 0.0
    first: float = 0.0
    first_bucket: Bucket = "other"
    down_from: float | None = None
    kept: float = 0.0
    buckets: dict[Bucket, float] = field(default_factory=dict)
    stops: int = 0

    def add(self, bucket: Bucket, seconds: float) -> None:
        self.buckets[bucket] = self.buckets.get(bucket, 0.0) + seconds

    def close_down(self, now: float) -> None:
        """Account for the downtime up to `now`, in the order detection (or planned save), restart, load."""
        if self.down_from is None:
            return
        left = min(now, self.up_at) - self.down_from
        detection = min(left, self.first)
        loading = min(max(self.up_at - self.down_from - self.first, 0.0), self.times.load)
        starting = max(self.up_at - self.down_from - self.first - loading, 0.0)
        begun = min(left - detection, starting)
        self.add(self.first_bucket, detection)
        self.add("program_startup", begun)
        self.add("checkpoint_restore", left - detection - begun)
        self.down_from = None

    def close_up(self, now: float, *, lost: bool) -> None:
        """Account for the uptime up to `now`; `lost`: only durable saves count."""
        up = now - self.up_at
        if up <= 0.0:
            return
        if self.speed == 0.0:
            self.add("other", up)
            return
        work, stall = self.times.interval, self.times.stall
        cycles = math.floor(up / (work + stall))
        done = cycles * work + min(up - cycles * (work + stall), work)
        kept = done
        if lost:
            kept = max(math.floor((up - self.times.lag) / (work + stall)), 0) * work
        self.kept += kept * self.speed
        self.add("step", kept)
        self.add("wasted_progress", done - kept)
        self.add("checkpoint_save", up - done)

    def go_down(
        self, now: float, *, first: float, downtime: float, speed: float, first_bucket: Bucket = "other"
    ) -> None:
        """Stop at `now` for `downtime`, of which the `first` seconds are detection or a planned save."""
        self.first, self.first_bucket = first, first_bucket
        self.down_from = now
        self.up_at = now + downtime
        self.speed = speed

    def fail(self, now: float, detect: float, downtime: float, speed: float) -> None:
        """A failure: what is not durable is lost; work resumes with what is left."""
        self.close_down(now)
        self.close_up(now, lost=True)
        self.go_down(now, first=detect, downtime=downtime, speed=speed)

    def repaired(self, now: float, speed: float, rejoin: Rejoin, next_failure: float) -> None:
        """Something came back: taken at once while starting or waiting, else as `rejoin` says."""
        if speed <= self.speed:
            return
        if now < self.up_at:
            self.speed = speed
            return
        if self.speed > 0.0 and rejoin == "next-restart":
            return
        self.close_down(now)
        restart = self.times.restart + self.times.load
        if self.speed == 0.0:
            self.close_up(now, lost=False)
            self.go_down(now, first=0.0, downtime=restart, speed=speed)
            return
        saving = self.times.stall + self.times.lag
        self.close_up(now, lost=next_failure < now + saving)
        self.go_down(now, first=saving, downtime=saving + restart, speed=speed, first_bucket="checkpoint_save")
        self.stops += 1


class _Cluster:
    """Which devices are out; the speed that each job has then, remembered by pattern."""

    def __init__(self, jobs: Sequence[Job], model: FailureModel) -> None:
        self.jobs = jobs
        self.geometry = jobs[0].geometry
        self.takes_host = [item.blast_radius == "node" for item in model.classes]
        self.known: list[dict[tuple[object, ...], float]] = [{} for _ in jobs]
        self.reset()

    def reset(self) -> None:
        """All devices work."""
        self.out: dict[int, int] = {}  # times that a device is out, by device
        self.hosts_out: dict[int, int] = {}
        self.failed: dict[int, int] = {}  # devices out in each damaged domain
        self.hurt: dict[int, list[tuple[int, int]]] = {}  # (replica, level) of the damaged groups of each domain
        self.damaged: tuple[int, ...] | None = None
        self.levels: dict[int, tuple[int, ...]] | None = None

    def change(self, device: int, kind: int, by: int) -> None:
        """A device (or its host, by the failure class) goes out or comes back."""
        geometry = self.geometry
        table, key = (self.hosts_out, device // geometry.host_size) if self.takes_host[kind] else (self.out, device)
        count = table.get(key, 0) + by
        if count:
            table[key] = count
        else:
            del table[key]
        domain, size, host = device // geometry.devices_per_domain, geometry.devices_per_domain, geometry.host_size
        first, slots = domain * size, geometry.groups_per_domain
        places = [d - first for d in range(first, first + size) if d in self.out or d // host in self.hosts_out]
        if places:
            self.failed[domain] = len(places)
            groups = Counter(place // geometry.group_size for place in places if place < slots * geometry.group_size)
            self.hurt[domain] = [
                ((domain * slots + slot) // geometry.num_stages, geometry.group_size - lost)
                for slot, lost in groups.items()
            ]
        else:
            self.failed.pop(domain, None)
            self.hurt.pop(domain, None)
        self.damaged, self.levels = None, None

    def speed(self, index: int) -> float:
        """Share of full speed of a job in the present state."""
        job, known = self.jobs[index], self.known[index]
        if job.policy.packed:
            if self.damaged is None:
                self.damaged = tuple(sorted(self.failed.values()))
            if self.damaged not in known:
                known[self.damaged] = packed_speed(job.policy, self.geometry, job.shares, job.slow, self.damaged)
            return known[self.damaged]
        if self.levels is None:
            self.levels = self._replica_levels()
        key = tuple(sorted(self.levels.values()))
        if key not in known:
            known[key] = fixed_speed(job.policy, self.geometry, job.shares, job.slow, self.levels)
        return known[key]

    def _replica_levels(self) -> dict[int, tuple[int, ...]]:
        """Levels of the damaged groups of each damaged replica, every group in its place."""
        geometry, spares = self.geometry, self.jobs[0].policy.spare_domains
        domains = [domain for domain in self.failed if domain < geometry.num_domains]
        if spares:  # those that are not damaged themselves replace the first damaged domains
            domains = domains[max(spares - (len(self.failed) - len(domains)), 0) :]
        levels: dict[int, list[int]] = {}
        for domain in domains:
            for replica, level in self.hurt[domain]:
                if replica < geometry.num_replicas:
                    levels.setdefault(replica, []).append(level)
        return {replica: tuple(sorted(item)) for replica, item in levels.items()}


def simulate(
    jobs: Sequence[Job], model: FailureModel, times: Times, *, seconds: float, trials: int, seed: int
) -> list[Outcome]:
    """Play every job over `trials` histories of `seconds`.  All jobs have one geometry and one number of spares."""
    geometry, spares = jobs[0].geometry, jobs[0].policy.spare_domains
    assert all(job.geometry == geometry and job.policy.spare_domains == spares for job in jobs)
    num_devices = (geometry.num_domains + spares) * geometry.devices_per_domain
    cluster = _Cluster(jobs, model)
    played: list[list[_Clock]] = []
    failures = 0
    for sequence in np.random.SeedSequence(seed).spawn(trials):
        rng = np.random.default_rng(sequence)
        history = draw_history(model, num_ranks=geometry.num_ranks, num_devices=num_devices, seconds=seconds, rng=rng)
        failures += int(history.interrupts[history.times >= 0.0].sum())
        played.append(_play(cluster, history, model, times, seconds))
    return [
        Outcome(
            trials=np.array([clocks[index].kept / seconds for clocks in played]),
            seconds={
                bucket: sum(clocks[index].buckets.get(bucket, 0.0) for clocks in played) / trials for bucket in BUCKETS
            },
            full_speed_seconds=sum(clocks[index].kept for clocks in played) / trials,
            failures=failures / trials,
            planned_restarts=sum(clocks[index].stops for clocks in played) / trials,
        )
        for index in range(len(jobs))
    ]


def _play(cluster: _Cluster, history: History, model: FailureModel, times: Times, seconds: float) -> list[_Clock]:
    """All jobs over one history."""
    cluster.reset()
    breaks = [item.blast_radius != "none" for item in model.classes]
    interruptions = history.times[history.interrupts & (history.times >= 0.0)].tolist()
    clocks: list[_Clock] = []
    following = 0
    for time, kind, group, device, interrupts in zip(
        history.times.tolist(),
        history.kinds.tolist(),
        history.classes.tolist(),
        history.devices.tolist(),
        history.interrupts.tolist(),
        strict=True,
    ):
        if time >= 0.0 and not clocks:
            clocks = [_Clock(times, cluster.speed(index)) for index in range(len(cluster.jobs))]
        if breaks[group]:
            cluster.change(device, group, 1 if kind == 0 else -1)
        if not clocks or (kind == 0 and not interrupts):
            continue
        following += kind == 0
        next_failure = interruptions[following] if following < len(interruptions) else math.inf
        for index, clock in enumerate(clocks):
            if kind == 0:
                clock.fail(time, model.classes[group].detect_seconds, times.downtimes[group], cluster.speed(index))
            else:
                clock.repaired(time, cluster.speed(index), cluster.jobs[index].rejoin, next_failure)
    if not clocks:
        clocks = [_Clock(times, cluster.speed(index)) for index in range(len(cluster.jobs))]
    for clock in clocks:
        clock.close_down(seconds)
        clock.close_up(seconds, lost=False)
    return clocks
