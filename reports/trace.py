"""One step in the Trace Event Format that Perfetto and chrome://tracing read: a lane per rank, predicted and measured.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (complete events `X`,
metadata `M`; times in microseconds).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from cost_models.passes import ReplicaPass
from specs.plan import Plan, Prediction
from specs.runlog import ActionsRecord
from specs.schedule import parse_actions

Event = dict[str, Any]
PREDICTED, MEASURED = 1, 2  # process numbers
KINDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


class PredictedStep(NamedTuple):
    """The passes of one kind of replica, the step that they belong to, and its host seconds after the optimizer."""

    found: ReplicaPass
    predicted: Prediction
    host_seconds: float


def trace(plan: Plan, expected: PredictedStep | None, measured: ActionsRecord | None) -> dict[str, Any]:
    """The document.  None: lanes that are left out."""
    events: list[Event] = []
    stages = _stage_of(plan)
    if expected is not None:
        pipeline = expected.found.replica.pipeline
        ranks = next(replica.ranks for replica in plan.replicas if replica.pipeline == pipeline)
        events += [*_lanes(PREDICTED, "predicted", {rank: stages[rank] for rank in ranks})]
        events += _predicted(expected, {rank: stages[rank] for rank in ranks})
    if measured is not None:
        events += [
            *_lanes(MEASURED, f"measured, step {measured.step}", {rank: stages[rank] for rank in measured.actions})
        ]
        for rank, actions in measured.actions.items():
            events += [_event(MEASURED, rank, name, start, stop) for name, start, stop in actions]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": plan.model.name}}


def _stage_of(plan: Plan) -> dict[int, int]:
    """Stage of every rank."""
    found = {}
    for replica in plan.replicas:
        starts = plan.pipelines[replica.pipeline].stage_starts()
        for stage, (start, stop) in enumerate(pairwise(starts)):
            found.update(dict.fromkeys(replica.ranks[start:stop], stage))
    return found


def _lanes(process: int, name: str, stages: dict[int, int]) -> Iterator[Event]:
    """Names of a process and of its lanes, one for each rank."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for rank, stage in sorted(stages.items()):
        lane = f"rank {rank}, stage {stage}"
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": rank, "args": {"sort_index": rank}}


def _event(process: int, rank: int, name: str, start: float, stop: float) -> Event:
    """A complete event; actions of a schedule tell their micro-batch."""
    event: Event = {
        "ph": "X",
        "name": name,
        "cat": "term",
        "pid": process,
        "tid": rank,
        "ts": start * 1e6,
        "dur": (stop - start) * 1e6,
    }
    if name[-1:].isdigit():
        (action,) = parse_actions(name)
        args = {"micro_batch": action.micro_batch, "virtual_stage": action.virtual}
        event |= {"cat": KINDS[action.kind], "args": args}
    return event


def _predicted(expected: PredictedStep, stages: dict[int, int]) -> Iterator[Event]:
    """Passes, then gradient sync, optimizer and host, which end together on all ranks."""
    found, predicted, host_seconds = expected
    spans = found.spans()
    optimizer = predicted.step_terms.optimizer
    synced = predicted.step_time_seconds - optimizer - host_seconds
    for rank, stage in stages.items():
        for span in spans:
            if span.stage == stage:
                yield _event(PREDICTED, rank, str(span.action), span.start, span.stop)
        parts = (
            ("gradient_sync", found.timing.finish_seconds[stage], synced),
            ("optimizer", synced, synced + optimizer),
            ("other", synced + optimizer, synced + optimizer + host_seconds),
        )
        for name, start, stop in parts:
            if stop > start:
                yield _event(PREDICTED, rank, name, start, stop)
