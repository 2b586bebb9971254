"""Progress of training for the person who watches: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specs.runlog import EvaluationRecord, ExpertLoadRecord, Record, StepRecord

LINES_PER_RUN = 10  # where no terminal is


class TrainingProgress:
    """step, loss, tokens/s, time left."""

    def __init__(self, done: int, last: int, *, enabled: bool) -> None:
        self._last, self._enabled = last, enabled
        self._console = Console(stderr=True)
        self._every = max(1, (last - done) // LINES_PER_RUN)
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

    def record(self, record: Record) -> None:
        """Show what a record of the log says, if it is of interest here."""
        match record:
            case StepRecord():
                self._step(record.step, record.loss, record.tokens, record.seconds)
            case ExpertLoadRecord():
                name, share = max(record.share.items(), key=lambda item: max(item[1]))
                busiest = share.index(max(share))
                self.note(f"step {record.step}: expert {busiest} of {name} has {max(share):.2f} times the mean load")
            case EvaluationRecord():
                self.note(f"step {record.step}: held-out loss {record.loss:.4f}")

    def _step(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        rate = tokens / max(seconds, 1e-9)
        self._rate = rate if self._rate == 0.0 else 0.8 * self._rate + 0.2 * rate
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=loss, rate=self._rate)
        elif self._enabled and (step % self._every == 0 or step == self._last):
            left = (self._last - step) * tokens / self._rate
            print(
                f"step {step}/{self._last}  loss {loss:.4f}  {self._rate:,.0f} tokens/s  {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def note(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._enabled:
            print(text, file=sys.stderr, flush=True)
