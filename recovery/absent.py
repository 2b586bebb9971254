"""Devices that are lost, and when each is tried again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from recovery.workers import Workers


class Absent:
    """`causes` by rank.  `retry_seconds`: None, a lost device is not tried again by itself.

    `returns`: of a drill, ranks that come back once a step is done; `awaited` are those for which all wait then.
    """

    def __init__(self, retry_seconds: float | None, returns: Mapping[int, int]) -> None:
        self.causes: dict[int, str] = {}
        self.awaited: set[int] = set()
        self._retry_seconds = retry_seconds
        self._returns = dict(returns)
        self._retry_at: dict[int, float] = {}  # monotonic

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.causes)

    def add(self, rank: int, cause: str) -> None:
        """A device is lost."""
        self.causes[rank] = cause
        self.awaited.discard(rank)
        if self._retry_seconds is not None:
            self._retry_at[rank] = time.monotonic() + self._retry_seconds

    def remove(self, rank: int) -> None:
        """It is used again."""
        del self.causes[rank]
        self._retry_at.pop(rank, None)
        self.awaited.discard(rank)

    def retry_now(self, ranks: Iterable[int]) -> None:
        """These are said to be back, as far as they are lost."""
        self._retry_at.update(dict.fromkeys(self.ranks.intersection(ranks), 0.0))

    def call_back(self, step: int, workers: Workers) -> None:
        """Start workers on devices whose time has come; training goes on until they are ready, in drills it waits."""
        now = time.monotonic()
        due = {rank for rank, at in self._retry_at.items() if now >= at and workers.has_node(rank)}
        drilled = {rank for rank, after in self._returns.items() if rank in self.causes and step >= after}
        self.awaited |= drilled
        for rank in due | drilled:
            self._retry_at.pop(rank, None)
            self._returns.pop(rank, None)
            if rank in self.causes and rank not in workers.ranks:
                workers.start(rank)

    def back(self, workers: Workers) -> set[int]:
        """Lost devices that have a worker again, ready for orders."""
        return {rank for rank in self.causes if workers.is_ready(rank)}
