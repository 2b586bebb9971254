"""Where the time of a step goes: every moment belongs to exactly one term, the innermost that is open.

On a CPU moments are read from the wall clock.  On a GPU events are recorded on the current stream and read once
per step, so that a term is the stream's own time and hidden communication does not count.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import torch

from specs.runlog import TimedAction

REST = "other"


class Clock:
    """Accumulates seconds per term between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._term = REST
        self._last: float | torch.cuda.Event = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._laps: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._begin: float | torch.cuda.Event = 0.0
        self._recorded: list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]] | None = None
        self._action: str | None = None

    @property
    def current(self) -> str:
        """The innermost open term."""
        return self._term

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _switch(self, term: str) -> None:
        now = self._now()
        # Inside an action its own term goes without saying.
        if self._recorded is not None and not (self._action and self._term in ("forward", "backward", REST)):
            self._recorded.append((self._term, self._last, now))
        if isinstance(now, float):
            assert isinstance(self._last, float)
            self._seconds[self._term] += now - self._last
        else:
            assert not isinstance(self._last, float)
            self._laps.append((self._term, self._last, now))
        self._last = now
        self._term = term

    def start(self, *, record: bool = False) -> None:
        """Begin a step: all terms at zero.  `record`: keep when each of its actions and terms was."""
        self._seconds.clear()
        self._laps.clear()
        self._term = REST
        self._recorded = [] if record else None
        self._begin = self._last = self._now()

    def stop(self) -> dict[str, float]:
        """End the step; seconds by term.  They add up to the time since `start`."""
        self._switch(REST)
        if self._on_gpu:
            torch.cuda.synchronize()
            for term, begin, end in self._laps:
                self._seconds[term] += begin.elapsed_time(end) / 1e3
        return dict(self._seconds)

    def recorded(self) -> list[TimedAction]:
        """Of the step that was recorded, once it is stopped: its actions, and the terms in and between them."""
        found = []
        for name, begin, end in self._recorded or []:
            if isinstance(begin, float):
                assert isinstance(end, float)
                assert isinstance(self._begin, float)
                start, stop = begin - self._begin, end - self._begin
            else:
                assert not isinstance(self._begin, float)
                start, stop = (self._begin.elapsed_time(event) / 1e3 for event in (begin, end))
            if stop > start:
                found.append(TimedAction(name, start, stop))
        return sorted(found, key=lambda item: (item.start, -item.stop))

    @contextlib.contextmanager
    def action(self, name: str) -> Iterator[None]:
        """Moments inside are an action of the schedule, for the record."""
        if self._recorded is None:
            yield
            return
        self._action, begin = name, self._now()
        yield
        self._recorded.append((name, begin, self._now()))
        self._action = None

    @contextlib.contextmanager
    def term(self, name: str) -> Iterator[None]:
        """Moments inside belong to `name`, except those of a term opened inside."""
        before = self._term
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)
