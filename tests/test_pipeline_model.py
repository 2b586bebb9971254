"""The event simulation against its closed forms and against what any schedule must satisfy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.pipeline import action_spans, closed_form, simulate, simulate_actions
from specs.schedule import Action, Actions, Schedule, pipeline_actions

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


def lower_bound(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    num_micro_batches: int,
) -> float:
    """No schedule that keeps every stage on one action at a time is faster.

    # T >= max_s ( sum over i < s of (f_i + b_i + 2 x_i) + m (f_s + b_s) ),  and T >= one micro-batch's round trip
    """
    before, best = 0.0, sum(forward_seconds) + sum(backward_seconds) + 2.0 * sum(transfer_seconds)
    for stage, (forward, backward) in enumerate(zip(forward_seconds, backward_seconds, strict=True)):
        best = max(best, before + num_micro_batches * (forward + backward))
        before += forward + backward
        if stage < len(transfer_seconds):
            before += 2.0 * transfer_seconds[stage]
    return best


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


@st.composite
def any_schedule(
    draw: st.DrawFn,
) -> tuple[Schedule, tuple[Actions, ...], list[float], list[float], list[float], list[float], int, int]:
    """A schedule with seconds per place; weight gradients are a part of the backward."""
    schedule: Schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zb-h1"]))
    num_virtual = draw(st.integers(2, 3)) if schedule == "interleaved" else 1
    num_stages = draw(st.integers(2 if num_virtual > 1 else 1, 5))
    num_micro_batches = draw(st.integers(1, 11))
    places = num_stages * num_virtual
    forward = draw(st.lists(SECONDS, min_size=places, max_size=places))
    inputs = draw(st.lists(SECONDS, min_size=places, max_size=places))
    weight = draw(st.lists(SECONDS, min_size=places, max_size=places))
    transfer = draw(st.lists(st.floats(0.0, 3.0), min_size=places - 1, max_size=places - 1))
    backward = [i + w for i, w in zip(inputs, weight, strict=True)]
    actions = pipeline_actions(
        schedule, num_stages=num_stages, num_micro_batches=num_micro_batches, num_virtual=num_virtual
    )
    return schedule, actions, forward, backward, transfer, weight, num_micro_batches, num_virtual


def longest_paths(
    actions: tuple[Actions, ...],
    forward: list[float],
    backward: list[float],
    transfer: list[float],
    weight: list[float],
) -> dict[tuple[int, Action], float]:
    """End of every action, by recursion over what it must wait for; written apart from the simulation."""
    num_stages, last = len(actions), len(forward) - 1
    ends: dict[tuple[int, Action], float] = {}

    def end(stage: int, number: int) -> float:
        action = actions[stage][number]
        if (stage, action) in ends:
            return ends[stage, action]
        place = action.virtual * num_stages + stage
        start = end(stage, number - 1) if number else 0.0
        if action.kind == "F" and place > 0:
            start = max(start, of(place - 1, ("F",), action.micro_batch) + transfer[place - 1])
        elif action.kind in "BI":
            needed = of(place + 1, ("B", "I"), action.micro_batch) + transfer[place] if place < last else 0.0
            start = max(start, needed, of(place, ("F",), action.micro_batch))
        elif action.kind == "W":
            start = max(start, of(place, ("I",), action.micro_batch))
        lasts = {"F": forward, "B": backward, "W": weight}.get(action.kind)
        seconds = lasts[place] if lasts is not None else backward[place] - weight[place]
        ends[stage, action] = start + seconds
        return ends[stage, action]

    def of(place: int, kinds: tuple[str, ...], micro_batch: int) -> float:
        stage = place % num_stages
        for number, action in enumerate(actions[stage]):
            if (action.virtual, action.micro_batch) == (place // num_stages, micro_batch) and action.kind in kinds:
                return end(stage, number)
        raise AssertionError("the schedule lacks an action")

    for stage, own in enumerate(actions):
        for number in range(len(own)):
            end(stage, number)
    return ends


@settings(max_examples=150, deadline=None)
@given(any_schedule())
def test_simulation_is_the_longest_path(case) -> None:
    schedule, actions, forward, backward, transfer, weight, num_micro_batches, num_virtual = case
    ends = longest_paths(actions, forward, backward, transfer, weight)
    timing = simulate(
        schedule, forward, backward, transfer, num_micro_batches, weight_seconds=weight, num_virtual=num_virtual
    )
    assert timing.makespan_seconds == pytest.approx(max(ends.values()))
    same = simulate_actions(actions, forward, backward, transfer, weight_seconds=weight)
    assert timing.finish_seconds == pytest.approx(same.finish_seconds, rel=1e-12)
    assert timing.idle_seconds == pytest.approx(same.idle_seconds, rel=1e-9, abs=1e-9)
    spans = action_spans(actions, forward, backward, transfer, weight_seconds=weight)
    assert {(span.stage, span.action): span.stop for span in spans} == pytest.approx(ends)
    for stage, (finish, idle) in enumerate(zip(timing.finish_seconds, timing.idle_seconds, strict=True)):
        work = sum(span.stop - span.start for span in spans if span.stage == stage)
        assert finish == pytest.approx(idle + work)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["1f1b", "zb-h1", "interleaved"]),
    st.integers(1, 7),
    st.integers(2, 4),
    st.integers(0, 40),
    st.lists(st.one_of(SECONDS, st.sampled_from([1.0, 2.0, 2.0 + 1e-9])), min_size=28, max_size=28),
    st.lists(st.sampled_from([0.0, 0.1, 3.0]), min_size=27, max_size=27),
)
def test_turns_that_repeat_are_what_the_whole_schedule_does(
    schedule: Schedule, num_stages: int, num_virtual: int, more: int, sizes: list[float], links: list[float]
) -> None:
    """Long steps, where the simulation leaves out turns, against every action of the whole step played."""
    num_virtual = num_virtual if schedule == "interleaved" and num_stages > 1 else 1
    schedule = schedule if num_virtual > 1 or schedule != "interleaved" else "1f1b"
    places = num_stages * num_virtual
    forward, transfer = sizes[:places], links[: places - 1]
    backward = [f + w for f, w in zip(sizes[-places:], forward, strict=True)]
    m = 4 * num_stages + more * (num_stages if schedule == "interleaved" else 1)
    actions = pipeline_actions(schedule, num_stages=num_stages, num_micro_batches=m, num_virtual=num_virtual)
    options = {"weight_seconds": forward}
    short = simulate(schedule, forward, backward, transfer, m, num_virtual=num_virtual, **options)
    whole = simulate_actions(actions, forward, backward, transfer, **options)
    assert short.makespan_seconds == pytest.approx(whole.makespan_seconds, rel=1e-12)
    assert short.finish_seconds == pytest.approx(whole.finish_seconds, rel=1e-12)
    assert short.idle_seconds == pytest.approx(whole.idle_seconds, rel=1e-9, abs=1e-9)


@settings(max_examples=300)
@given(any_schedule())
def test_closed_forms_of_split_and_interleaved_are_never_above_the_simulation(case) -> None:
    schedule, _, forward, backward, transfer, weight, num_micro_batches, num_virtual = case
    if schedule not in ("zb-h1", "interleaved"):
        return
    options = {"weight_seconds": weight, "num_virtual": num_virtual}
    makespan = simulate(schedule, forward, backward, transfer, num_micro_batches, **options).makespan_seconds
    assert closed_form(schedule, forward, backward, transfer, num_micro_batches, **options) <= makespan * (1 + 1e-9)


@settings(max_examples=300)
@given(
    st.sampled_from(["zb-h1", "interleaved"]),
    st.integers(2, 8),
    st.integers(2, 4),
    st.integers(1, 6),
    st.lists(st.floats(1.0, 2.0), min_size=32, max_size=32),
    st.lists(st.floats(0.0, 0.3), min_size=32, max_size=32),
)
def test_closed_forms_of_split_and_interleaved_are_close(
    schedule: Schedule, num_stages: int, num_virtual: int, turns: int, sizes: list[float], links: list[float]
) -> None:
    """Stages that differ by up to a factor of two, backward twice the forward, weights half of that."""
    num_virtual = num_virtual if schedule == "interleaved" else 1
    forward, transfer = sizes[: num_stages * num_virtual], links[: num_stages * num_virtual - 1]
    options = {"weight_seconds": forward, "num_virtual": num_virtual}
    arguments = (forward, [2.0 * f for f in forward], transfer, turns * num_stages)
    makespan = simulate(schedule, *arguments, **options).makespan_seconds
    assert makespan <= closed_form(schedule, *arguments, **options) * (1.35 if schedule == "interleaved" else 1.25)


@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 6), SECONDS, SECONDS)
def test_equal_places_interleave_exactly(
    num_stages: int, num_virtual: int, turns: int, forward: float, backward: float
) -> None:
    """The bubble is (P - 1) (f + b) of one place, 1 / V of the stage's [arXiv 2104.04473, section 2.2.2]."""
    places, m = num_stages * num_virtual, turns * num_stages
    arguments = ([forward] * places, [backward] * places, [0.0] * (places - 1), m)
    expected = (m * num_virtual + num_stages - 1) * (forward + backward)
    assert simulate("interleaved", *arguments, num_virtual=num_virtual).makespan_seconds == pytest.approx(expected)
    assert closed_form("interleaved", *arguments, num_virtual=num_virtual) == pytest.approx(expected)


@given(st.integers(1, 8), st.integers(0, 12), SECONDS)
def test_equal_stages_have_the_published_zero_bubble_time(num_stages: int, more: int, seconds: float) -> None:
    """The bubble of ZB-H1 is (P - 1) (f + i - w) where the three parts are equal [arXiv 2401.10241, section 2.3]."""
    m = num_stages + more
    arguments = ([seconds] * num_stages, [2.0 * seconds] * num_stages, [0.0] * (num_stages - 1), m)
    options = {"weight_seconds": [seconds] * num_stages}
    expected = (3.0 * m + num_stages - 1) * seconds
    assert simulate("zb-h1", *arguments, **options).makespan_seconds == pytest.approx(expected)
    assert closed_form("zb-h1", *arguments, **options) == pytest.approx(expected)
