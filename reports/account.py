"""What a run's log says about its time: attempts, kept tokens, and every second by bucket.

A log holds one start record per process that trained (an attempt).  A step that a later attempt repeats, because
it was not in the checkpoint that this one resumed from, was done in vain: its seconds are `wasted_progress` and
its tokens do not count.  Between two attempts nothing runs; those seconds count as lost only when the attempt
before them broke off without an end record.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from specs.errors import BadInputError
from specs.runlog import (
    INCIDENT_BUCKETS,
    Bucket,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    IncidentRecord,
    MemoryRecord,
    Record,
    StartRecord,
    StepRecord,
)

DOWN = "between_attempts"


@dataclass
class Attempt:
    """The records of one process, in order."""

    start: StartRecord
    steps: list[StepRecord] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    memory: list[MemoryRecord] = field(default_factory=list)
    incidents: list[IncidentRecord] = field(default_factory=list)
    redone: list[StepRecord] = field(default_factory=list)  # steps that an interruption undid
    end: EndRecord | None = None

    @property
    def began(self) -> float:
        """When the process began, seconds since the epoch: what its start record had spent lies before it."""
        return self.start.time - sum(self.start.seconds.values())

    @property
    def stopped(self) -> float:
        """When it was last heard of."""
        if self.end is not None:
            return self.end.time
        later = [record.time for records in (self.steps, self.checkpoints, self.evaluations) for record in records]
        return max([self.start.time, *later])

    @property
    def wall_seconds(self) -> float:
        return self.end.wall_seconds if self.end is not None else self.stopped - self.began

    def seconds(self) -> dict[Bucket, float]:
        """Every second by bucket: the end record's account, else what the records before it add up to."""
        if self.end is not None:
            return dict(self.end.seconds)
        spent: dict[Bucket, float] = dict(self.start.seconds)
        parts: tuple[tuple[Bucket, Sequence[StepRecord | CheckpointRecord | EvaluationRecord]], ...] = (
            ("step", self.steps),
            ("step", self.redone),
            ("checkpoint_save", self.checkpoints),
            ("evaluation", self.evaluations),
        )
        for bucket, records in parts:
            spent[bucket] = spent.get(bucket, 0.0) + sum(record.seconds for record in records)
        for incident in self.incidents:
            for part, duration in incident.seconds.items():
                bucket = INCIDENT_BUCKETS.get(part)
                if bucket is not None:
                    spent[bucket] = spent.get(bucket, 0.0) + duration
        spent["other"] = spent.get("other", 0.0) + max(0.0, self.wall_seconds - sum(spent.values()))
        return spent

    def degraded_seconds(self) -> float:
        """What steps on fewer ranks took beyond as many median steps on all of them; 0 where there were none of those.

        First steps of a process, which warm up, are left out of the median.
        """
        few: list[float] = []
        whole: list[float] = []
        changes = [(incident.time, incident.world_size) for incident in self.incidents]
        for step in self.steps:
            size = next((n for time, n in reversed(changes) if time <= step.time), self.start.world_size)
            if size < self.start.world_size:
                few.append(step.seconds)
            elif not step.warm_up:
                whole.append(step.seconds)
        return max(0.0, sum(few) - len(few) * statistics.median(whole)) if whole else 0.0


@dataclass(frozen=True)
class Account:
    """A run as a whole.  `seconds` adds up to `wall_seconds`; `kept` are the steps that made lasting progress."""

    kept: tuple[StepRecord, ...]
    seconds: dict[str, float]
    wall_seconds: float
    num_attempts: int
    num_wasted_steps: int
    finished: bool

    @property
    def kept_tokens(self) -> int:
        return sum(step.tokens for step in self.kept)

    @property
    def goodput_tokens_per_second(self) -> float:
        """Kept tokens per second of the run's wall clock; 0 for a run of no time."""
        return self.kept_tokens / self.wall_seconds if self.wall_seconds else 0.0


def attempts_of(records: Sequence[Record]) -> list[Attempt]:
    """Records grouped by process.  Raises `BadInputError` when the log does not begin with a start record."""
    attempts: list[Attempt] = []
    for record in records:
        if isinstance(record, StartRecord):
            attempts.append(Attempt(record))
            continue
        if not attempts:
            raise BadInputError("the run log does not begin with a start record. Is it a whole log?")
        current = attempts[-1]
        match record:
            case StepRecord():
                current.steps.append(record)
            case CheckpointRecord():
                current.checkpoints.append(record)
            case EvaluationRecord():
                current.evaluations.append(record)
            case MemoryRecord():
                current.memory.append(record)
            case IncidentRecord():
                current.incidents.append(record)
                current.redone += [step for step in current.steps if step.step > record.step]
                current.steps = [step for step in current.steps if step.step <= record.step]
            case EndRecord():
                current.end = record
    return attempts


def account_of(attempts: Sequence[Attempt]) -> Account:
    """Kept steps and seconds of all attempts together."""
    kept: dict[int, StepRecord] = {}
    seconds: dict[str, float] = {}
    wall = 0.0
    num_wasted = 0
    for number, attempt in enumerate(attempts):
        wasted = [kept.pop(step) for step in sorted(kept) if step > attempt.start.step]
        wasted += attempt.redone
        num_wasted += len(wasted)
        kept.update((step.step, step) for step in attempt.steps)
        if number and attempts[number - 1].end is None:
            gap = max(0.0, attempt.began - attempts[number - 1].stopped)
            seconds[DOWN] = seconds.get(DOWN, 0.0) + gap
            wall += gap
        for bucket, spent in attempt.seconds().items():
            seconds[bucket] = seconds.get(bucket, 0.0) + spent
        wall += attempt.wall_seconds
        for bucket, spent in (
            ("wasted_progress", sum(step.seconds for step in wasted)),
            ("degraded_operation", attempt.degraded_seconds()),
        ):
            if spent:
                seconds["step"] -= spent
                seconds[bucket] = seconds.get(bucket, 0.0) + spent
    return Account(
        kept=tuple(kept[step] for step in sorted(kept)),
        seconds=seconds,
        wall_seconds=wall,
        num_attempts=len(attempts),
        num_wasted_steps=num_wasted,
        finished=bool(attempts) and attempts[-1].end is not None,
    )
