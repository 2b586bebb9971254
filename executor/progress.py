"""Progress of training for the person who watches: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES_PER_RUN = 10  # where no terminal is


class TrainingProgress:
    """step, loss, tokens/s, time left."""

    def __init__(self, done: int, last: int, tokens_per_step: int, *, enabled: bool) -> None:
        self._last, self._tokens_per_step, self._enabled = last, tokens_per_step, enabled
        self._console = Console(stderr=True)
        self._every = max(1, (last - done) // LINES_PER_RUN)
        self._previous = time.monotonic()
        self._rate = 0.0
        self._bar: Progress | None = None
        if enabled and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} tokens/s"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("training", total=last, completed=done, loss=float("nan"), rate=0.0)

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, loss: float) -> None:
        """A step is done."""
        now = time.monotonic()
        rate = self._tokens_per_step / max(now - self._previous, 1e-9)
        self._rate = rate if self._rate == 0.0 else 0.8 * self._rate + 0.2 * rate
        self._previous = now
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=loss, rate=self._rate)
        elif self._enabled and (step % self._every == 0 or step == self._last):
            left = (self._last - step) * self._tokens_per_step / self._rate
            print(
                f"step {step}/{self._last}  loss {loss:.4f}  {self._rate:,.0f} tokens/s  {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def evaluation(self, step: int, loss: float) -> None:
        """A held-out loss."""
        if self._bar is not None:
            self._bar.console.print(f"step {step}: held-out loss {loss:.4f}")
        elif self._enabled:
            print(f"step {step}: held-out loss {loss:.4f}", file=sys.stderr, flush=True)
        self._previous = time.monotonic()
