"""Patience: how long without progress is a hang, whose fault it is, and who is slower than its peers."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from executor.messages import WAITING_TERMS, Pong

STEPS_TO_LEARN = 3  # until then the limit is that of early steps
START_SECONDS = 180.0  # the first step, forming and loading
EARLY_PATIENCE = 20.0  # times the longest step so far, at most START_SECONDS
SAVING_SECONDS = 900.0  # a checkpoint or an evaluation
PATIENCE = 5.0  # times the median step
PREPARING_SECONDS = 60.0  # without an answer while modules are made, data or checkpoints read
SILENT_SECONDS = 3.0  # without an answer to pings that come each second

SLOW_STEPS = 10  # a device is slow when for so many steps in a row
SLOW_FACTOR = 1.25  # its own work took so many times its peers' median


@dataclass
class Patience:
    """Learns the step time; `floor` seconds are granted beyond PATIENCE median steps."""

    floor: float
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    _phase: str = "forming"
    _since: float = field(default_factory=time.monotonic)

    def progress(self, phase: str | None = None) -> None:
        """Something moved forward; from now on workers are in `phase` (None: as before)."""
        self._since = time.monotonic()
        self._phase = self._phase if phase is None else phase

    def step(self, seconds: float) -> None:
        """A step took so long."""
        self._steps.append(seconds)

    @property
    def median(self) -> float:
        """Of the last steps; 0 before there were any."""
        return statistics.median(self._steps) if self._steps else 0.0

    @property
    def limit(self) -> float:
        """Seconds without progress that count as a hang."""
        if self._phase in ("saving", "evaluating"):
            return SAVING_SECONDS
        if self._phase != "training" or not self._steps:
            return START_SECONDS
        if len(self._steps) < STEPS_TO_LEARN:
            return min(START_SECONDS, EARLY_PATIENCE * max(self._steps) + self.floor)
        return PATIENCE * self.median + self.floor

    @property
    def silence(self) -> float:
        """Seconds without an answer that count as a hang: preparing may hold the interpreter for long."""
        return self.floor if self._phase == "training" else max(self.floor, PREPARING_SECONDS)

    @property
    def waited(self) -> float:
        """Seconds since something moved."""
        return time.monotonic() - self._since

    @property
    def is_over(self) -> bool:
        return self.waited > self.limit


@dataclass(frozen=True)
class Suspect:
    """A rank that the others wait for, and why it is thought so."""

    rank: int
    cause: str


def suspects(
    members: Sequence[int], silent: Mapping[int, float], pongs: Mapping[int, Pong | None], *, stalled: bool
) -> list[Suspect]:
    """Whose fault it is that nothing moves: those that do not answer; else those that do not wait for others.

    `silent`: seconds since each member's last word.  `stalled`: there is no progress, so that members which answer
    come into question too.  Empty when all of them wait for each other, or all of them compute.
    """
    mute = [rank for rank in members if silent[rank] > SILENT_SECONDS]
    if mute:
        return [Suspect(rank, f"has not answered for {silent[rank]:.0f} s: frozen or cut off") for rank in mute]
    if not stalled:
        return []
    busy = {rank: pong for rank in members if (pong := pongs[rank]) is not None and pong.term not in WAITING_TERMS}
    if len(busy) == len(members):
        return []
    return [Suspect(rank, f"makes no progress in {pong.where}, term {pong.term}") for rank, pong in busy.items()]


class Slowness:
    """Finds a rank that is persistently slower at its own work than the peers that have the same work."""

    def __init__(self, peers: Mapping[int, tuple[int, ...]]) -> None:
        self._peers = dict(peers)  # of each rank, itself among them
        self._busy: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._ratios: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SLOW_STEPS))

    def step(self, step: int, rank: int, busy_seconds: float) -> None:
        """A rank's own work in a step."""
        self._busy[step][rank] = busy_seconds
        if len(self._busy[step]) < len(self._peers):
            return
        busy = self._busy.pop(step)
        for one, peers in self._peers.items():
            others = [busy[peer] for peer in peers if peer != one]
            if others:
                self._ratios[one].append(busy[one] / max(statistics.median(others), 1e-9))

    def slow_ranks(self) -> dict[int, float]:
        """Ranks that were slow in each of the last steps, with the median factor."""
        return {
            rank: statistics.median(ratios)
            for rank, ratios in self._ratios.items()
            if len(ratios) == SLOW_STEPS and min(ratios) > SLOW_FACTOR
        }
