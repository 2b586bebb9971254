"""What a run with known failures should take: the same trace of losses and returns, second by second, by bucket.

wall = start-up + sum over events of (detection + re-planning + re-forming + state transfer + partial step)
     + (kept steps + steps trained again) x step seconds of the layout that ran them + saves x stall + evaluation
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from specs.errors import BadInputError
from specs.plan import Plan
from specs.runlog import INCIDENT_BUCKETS, Bucket, IncidentRecord

# The plan that runs while these ranks of the first plan are out.
WayOn = Callable[[frozenset[int]], Plan]


@dataclass(frozen=True, slots=True)
class Event:
    """Ranks are lost or come back once `step` steps are kept; `redone_steps` of those taken are trained again.

    `restarted`: the process failed, its device goes on.  A return waits for the step boundary: it is not detected and
    spoils no step.
    """

    step: int
    lost: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    restarted: tuple[int, ...] = ()
    redone_steps: int = 0


@dataclass(frozen=True, slots=True)
class Interruptions:
    """Seconds of one interruption, measured or assumed; `partial_step` is the part of a step that a fault spoils.

    `startup` and `evaluation` once a run; each of `num_saves` saves stalls training for `save`.
    """

    detection: float
    replanning: float
    reforming: float
    state_transfer: float
    partial_step: float = 0.5
    startup: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0
    num_saves: int = 0

    def with_run(self, *, startup: float, evaluation: float, save: float, num_saves: int) -> Interruptions:
        """The same beside what a run takes without any interruption."""
        return replace(self, startup=startup, evaluation=evaluation, save=save, num_saves=num_saves)


@dataclass(frozen=True)
class TracePrediction:
    """Seconds by bucket, which add up to `wall_seconds`.  `tokens` of the steps that are kept.

    `degraded_seconds` are the part of "step" by which kept tokens took longer than in the first layout.  `goodput` is
    tokens per second of wall clock over those of the first layout without any interruption.
    """

    seconds: Mapping[Bucket, float]
    degraded_seconds: float
    tokens: int
    goodput: float
    layouts: tuple[tuple[int, float], ...] = field(default=())  # (first step, step seconds)

    @property
    def wall_seconds(self) -> float:
        return sum(self.seconds.values())


def predict_trace(
    plan: Plan, events: Sequence[Event], *, num_steps: int, interruptions: Interruptions, way_on: WayOn
) -> TracePrediction:
    """Play a trace of `num_steps` kept steps.

    Every plan needs its prediction.  Raises `BadInputError` for events out of order, beyond the last step, or of ranks
    that are not there to be lost or to return.
    """
    seconds: defaultdict[Bucket, float] = defaultdict(float)
    seconds["program_startup"] = interruptions.startup
    step_seconds, tokens_per_step = _speed(plan)
    healthy = tokens_per_step / step_seconds
    tokens, kept, out = 0, 0, frozenset[int]()
    layouts = [(0, step_seconds)]
    for event in (*events, Event(step=num_steps)):
        if not kept <= event.step <= num_steps:
            raise BadInputError(
                f"an event at step {event.step} does not lie between step {kept}, where the last one was, and the "
                f"{num_steps} steps of the run. Give events in order."
            )
        seconds["step"] += (event.step - kept) * step_seconds
        tokens += (event.step - kept) * tokens_per_step
        kept = event.step
        if not event.lost and not event.returned and not event.restarted:
            continue
        out = _out(out, event)
        if event.lost or event.restarted:
            seconds["failure_detection"] += interruptions.detection
            seconds["wasted_progress"] += (interruptions.partial_step + event.redone_steps) * step_seconds
        seconds["replanning"] += interruptions.replanning
        seconds["reforming"] += interruptions.reforming
        seconds["state_transfer"] += interruptions.state_transfer
        step_seconds, tokens_per_step = _speed(way_on(out) if out else plan)
        layouts.append((kept, step_seconds))
    if interruptions.evaluation:
        seconds["evaluation"] = interruptions.evaluation
    if interruptions.num_saves:
        seconds["checkpoint_save"] = interruptions.num_saves * interruptions.save
    wall = sum(seconds.values())
    return TracePrediction(
        seconds=dict(seconds),
        degraded_seconds=seconds["step"] - tokens / healthy,
        tokens=tokens,
        goodput=tokens / wall / healthy if wall else 0.0,
        layouts=tuple(layouts),
    )


def trace_of(incidents: Iterable[IncidentRecord]) -> tuple[list[Event], Interruptions]:
    """Events of a run log, and the mean seconds of its interruptions by part.

    Raises `BadInputError` for a log without incidents.
    """
    records = list(incidents)
    if not records:
        raise BadInputError("the run had no interruption, so there is no trace to predict.")
    events = [
        Event(
            step=record.step,
            lost=tuple(sorted(set(record.lost).difference(record.restarted))),
            returned=tuple(sorted(record.returned)),
            restarted=tuple(sorted(record.restarted)),
            redone_steps=record.redone_steps,
        )
        for record in records
    ]
    failed = [record for record in records if record.lost] or records

    def mean(part: str, of: Sequence[IncidentRecord]) -> float:
        assert part in INCIDENT_BUCKETS
        return fmean(record.seconds.get(part, 0.0) for record in of)

    return events, Interruptions(
        detection=mean("failure_detection", failed),
        replanning=mean("replanning", records),
        reforming=mean("reforming", records),
        state_transfer=mean("state_transfer", records),
    )


def _speed(plan: Plan) -> tuple[float, int]:
    """Seconds and tokens of a step."""
    if plan.predicted is None:
        raise BadInputError("a plan without a prediction cannot be played. Price it first (plait estimate).")
    return plan.predicted.step_time_seconds, plan.training.tokens_per_step


def _out(out: frozenset[int], event: Event) -> frozenset[int]:
    """Ranks that are out after an event."""
    gone = out.intersection(event.lost)
    if gone:
        raise BadInputError(f"rank {min(gone)} is lost at step {event.step}, but it is out already.")
    strange = set(event.returned) - out
    if strange:
        raise BadInputError(f"rank {min(strange)} returns at step {event.step}, but it is not out.")
    return (out | set(event.lost)) - set(event.returned)
