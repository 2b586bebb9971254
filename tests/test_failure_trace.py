"""A run with known failures, predicted: held to sums done by hand, and to the limits."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cost_models.failure_trace import Event, Interruptions, TracePrediction, predict_trace, trace_of
from cost_models.step import price
from planner.contingency import replan
from reports.failure_trace import compare_records, render
from specs.contingency import plan_after
from specs.errors import BadInputError
from specs.plan import Plan, StepTerms
from specs.runlog import IncidentRecord, Record, StartRecord, StepRecord
from tests.layouts import ReplicaShape, StageShape, build, small_model
from tests.synthetic_costs import SyntheticCosts

COSTS = SyntheticCosts(3)
NOTHING = Interruptions(detection=0.0, replanning=0.0, reforming=0.0, state_transfer=0.0, partial_step=0.0)
SOME = Interruptions(
    detection=0.5,
    replanning=0.2,
    reforming=1.0,
    state_transfer=0.3,
    partial_step=0.5,
    startup=4.0,
    save=0.25,
    num_saves=4,
    evaluation=0.75,
)


def timed(plan: Plan, seconds: float) -> Plan:
    predicted = price(plan, COSTS)
    return plan.with_results(predicted=predicted.model_copy(update={"step_time_seconds": seconds}))


PLAN = timed(build(small_model(), [ReplicaShape([StageShape(2)], 1, 2)] * 2), 2.0)


def slower(out: frozenset[int]) -> Plan:
    """Each rank that is out costs half a second a step; with three out the batch shrinks to 3 of 4."""
    plan = timed(PLAN, 2.0 + 0.5 * len(out))
    if len(out) < 3:
        return plan
    return plan.model_copy(update={"training": plan.training.model_copy(update={"global_batch": 3})})


def play(events: list[Event], num_steps: int = 40, interruptions: Interruptions = SOME) -> TracePrediction:
    return predict_trace(PLAN, events, num_steps=num_steps, interruptions=interruptions, way_on=slower)


def test_a_trace_by_hand() -> None:
    """20 steps of 2 s, one lost, 10 of 2.5 s, another lost with 3 steps redone, 5 of 3 s, both back, 5 of 2 s."""
    found = play(
        [Event(20, lost=(1,)), Event(30, lost=(3,), redone_steps=3), Event(35, returned=(1, 3))],
    )
    assert found.seconds == {
        "program_startup": 4.0,
        "step": 20 * 2.0 + 10 * 2.5 + 5 * 3.0 + 5 * 2.0,
        "failure_detection": 2 * 0.5,
        "wasted_progress": 0.5 * 2.0 + 3.5 * 2.5,
        "replanning": pytest.approx(3 * 0.2),
        "reforming": 3 * 1.0,
        "state_transfer": pytest.approx(3 * 0.3),
        "checkpoint_save": 4 * 0.25,
        "evaluation": 0.75,
    }
    assert found.degraded_seconds == pytest.approx(10 * 0.5 + 5 * 1.0)
    tokens = 40 * 4 * PLAN.training.seq_len
    assert found.tokens == tokens
    assert found.wall_seconds == pytest.approx(4 + 90 + 1 + 9.75 + 0.6 + 3 + 0.9 + 1 + 0.75)
    assert found.goodput == pytest.approx(40 * 2.0 / found.wall_seconds)
    assert found.layouts == ((0, 2.0), (20, 2.5), (30, 3.0), (35, 2.0))


def test_a_smaller_batch_counts_for_what_it_trains() -> None:
    found = play([Event(10, lost=(0, 1, 2))], num_steps=20, interruptions=NOTHING)
    assert found.tokens == (10 * 4 + 10 * 3) * PLAN.training.seq_len
    assert found.wall_seconds == 10 * 2.0 + 10 * 3.5
    assert found.goodput == pytest.approx((70 / 55.0) / (4 / 2.0))


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=3, unique=True))
def test_limits(at: list[int]) -> None:
    """Nothing happens: full goodput.  Free interruptions: only slower steps are left.  They never add speed."""
    assert play([], interruptions=NOTHING).goodput == pytest.approx(1.0)
    events = [Event(step, lost=(rank,)) for rank, step in enumerate(sorted(at))]
    free, paid = play(events, 50, NOTHING), play(events, 50)
    assert set(free.seconds) >= {"step"}
    assert free.wall_seconds == pytest.approx(free.seconds["step"])
    assert free.degraded_seconds >= 0.0
    assert paid.goodput < free.goodput <= 1.0


def test_a_real_way_on_is_played() -> None:
    plan = build(small_model(), [ReplicaShape([StageShape(2)], 1, 2)] * 2)
    plan = plan.with_results(predicted=price(plan, COSTS))

    def way_on(out: frozenset[int]) -> Plan:
        return plan_after(plan, replan(plan, COSTS, sorted(out)))

    found = predict_trace(plan, [Event(5, lost=(2,))], num_steps=10, interruptions=NOTHING, way_on=way_on)
    after = way_on(frozenset({2})).predicted
    assert plan.predicted is not None
    assert after is not None
    assert found.seconds["step"] == pytest.approx(5 * (plan.predicted.step_time_seconds + after.step_time_seconds))


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Event(41, lost=(1,))], "40 steps"),
        ([Event(9, lost=(1,)), Event(8, lost=(2,))], "in order"),
        ([Event(9, lost=(1,)), Event(10, lost=(1,))], "out already"),
        ([Event(9, returned=(1,))], "not out"),
    ],
)
def test_traces_that_cannot_be(events: list[Event], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        play(events)


def incident(**changes: Any) -> IncidentRecord:
    fields: dict[str, Any] = {
        "time": 1.0,
        "generation": 1,
        "step": 7,
        "redone_steps": 0,
        "lost": {2: "killed"},
        "policy": "reduced",
        "layout": "",
        "world_size": 3,
        "global_batch": 4,
        "batch_kept": True,
        "source": "memory",
        "seconds": {"failure_detection": 0.4, "reforming": 2.0, "replanning": 0.1, "state_transfer": 0.3},
    }
    return IncidentRecord(**{**fields, **changes})


def test_a_run_log_becomes_a_trace() -> None:
    back = incident(
        step=9, lost={}, returned=(2,), seconds={"reforming": 1.0, "replanning": 0.3, "failure_detection": 0.0}
    )
    events, mean = trace_of([incident(), back])
    assert events == [Event(7, lost=(2,)), Event(9, returned=(2,))]
    assert (mean.detection, mean.reforming) == (0.4, 1.5)
    assert mean.replanning == pytest.approx(0.2)
    assert mean.state_transfer == pytest.approx(0.15)
    with pytest.raises(BadInputError, match="no interruption"):
        trace_of([])


def test_a_run_is_set_beside_its_prediction() -> None:
    """Ten steps of 2 s and ten of 2.5 s as predicted, an interruption of 3 s: the error is what start-up rounds to."""
    seconds = {
        "failure_detection": 0.5,
        "partial_step": 1.0,
        "replanning": 0.2,
        "reforming": 1.0,
        "state_transfer": 0.3,
    }
    terms = StepTerms(forward=1.0)
    steps = [
        StepRecord(
            time=14.0 + 2.0 * step if step <= 10 else 37.0 + 2.5 * (step - 10),
            step=step,
            loss=1.0,
            gradient_norm=1.0,
            learning_rate=0.1,
            tokens=4 * PLAN.training.seq_len,
            seconds=2.0 if step <= 10 else 2.5,
            terms=terms,
            warm_up=False,
        )
        for step in range(1, 21)
    ]
    start = StartRecord(
        time=14.0,
        step=0,
        plan_sha256=PLAN.sha256(),
        world_size=4,
        backend="gloo",
        device="cpu",
        versions={},
        seconds={"program_startup": 4.0},
    )
    lost = incident(step=10, time=37.0, seconds=seconds)
    records: list[Record] = [start, *steps[:10], lost, *steps[10:]]
    found = compare_records(PLAN, records, slower)
    assert found is not None
    assert found.error == pytest.approx(0.0, abs=1e-9)
    rows = {name: (ours, measured) for name, ours, measured in found.rows}
    assert rows["degraded_operation"] == (pytest.approx(5.0), pytest.approx(5.0))
    assert rows["step"] == (pytest.approx(40.0), pytest.approx(40.0))
    assert rows["wasted_progress"] == (pytest.approx(1.0), pytest.approx(1.0))
    assert found.predicted.wall_seconds == pytest.approx(4.0 + 45.0 + 3.0)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(found))
    assert "degraded operation" in console.export_text()
    assert compare_records(PLAN, [start, *steps], slower) is None
