"""A sweep finds what `plait plan` finds at every point, says why a point has none, and counts dollars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli
from cost_models.sweep_point import SweepPoint, cluster_dollars_per_hour
from planner.start import start_plan
from planner.sweep import Sweep, parse_prices, run_sweep
from reports.sweep import draw
from specs.errors import BadInputError, NoPlanFitsError
from specs.presets import cluster_preset


def sweep(**changes: object) -> list[SweepPoint]:
    given: dict[str, object] = {
        "model": "gpt2",
        "clusters": ["h100x4", "h100x8"],
        "global_batches": [64],
        "seq_lens": [512, 2048],
        "profile_path": None,
        "precision": None,
        "memory_cap": None,
        "freedom": "uniform",
        "time_limit_seconds": 20.0,
        "prices": {"h100": 2.0},
        "command": "",
    }
    return list(run_sweep(Sweep(**{**given, **changes})))  # type: ignore[arg-type]


def test_points_are_the_plans_of_plait_plan() -> None:
    points = sweep()
    assert [(p.cluster, p.seq_len) for p in points] == [
        *(("h100x4", 512), ("h100x4", 2048)),
        *(("h100x8", 512), ("h100x8", 2048)),
    ]
    alone = start_plan(
        model="gpt2",
        cluster="h100x8",
        profile_path=None,
        global_batch=64,
        seq_len=512,
        precision=None,
        memory_cap=None,
        objective="goodput",
        freedom="uniform",
        time_limit_seconds=20.0,
        top_k=0,
        command="",
    )
    assert points[2].plan is not None
    assert points[2].plan.pipelines == alone.pipelines
    assert points[2].tokens_per_second == pytest.approx(alone.predicted.tokens_per_second)
    assert points[2].tokens_per_second > points[0].tokens_per_second


def test_a_point_without_a_plan_says_why() -> None:
    short, long = sweep(clusters=["h100x4"])
    assert short.problem == ""
    assert "--seq-len 2048 is longer than the 1024 positions" in long.problem
    assert (long.plan, long.tokens_per_second, long.dollars_per_million_tokens, long.layout) == (None, None, None, "")


def test_dollars_are_price_over_kept_tokens() -> None:
    point = sweep(clusters=["h100x4"], seq_lens=[512])[0]
    assert point.dollars_per_hour == 8.0
    tokens_in_an_hour = point.goodput_tokens_per_second * 3600
    assert point.dollars_per_million_tokens * tokens_in_an_hour / 1e6 == pytest.approx(8.0)


def test_a_missing_device_is_paid_for_and_an_unknown_price_is_none() -> None:
    damaged = cluster_preset("h100x8").model_copy(update={"missing": (3,)})
    assert cluster_dollars_per_hour(damaged, {"h100": 2.0}) == 16.0
    assert cluster_dollars_per_hour(damaged, {}) is None
    assert sweep(clusters=["h100x4"], seq_lens=[512], prices={})[0].dollars_per_million_tokens is None


@pytest.mark.parametrize("text", ["H100", "H100=", "H100=-1", "=2", "H100=nan"])
def test_bad_prices(text: str) -> None:
    with pytest.raises(BadInputError, match="DEVICE=DOLLARS"):
        parse_prices(text)


def test_what_is_wrong_everywhere_is_said_at_once() -> None:
    with pytest.raises(BadInputError, match="none of the clusters has"):
        sweep(prices={"h200": 3.0})
    with pytest.raises(BadInputError, match="unknown model"):
        sweep(model="gtp2")
    with pytest.raises(BadInputError, match="h100x12"):
        sweep(clusters=["h100x8", "h100x12"])


def test_command(tmp_path: Path) -> None:
    line = ["sweep", "--model", "gpt2", "--clusters", "h100x4", "--global-batches", "32,64", "--seq-len", "512"]
    line += ["--freedom", "uniform", "--dollars-per-hour", "H100=2.5"]
    shown = CliRunner().invoke(cli.app, line, env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    assert "$ per M tokens" in shown.stdout
    assert shown.stdout.count("h100x4") == 2
    picture = tmp_path / "sweep.svg"
    asked = CliRunner().invoke(cli.app, [*line, "--json", "--plot", str(picture)])
    rows = json.loads(asked.stdout)
    assert [row["global_batch"] for row in rows] == [32, 64]
    assert all(row["dollars_per_million_tokens"] > 0 for row in rows)
    assert "sequences per step" in picture.read_text()


def test_nothing_fits_anywhere() -> None:
    line = ["sweep", "--model", "llama-3-70b", "--clusters", "h100x1", "--global-batch", "8", "--seq-len", "512"]
    result = CliRunner().invoke(cli.app, [*line, "--freedom", "uniform"])
    assert isinstance(result.exception, NoPlanFitsError)
    assert "none of the 1 points has a plan" in str(result.exception)
    with pytest.raises(BadInputError, match="none of the points has a plan"):
        draw(sweep(clusters=["h100x4"], seq_lens=[2048]), Path("x.png"))


def test_one_or_several_must_be_given() -> None:
    line = ["sweep", "--model", "gpt2", "--clusters", "h100x4", "--global-batch", "32"]
    for more in ([], ["--seq-len", "512", "--seq-lens", "512,1024"]):
        result = CliRunner().invoke(cli.app, [*line, *more])
        assert result.exit_code == 2
        assert "give either --seq-len or --seq-lens" in result.output
