"""Traces: every lane named alike, every action of the schedule once, one thing at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import cli
from cost_models.sources import device_costs
from cost_models.step import price
from specs.plan import Plan
from specs.presets import cluster_preset, model_preset
from specs.runlog import ActionsRecord, StepRecord, read_log
from tests import plans, runs


def plan() -> Plan:
    return plans.plan(
        stages=2,
        ranks=2,
        replicas=2,
        micro_batches=4,
        model=model_preset("gpt2"),
        on=cluster_preset("h100x8"),
        seq_len=256,
    )


def write_trace(source: Path, out: Path) -> tuple[dict[str, Any], str]:
    result = CliRunner().invoke(cli.app, ["trace", str(source), "-o", str(out)])
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text()), result.stderr


def lanes(document: dict[str, Any], process: int) -> dict[int, str]:
    """Names by rank."""
    return {
        event["tid"]: event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name" and event["pid"] == process
    }


def test_a_predicted_step(tmp_path: Path) -> None:
    made = plan()
    made.save(tmp_path / "plan.json")
    document, said = write_trace(tmp_path / "plan.json", tmp_path / "trace.json")
    assert said == ""
    assert lanes(document, 1) == {
        0: "rank 0, stage 0",
        1: "rank 1, stage 0",
        2: "rank 2, stage 1",
        3: "rank 3, stage 1",
    }
    step = price(made, device_costs(made.cluster, made.training)).step_time_seconds
    for rank in range(4):
        events = [event for event in document["traceEvents"] if event["ph"] == "X" and event["tid"] == rank]
        events.sort(key=lambda event: event["ts"])
        passes = [event["name"] for event in events if event["cat"] != "term"]
        assert sorted(passes) == sorted(f"{kind}{number}" for kind in "FB" for number in range(4))
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(events))
        assert events[-1]["ts"] + events[-1]["dur"] == pytest.approx(step * 1e6)


def test_a_measured_step_has_the_same_names(tmp_path: Path) -> None:
    made = plan()
    made = made.with_results(predicted=price(made, device_costs(made.cluster, made.training)))
    actions = dict.fromkeys(range(8), (("F0", 0.0, 0.2), ("tp_communication", 0.1, 0.15), ("B0", 0.2, 0.5)))
    record = ActionsRecord.model_validate({"step": 6, "actions": actions})
    runs.write(tmp_path / "run", [*runs.whole_run(), record], of=made)
    document, said = write_trace(tmp_path / "run", tmp_path / "trace.json")
    assert said == ""
    assert lanes(document, 1).items() <= lanes(document, 2).items()
    measured = [event for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] == 2]
    assert [event["name"] for event in measured[:3]] == ["F0", "tp_communication", "B0"]
    assert measured[2] | {"ts": 0, "dur": 0} == {
        "ph": "X",
        "name": "B0",
        "cat": "backward",
        "pid": 2,
        "tid": 0,
        "ts": 0,
        "dur": 0,
        "args": {"micro_batch": 0, "virtual_stage": 0},
    }
    assert measured[2]["dur"] == pytest.approx(0.3e6)


def test_a_run_without_recorded_actions_says_so(tmp_path: Path) -> None:
    runs.write(tmp_path / "run", runs.whole_run())
    _, said = write_trace(tmp_path / "run", tmp_path / "trace.json")
    assert "no record of a step's actions" in said


@pytest.mark.gloo
def test_a_run_records_its_last_step(tmp_path: Path) -> None:
    """Every action of every rank once; times within the step; names as predicted."""
    made = plans.plan(stages=2, ranks=1, on=plans.cluster(2, kind="cpu"), micro_batches=4)
    made = made.model_copy(update={"training": made.training.model_copy(update={"precision": "fp32"})})
    made.save(tmp_path / "plan.json")
    command = [str(Path(sys.executable).with_name("plait")), "train", "plan.json", "--out", "run", "--steps", "5"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    records = read_log(tmp_path / "run" / "log.jsonl")
    (record,) = [record for record in records if isinstance(record, ActionsRecord)]
    step = next(record for record in records if isinstance(record, StepRecord) and record.step == 5)
    assert record.step == 5
    assert sorted(record.actions) == [0, 1]
    for actions in record.actions.values():
        names = [name for name, _, _ in actions if name[-1].isdigit()]
        assert sorted(names) == sorted(f"{kind}{number}" for kind in "FB" for number in range(4))
        assert all(0 <= start < stop for _, start, stop in actions)
        assert {"gradient_sync", "optimizer"} & {name for name, _, _ in actions}
        passes = sum(stop - start for name, start, stop in actions if name[-1].isdigit())
        assert passes < max(stop for _, _, stop in actions) <= 3 * step.seconds
    document, said = write_trace(tmp_path / "run", tmp_path / "trace.json")
    assert "no predicted lanes" in said
    assert lanes(document, 2) == {0: "rank 0, stage 0", 1: "rank 1, stage 1"}
