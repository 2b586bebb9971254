"""The event simulation against its closed forms and against what any schedule must satisfy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.pipeline import closed_form, lower_bound, simulate
from specs.plan import Schedule

SECONDS = st.floats(0.01, 10.0)
SCHEDULES = st.sampled_from(["1f1b", "gpipe"])


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[float], list[float], int]:
    num_stages = draw(st.integers(1, 6))
    forward = draw(st.lists(SECONDS, min_size=num_stages, max_size=num_stages))
    backward = draw(st.lists(SECONDS, min_size=num_stages, max_size=num_stages))
    transfer = draw(st.lists(st.floats(0.0, 3.0), min_size=num_stages - 1, max_size=num_stages - 1))
    return forward, backward, transfer, draw(st.integers(1, 12))


@given(SCHEDULES, st.integers(1, 8), st.integers(1, 20), SECONDS, SECONDS)
def test_equal_stages_take_the_closed_form(
    schedule: Schedule, num_stages: int, num_micro_batches: int, forward: float, backward: float
) -> None:
    arguments = ([forward] * num_stages, [backward] * num_stages, [0.0] * (num_stages - 1), num_micro_batches)
    expected = (num_stages + num_micro_batches - 1) * (forward + backward)
    assert simulate(schedule, *arguments).makespan_seconds == pytest.approx(expected)
    assert closed_form(schedule, *arguments) == pytest.approx(expected)


@settings(max_examples=300)
@given(SCHEDULES, pipelines(), st.floats(0.1, 5.0))
def test_simulation_lies_between_the_bounds(
    schedule: Schedule, stages: tuple[list[float], list[float], list[float], int], ratio: float
) -> None:
    """With one ratio of backward to forward, as in a model of equal layers."""
    forward, _, transfer, num_micro_batches = stages
    arguments = (forward, [ratio * f for f in forward], transfer, num_micro_batches)
    makespan = simulate(schedule, *arguments).makespan_seconds
    assert lower_bound(*arguments) <= makespan * (1 + 1e-9)
    assert makespan <= closed_form(schedule, *arguments) * (1 + 1e-9)


@settings(max_examples=300)
@given(pipelines())
def test_1f1b_lies_between_the_bounds_for_any_ratio(
    stages: tuple[list[float], list[float], list[float], int],
) -> None:
    """Stages of unlike ratio can be slower than the 1F1B form, without transfers never slower than GPipe's."""
    forward, backward, transfer, num_micro_batches = stages
    makespan = simulate("1f1b", *stages).makespan_seconds
    assert lower_bound(*stages) <= makespan * (1 + 1e-9)
    alone = (forward, backward, [0.0] * len(transfer), num_micro_batches)
    assert simulate("1f1b", *alone).makespan_seconds <= closed_form("gpipe", *alone) * (1 + 1e-9)


@given(pipelines())
def test_gpipe_is_exact(stages: tuple[list[float], list[float], list[float], int]) -> None:
    assert simulate("gpipe", *stages).makespan_seconds == pytest.approx(closed_form("gpipe", *stages))


@settings(max_examples=200)
@given(pipelines())
def test_closed_form_is_exact_in_the_long_run(stages: tuple[list[float], list[float], list[float], int]) -> None:
    forward, backward, transfer, _ = stages
    few, many = 40, 160
    rate = (
        simulate("1f1b", forward, backward, transfer, many).makespan_seconds
        - simulate("1f1b", forward, backward, transfer, few).makespan_seconds
    ) / (many - few)
    stated = (
        closed_form("1f1b", forward, backward, transfer, many) - closed_form("1f1b", forward, backward, transfer, few)
    ) / (many - few)
    assert rate == pytest.approx(stated, rel=0.02)


@given(SCHEDULES, pipelines(), st.integers(0, 5), st.floats(0.0, 5.0))
def test_slower_stage_never_helps(
    schedule: Schedule, stages: tuple[list[float], list[float], list[float], int], where: int, extra: float
) -> None:
    forward, backward, transfer, num_micro_batches = stages
    slower = list(forward)
    slower[where % len(forward)] += extra
    before = simulate(schedule, forward, backward, transfer, num_micro_batches).makespan_seconds
    after = simulate(schedule, slower, backward, transfer, num_micro_batches).makespan_seconds
    assert after >= before * (1 - 1e-12)


@given(SCHEDULES, pipelines())
def test_idle_and_work_fill_each_stage(
    schedule: Schedule, stages: tuple[list[float], list[float], list[float], int]
) -> None:
    forward, backward, _, num_micro_batches = stages
    timing = simulate(schedule, *stages)
    for finish, idle, f, b in zip(timing.finish_seconds, timing.idle_seconds, forward, backward, strict=True):
        assert finish == pytest.approx(idle + num_micro_batches * (f + b))


def test_by_hand() -> None:
    """Two stages, the second twice as slow, two micro-batches: F0 | F1 F0' | B0' ... by pencil."""
    timing = simulate("1f1b", [1.0, 2.0], [2.0, 4.0], [0.5], 2)
    # s1: F0 1.5-3.5, B0 3.5-7.5, F1 7.5-9.5, B1 9.5-13.5;  s0: B0 8-10, B1 14-16
    assert timing.makespan_seconds == pytest.approx(16.0)
    assert timing.finish_seconds == pytest.approx((16.0, 13.5))
