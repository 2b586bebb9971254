"""Predicted against measured on synthetic logs whose answer is known."""

from __future__ import annotations

import io
import json
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import cli
from reports.account import account_of, attempts_of
from reports.compare import Spread, compare, compare_run
from reports.comparison_plot import draw
from reports.comparison_table import render
from specs.errors import BadInputError
from specs.runlog import CheckpointRecord, EvaluationRecord, Record
from specs.units import num_bytes, percent, rate, seconds
from tests import runs


def compared(records: list[Record]):
    return compare(runs.plan(), records, where="run r")


def test_a_perfect_prediction_has_no_error() -> None:
    result = compared(runs.whole_run())
    assert result.step_time.error == pytest.approx(0.0)
    assert all(row.error is None or abs(row.error) < 1e-12 for row in result.terms.values())
    assert result.tokens_per_second.measured.median == pytest.approx(512.0)
    assert result.num_steps == 5  # the warm-up step is left out
    assert result.notes == ()


def test_errors_are_relative_to_the_measured() -> None:
    result = compared(runs.whole_run(slower=1.25))
    assert result.step_time.error == pytest.approx(-0.2)
    assert result.terms["forward"].error == pytest.approx(-0.2)
    assert result.memory["peak"].error == pytest.approx(1000 / 1100 - 1)
    assert result.memory["activations"].measured.median == 250  # of the fullest rank


def test_warm_up_does_not_count() -> None:
    records = runs.whole_run()
    slow = runs.steps(1005.0, [1], slower=50.0, warm_up=1)[0]
    assert compared([records[0], slow, *records[2:]]).step_time == compared(records).step_time


def test_goodput_is_kept_tokens_over_wall_clock() -> None:
    result = compared(runs.whole_run(num_steps=6))
    assert result.account.wall_seconds == pytest.approx(5.0 + 6.0)
    assert result.account.goodput_tokens_per_second == pytest.approx(6 * 512 / 11.0)
    assert result.steady_goodput == pytest.approx(512.0)
    assert sum(result.account.seconds.values()) == pytest.approx(result.account.wall_seconds)


def killed_and_resumed(gap: float = 7.0) -> list[Record]:
    """Six steps, killed; resumed from step 4; steps 5 and 6 again, then 7 and 8."""
    first = runs.steps(1005.0, range(1, 7), warm_up=1)
    again = first[-1].time + gap + 5.0
    second = runs.steps(again, range(5, 9))
    return [
        runs.start(1005.0),
        *first,
        runs.start(again, step=4),
        *second,
        runs.end(second[-1].time, step=8, startup=5.0, in_steps=4.0),
    ]


def test_steps_done_twice_are_lost_once() -> None:
    account = account_of(attempts_of(killed_and_resumed()))
    assert [step.step for step in account.kept] == list(range(1, 9))
    assert account.num_wasted_steps == 2
    assert account.seconds["wasted_progress"] == pytest.approx(2.0)
    assert account.seconds["step"] == pytest.approx(8.0)
    assert account.seconds["between_attempts"] == pytest.approx(7.0)
    assert account.wall_seconds == pytest.approx(5 + 6 + 7 + 5 + 4)
    assert sum(account.seconds.values()) == pytest.approx(account.wall_seconds)
    assert account.kept_tokens == 8 * 512


def test_a_pause_after_a_proper_end_is_not_lost() -> None:
    records = [*runs.whole_run(num_steps=3), runs.start(9000.0, step=3), *runs.steps(9000.0, range(4, 6))]
    account = account_of(attempts_of(records))
    assert "between_attempts" not in account.seconds
    assert account.wall_seconds == pytest.approx((5 + 3) + (5 + 2))
    assert not account.finished


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.floats(0, 100))
def test_buckets_add_up_however_often_a_run_breaks_off(first: int, back: int, more: int, gap: float) -> None:
    resumed = max(0, first - back)
    done = runs.steps(1005.0, range(1, first + 1))
    again = done[-1].time + gap + 5.0
    records = [runs.start(1005.0), *done, runs.start(again, step=resumed)]
    records += runs.steps(again, range(resumed + 1, resumed + more + 1))
    account = account_of(attempts_of(records))
    assert sum(account.seconds.values()) == pytest.approx(account.wall_seconds)
    assert account.kept_tokens == (resumed + more) * 512
    assert account.num_wasted_steps == first - resumed
    assert all(value >= -1e-9 for value in account.seconds.values())


def test_checkpoints_and_evaluations_have_their_buckets() -> None:
    done = runs.steps(1005.0, range(1, 4))
    stop = done[-1].time
    records: list[Record] = [
        runs.start(1005.0),
        *done,
        CheckpointRecord(time=stop + 2, step=3, path="c", size_bytes=9, seconds=1.5),
        EvaluationRecord(time=stop + 3, step=3, loss=2.0, tokens=10, seconds=0.5),
    ]
    account = account_of(attempts_of(records))
    assert account.seconds == pytest.approx(
        {"program_startup": 5, "step": 3, "checkpoint_save": 1.5, "evaluation": 0.5, "other": 1.0}
    )


