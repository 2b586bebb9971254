"""What a supervised run writes: the run log and its account, progress for the person who watches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Literal

from executor.ledger import RunLog
from executor.live import Live
from executor.messages import Logged
from executor.progress import TrainingProgress
from recovery.account import Account
from recovery.incident import sentence
from specs.options import TrainOptions
from specs.runlog import (
    Bucket,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    IncidentRecord,
    Record,
    SlowRecord,
    StartRecord,
    StepRecord,
    read_log,
)


class SupervisorLog:
    """The only writer of the log.  `step`, `evaluated`, `saved`: the last ones that the log holds."""

    def __init__(self, options: TrainOptions, started: float) -> None:
        self.account = Account(started)
        self.step = self.evaluated = self.saved = 0
        self.step_time = time.monotonic()  # of the last record of a step, or since training goes on
        self._path = options.out / "log.jsonl"
        self._log = RunLog(self._path)
        self._progress = TrainingProgress(0, options.optimizer.num_steps, enabled=True)
        self._live = Live(options)

    def __enter__(self) -> SupervisorLog:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, value, trace)
        self._live.close()
        self._log.close()

    def take(self, report: Logged) -> None:
        """A worker's record."""
        record = report.record
        self.account.told(report.seconds)
        match record:
            case StartRecord():
                self.rewind(record.step)
                record = record.model_copy(update={"seconds": self.account.seconds()})
            case StepRecord():
                if record.step <= self.step:
                    return
                self.step, self.step_time = record.step, time.monotonic()
            case EvaluationRecord():
                self.evaluated = record.step
            case CheckpointRecord():
                self.saved = record.step
        self.write(record)

    def write(self, record: Record) -> None:
        """Append, and show what is of interest."""
        self._log.write(record)
        self._progress.record(record)
        self._live.record(record)

    def note(self, text: str) -> None:
        """For the person who watches."""
        self._progress.note(f"plait: {text}")

    def catch_up(self) -> None:
        """Take note of steps that a worker wrote to the log itself, cut off from here and sure to be alone."""
        reached = 0
        for record in read_log(self._path):
            if isinstance(record, StartRecord | IncidentRecord | StepRecord):
                reached = record.step
        self.step = max(self.step, reached)

    def rewind(self, step: int) -> int:
        """Training goes on after `step`; gives the number of steps that are trained again."""
        redone = max(0, self.step - step)
        self.step = step
        self.evaluated, self.saved = min(self.evaluated, step), min(self.saved, step)
        self.step_time = time.monotonic()
        return redone

    def slow(self, rank: int, factor: float, *, rebalance: bool) -> None:
        """A rank is persistently slower than its peers."""
        self.write(SlowRecord(time=time.time(), step=self.step, rank=rank, factor=factor))
        hint = "" if rebalance else " --rebalance would give it less work."
        self.note(f"rank {rank} takes {factor:.2f} x as long for its own work as its peers.{hint}")

    def end(self, reason: Literal["finished", "interrupted"]) -> None:
        """The run is over."""
        self.account.close_generation()
        wall = self.account.wall_seconds
        seconds = self.account.seconds()
        self.write(EndRecord(time=time.time(), step=self.step, reason=reason, wall_seconds=wall, seconds=seconds))

    def incident(self, record: IncidentRecord, seconds: Mapping[Bucket, float], full_batch: int) -> None:
        """An interruption is over; `seconds` of it by bucket."""
        for bucket, spent in seconds.items():
            self.account.add(bucket, spent)
        self.write(record)
        self.note(sentence(record, full_batch=full_batch))
