"""Schedules: what their lists of actions must satisfy, and that every one trains like one process."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specs.plan import Plan
from specs.schedule import (
    Action,
    Actions,
    Held,
    Schedule,
    check_actions,
    format_actions,
    most_held,
    parse_actions,
    pipeline_actions,
    repeats,
    stage_actions,
    traffic,
)
from tests.layouts import ReplicaShape, StageShape, build, small_model
from tests.parity import Trace, largest_relative_error, run_rank, run_reference

if TYPE_CHECKING:
    from tests.gloo import GlooPool

NUM_STEPS = 3


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
def test_every_schedule_can_run(schedule: Schedule) -> None:
    """All shapes up to 9 stages, 4 virtual stages and 21 micro-batches, divisible or not."""
    for num_stages in range(1, 10):
        for num_virtual in range(2, 5) if schedule == "interleaved" else (1,):
            for m in (1, 2, 3, 5, 7, 8, 13, 16, 21):
                actions = pipeline_actions(
                    schedule, num_stages=num_stages, num_micro_batches=m, num_virtual=num_virtual
                )
                check_actions(actions, num_micro_batches=m, num_virtual=num_virtual)


def test_by_hand() -> None:
    """The lists that the papers draw."""
    zero_bubble = [
        format_actions(stage_actions("zb-h1", stage=stage, num_stages=3, num_micro_batches=4)) for stage in range(3)
    ]
    assert zero_bubble == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    interleaved = [
        format_actions(stage_actions("interleaved", stage=stage, num_stages=2, num_micro_batches=4, num_virtual=2))
        for stage in range(2)
    ]
    assert interleaved == [
        "F0 F1 1F0 1F1 F2 1B0 F3 1B1 1F2 B0 1F3 B1 1B2 1B3 B2 B3",
        "F0 F1 1F0 1B0 1F1 1B1 F2 B0 F3 B1 1F2 1B2 1F3 1B3 B2 B3",
    ]


@given(st.integers(1, 8), st.integers(1, 20))
def test_zero_bubble_holds_as_much_on_every_stage_as_1f1b_on_the_first(num_stages: int, m: int) -> None:
    """Activations and what waits for weight gradients together [arXiv 2401.10241, section 2.2]."""
    for stage in range(num_stages):
        actions = stage_actions("zb-h1", stage=stage, num_stages=num_stages, num_micro_batches=m)
        assert max(held.kept[0] + held.deferred[0] for held in most_held(actions)) == min(num_stages, m)
        whole = stage_actions("1f1b", stage=stage, num_stages=num_stages, num_micro_batches=m)
        assert [held.kept for held in most_held(whole)] == [(min(num_stages - stage, m),)]


@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 4))
def test_interleaved_holds_what_its_warm_up_says(num_stages: int, num_virtual: int, turns: int) -> None:
    for stage in range(num_stages):
        actions = stage_actions(
            "interleaved",
            stage=stage,
            num_stages=num_stages,
            num_micro_batches=turns * num_stages,
            num_virtual=num_virtual,
        )
        ahead = 2 * (num_stages - 1 - stage) + (num_virtual - 1) * num_stages + 1
        assert max(sum(held.kept) for held in most_held(actions)) == min(ahead, turns * num_stages * num_virtual)


@given(
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved"]), st.integers(1, 6), st.integers(2, 3), st.integers(1, 60)
)
def test_longer_steps_repeat_turns_and_hold_no_more(
    schedule: Schedule, num_stages: int, num_virtual: int, m: int
) -> None:
    if schedule != "interleaved" or num_stages == 1:
        schedule, num_virtual = "1f1b" if schedule == "interleaved" else schedule, 1
    few, turn, times = repeats(schedule, num_stages=num_stages, num_micro_batches=m)
    assert few + times * turn == m
    for stage in range(num_stages):
        short, whole = (
            stage_actions(schedule, stage=stage, num_stages=num_stages, num_micro_batches=n, num_virtual=num_virtual)
            for n in (few, m)
        )
        assert most_held(short) == most_held(whole)


@given(st.sampled_from(["1f1b", "interleaved", "zb-h1"]), st.integers(2, 5), st.integers(2, 12))
def test_no_moment_is_fuller_than_those_that_are_fullest(schedule: Schedule, num_stages: int, m: int) -> None:
    """Counted anew: what is held beside each action, that of its own micro-batch with it."""
    num_virtual = 3 if schedule == "interleaved" else 1
    options = {"num_stages": num_stages, "num_micro_batches": m, "num_virtual": num_virtual}
    for stage in range(num_stages):
        actions = stage_actions(schedule, stage=stage, **options)
        fullest = most_held(actions)
        reached = set()
        for number, action in enumerate(actions):
            done = {(kind, i, v) for kind, i, v in actions[:number]}
            own = {(i, v) for kind, i, v in actions[: number + 1] if kind == "F"}
            kept = [(i, v) for i, v in own if not {("B", i, v), ("I", i, v)} & done]
            waiting = [(i, v) for i, v in own if ("I", i, v) in done and ("W", i, v) not in done]
            now = Held(
                *(
                    tuple(sum(v == virtual for _, v in some) for virtual in range(num_virtual))
                    for some in (kept, waiting)
                ),
                action.virtual,
            )
            reached.add(now)
            assert any(
                now.working == most.working
                and all(a <= b for a, b in zip(now.kept + now.deferred, most.kept + most.deferred, strict=True))
                for most in fullest
            )
        assert "W" in {action.kind for action in actions} or reached >= set(fullest)


def words() -> st.SearchStrategy[Actions]:
    action = st.builds(Action, st.sampled_from(["F", "B", "I", "W"]), st.integers(0, 999), st.integers(0, 9))
    return st.lists(action, max_size=9).map(tuple)


@given(words())
def test_words_and_back(actions: Actions) -> None:
    assert parse_actions(format_actions(actions)) == actions


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["F0 B0"], "stage 0 lacks F1"),
        (["F0 B0 B1 F1"], "stage 0, action B1 comes before F1, whose result it needs"),
        (["F0 F1 B0 B1 F1"], "stage 0, action F1 stands there twice"),
        (["F0 F1 B0 B2"], "stage 0, action B2: there are 2 micro-batches, numbered from 0"),
        (["F0 F1 B0 1B1"], "stage 0, action 1B1: the stage has 1 virtual stages, numbered from 0"),
        (["F0 F1 B0 I1"], "stage 0 has I1 without W1"),
        (["F0 F1 B0 W1 I1"], "stage 0, action W1 comes before I1, whose result it needs"),
        (["F0 F1 B0 I0 W0 B1"], "stage 0, action I0: this micro-batch has gone back already"),
        (
            ["F0 B0 F1 B1", "F0 F1 B1 B0"],
            "the stages wait for each other: stage 0 at B0 and stage 1 at F1",
        ),
        (["F0 X1"], "'X1' is not an action such as F0, B12, I3, W3 or, on virtual stage 1, 1F0"),
    ],
)
def test_refusals(stages: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=r"stage|action") as error:
        check_actions(tuple(map(parse_actions, stages)), num_micro_batches=2, num_virtual=1)
    assert str(error.value) == message


@settings(max_examples=60)
@given(st.integers(2, 5), st.integers(1, 3), st.integers(1, 9))
def test_traffic_carries_every_result_once(num_stages: int, num_virtual: int, m: int) -> None:
    schedule: Schedule = "interleaved" if num_virtual > 1 else "zb-h1"
    sent = traffic(pipeline_actions(schedule, num_stages=num_stages, num_micro_batches=m, num_virtual=num_virtual))
    last = num_stages * num_virtual - 1
    expected = Counter(
        (kind, place % num_stages, following // num_stages, i)
        for place in range(last + 1)
        for kind, following in (("F", place + 1), ("B", place - 1))
        if 0 <= following <= last
        for i in range(m)
    )
    found = Counter((kind, stage, *key) for (kind, stage), messages in sent.items() for key in messages.order)
    assert found == expected
    assert all(1 <= messages.most_under_way <= len(messages.order) for messages in sent.values())


def cases() -> dict[str, Plan]:
    """Name -> plan."""
    plain, gpt, qwen = (
        small_model(),
        small_model(layernorm=True, bias=True, positions=16, tied=True),
        small_model(bias=True, qk_norm=True),
    )
    two, three = [StageShape(1), StageShape(1)], [StageShape(1)] * 3
    swapped = ("F1 F0 F2 B1 I0 W0 B2", "F1 I1 F0 F2 B0 W1 B2")
    around = ("F0 1F0 F1 1F1 1B1 1B0 B1 I0 W0", "F0 F1 1F0 1F1 1I1 1B0 B1 1W1 B0")
    return {
        "interleaved 2 x 2": build(plain, [ReplicaShape(two, 1, 4, "interleaved", 2)]),
        "interleaved 3 x 2, not divisible": build(plain, [ReplicaShape(three, 1, 5, "interleaved", 2)]),
        "interleaved 2 x 4, tied": build(gpt, [ReplicaShape(two, 1, 3, "interleaved", 4)]),
        "interleaved, unlike stages and blocks": build(
            plain,
            [ReplicaShape([StageShape(3, {"mlp": (1, 2)}), StageShape(2, {"mlp": (1, 1)})], 1, 3, "interleaved", 2)],
        ),
        "interleaved beside 1f1b": build(
            plain,
            [ReplicaShape(two, 1, 2, "interleaved", 2), ReplicaShape([StageShape(2), StageShape(1)], 1, 3)],
            zero=1,
        ),
        "zero bubble 3": build(plain, [ReplicaShape(three, 1, 5, "zb-h1")]),
        "zero bubble, few micro-batches": build(qwen, [ReplicaShape([StageShape(1)] * 4, 1, 2, "zb-h1")]),
        "zero bubble, tp 2": build(gpt, [ReplicaShape([StageShape(2), StageShape(2)], 1, 4, "zb-h1")]),
        "zero bubble, selective recompute": build(
            qwen, [ReplicaShape([StageShape(2), StageShape(1)], 1, 3, "zb-h1")], recompute="selective"
        ),
        "zero bubble, full recompute": build(
            plain, [ReplicaShape([StageShape(1), StageShape(2)], 1, 3, "zb-h1")], recompute="full"
        ),
        "given": build(plain, [ReplicaShape(two, 1, 3, "given", actions=swapped)]),
        "given, virtual stages": build(plain, [ReplicaShape(two, 1, 2, "given", 2, actions=around)]),
        "given, one stage": build(plain, [ReplicaShape([StageShape(2)], 1, 2, "given", actions=("F0 I0 F1 B1 W0",))]),
    }


CASES = cases()


@cache
def _reference(model_json: str, global_batch: int, seq_len: int) -> Trace:
    from specs.model import ModelSpec

    return run_reference(ModelSpec.model_validate_json(model_json), global_batch, seq_len, torch.float64, NUM_STEPS)


@pytest.mark.gloo
@pytest.mark.parametrize("name", CASES)
def test_schedule_trains_like_one_process(gloo_pool: GlooPool, name: str) -> None:
    plan = CASES[name]
    whole = _reference(plan.model.model_dump_json(), plan.training.global_batch, plan.training.seq_len)
    ranks = gloo_pool.run(run_rank, plan.world_size, plan.model_dump_json(), torch.float64, NUM_STEPS)
    for losses, norms, _, _ in ranks:
        assert losses == pytest.approx(whole.losses, rel=1e-10)
        assert norms == pytest.approx(whole.norms, rel=1e-10)
    gradients = largest_relative_error([p for rank in ranks for p in rank[2]], whole.gradients, complete=True)
    assert max(gradients.values()) < 1e-10, gradients
    weights = largest_relative_error([p for rank in ranks for p in rank[3]], whole.weights, complete=False)
    assert max(weights.values()) < 1e-10, weights