def test_the_sentence_names_the_largest_difference() -> None:
    slow = compared(runs.whole_run(tp_communication=0.33, forward=0.35)).explanation
    assert slow == (
        "A step takes 1.30 s, 300 ms (30.0 %) more than predicted; the largest part of that is TP communication "
        "(330 ms measured, 80.0 ms predicted: 250 ms more, 83.3 % of the gap)."
    )
    fast = compared(runs.whole_run(backward=0.50)).explanation
    assert "100 ms (10.0 %) less than predicted; the largest part of that is backward" in fast
    assert "100.0 % of the gap" in fast


def test_the_sentence_admits_terms_that_cancel() -> None:
    more = compared(runs.whole_run(backward=0.50, forward=0.41)).explanation
    assert "10.0 ms (1.0 %) more than predicted; the largest part of that is forward" in more
    assert "110 ms more, 1,100 % of the gap; other terms offset some of it)." in more
    less = compared(runs.whole_run(backward=0.50, forward=0.36, tp_communication=0.14)).explanation
    assert "20.0 ms (2.0 %) more than predicted; the largest single difference goes the other way: backward" in less
    assert "100 ms less), and other terms outweigh it." in less


@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=30))
def test_spread_is_ordered_and_exact_for_the_median(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread.median == statistics.median(values)
    assert min(values) <= spread.p10 <= spread.median <= spread.p90 <= max(values)


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    records = runs.whole_run()[:-1]
    folder = runs.write(tmp_path / "run", records, tail='{"kind": "step", "time": 10')
    result = compare_run(folder)
    assert result.num_steps == 5
    assert "killed or still runs" in result.notes[0]


def test_a_plan_that_is_not_the_trained_one_is_noted(tmp_path: Path) -> None:
    other = runs.plan().model_copy(update={"memory_cap_bytes": 5})
    folder = runs.write(tmp_path / "run", runs.whole_run(), of=other)
    assert "plan.json is not" in compare_run(folder).notes[0]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], "the log has no step. The run stopped before its first one"),
        ([runs.start(1005.0)], "the log has no step. The run stopped before its first one"),
        (
            [runs.start(1005.0), *runs.steps(1005.0, [1, 2], warm_up=2)],
            "no step to measure (2 steps kept, all of them warm-up). Train for more steps",
        ),
        (runs.steps(1005.0, [1]), "does not begin with a start record"),
    ],
)
def test_runs_that_cannot_be_compared(records: list[Record], expected: str) -> None:
    with pytest.raises(BadInputError) as caught:
        compared(records)
    assert expected in str(caught.value)


def test_a_plan_without_prediction_is_refused() -> None:
    bare = runs.plan().model_copy(update={"predicted": None})
    with pytest.raises(BadInputError, match="no predicted numbers"):
        compare(bare, runs.whole_run(), where="run r")


def test_table_fits_80_columns_and_has_every_term() -> None:
    out = io.StringIO()
    result = compared(killed_and_resumed())
    Console(file=out, width=80).print(render(result))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for word in (
        "forward",
        "backward",
        "TP communication",
        "optimizer",
        "step",
        "goodput, whole run",
        "between attempts",
    ):
        assert word in text


def test_command(tmp_path: Path) -> None:
    folder = runs.write(tmp_path / "run", runs.whole_run(slower=1.25))
    result = CliRunner().invoke(cli.app, ["compare", str(folder), "--json"])
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["step_time_seconds"]["error"] == pytest.approx(-0.2)
    assert set(data["step_terms_seconds"]) == set(type(runs.PREDICTED).model_fields)
    assert data["goodput_tokens_per_second"]["predicted"] == 480.0


def test_picture_is_drawn_whole(tmp_path: Path) -> None:
    draw(compared(runs.whole_run(slower=1.25)), tmp_path / "terms.svg")
    root = ET.fromstring((tmp_path / "terms.svg").read_text())
    assert root.tag.endswith("svg")
    with pytest.raises(BadInputError, match="the ending must be one of png, svg, pdf"):
        draw(compared(runs.whole_run()), tmp_path / "terms.gif")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (seconds(0), "0"),
        (seconds(3.21e-5), "32.1 us"),
        (seconds(0.9996e-3), "1.00 ms"),
        (seconds(0.99949), "999 ms"),
        (seconds(0.9996), "1.00 s"),
        (seconds(99.96), "1 min 40 s"),
        (seconds(245), "4 min 05 s"),
        (seconds(7800), "2 h 10 min"),
        (seconds(-0.5), "-500 ms"),
        (percent(0.1234), "12.3 %"),
        (percent(-0.1234, signed=True), "-12.3 %"),
        (percent(17.647, signed=True), "+1,765 %"),
        (num_bytes(312), "312 B"),
        (num_bytes(4096), "4.00 KiB"),
        (num_bytes(1023.9 * 2**20), "1.00 GiB"),
        (num_bytes(78.3 * 2**30), "78.3 GiB"),
        (rate(812, "tokens"), "812 tokens/s"),
        (rate(12345, "tokens"), "12.3k tokens/s"),
        (rate(1.234e6, "tokens"), "1.23M tokens/s"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected
