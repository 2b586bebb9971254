"""The account of a supervised run: every second of its wall clock in one bucket."""

from __future__ import annotations

import time
from collections import defaultdict

from specs.runlog import Bucket

# What a generation does to get ready.  From the second one on the supervisor times it, as parts of an interruption.
GETTING_READY = frozenset(
    {
        "program_startup",
        "accelerator_initialization",
        "training_preparation",
        "checkpoint_restore",
        "state_transfer",
        "other",
    }
)


class Account:
    """Seconds that the supervisor measured, and those that the generations' speakers told of."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._own: defaultdict[Bucket, float] = defaultdict(float)
        self._generation: dict[Bucket, float] = {}
        self._is_first = True

    def add(self, bucket: Bucket, seconds: float) -> None:
        """Seconds measured here."""
        self._own[bucket] += max(0.0, seconds)

    def told(self, seconds: dict[Bucket, float]) -> None:
        """The generation at hand has spent so much since it began."""
        dropped = {"other"} if self._is_first else GETTING_READY
        self._generation = {bucket: spent for bucket, spent in seconds.items() if bucket not in dropped}

    def close_generation(self) -> None:
        """The generation at hand is over."""
        for bucket, spent in self._generation.items():
            self._own[bucket] += spent
        self._generation = {}
        self._is_first = False

    @property
    def wall_seconds(self) -> float:
        """Since the command started."""
        return time.time() - self._started

    def seconds(self) -> dict[Bucket, float]:
        """By bucket; they add up to the wall clock."""
        named = defaultdict(float, self._own)
        for bucket, spent in self._generation.items():
            named[bucket] += spent
        named["other"] = max(0.0, self.wall_seconds - sum(named.values()))
        return dict(named)
