"""Training that goes on: every kind of fault, as a user's drill meets it.  Every run is a real command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recovery.drill import LOSS_TOLERANCE, read_report
from specs.plan import Plan
from specs.presets import model_preset
from specs.runlog import EndRecord, IncidentRecord, StepRecord, read_log
from tests.layouts import ReplicaShape, StageShape, build
from tests.profiles import profile

pytestmark = pytest.mark.gloo
STEPS = 12
SEQ_LEN = 64
BATCH = 12
TWO = StageShape(2, {"attention": (1, 1)})
ONE = StageShape(1)


def _plan(replicas: list[ReplicaShape], zero: int = 0) -> Plan:
    plan = build(model_preset("tiny"), replicas, seq_len=SEQ_LEN, zero=zero)
    assert plan.training.global_batch == BATCH  # so that one clean run serves all
    return plan


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(2000)))
    return path


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of one process without faults."""
    folder = tmp_path_factory.mktemp("clean")
    _plan([ReplicaShape([ONE], 2, BATCH)]).save(folder / "plan.json")
    done = _plait("train", folder / "plan.json", "--out", folder / "run", *_options(corpus))
    assert done.returncode == 0, done.stderr
    return folder / "run"


def _options(corpus: Path) -> list[object]:
    return ["--data", corpus, "--steps", STEPS, "--checkpoint-every", 4, "--hang-seconds", 5]


def _plait(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def _drill(plan: Plan, folder: Path, corpus: Path, clean: Path, *faults: str) -> tuple[IncidentRecord, ...]:
    """Run a drill to its end, check what every drill must hold, give its interruptions."""
    plan.save(folder / "plan.json")
    tokens = (16, 32, 64, 128, 256, 512)
    measured = profile(plan.model, plan.cluster, degrees=(1, 2, 3, 4), tokens=tokens, seq_len=SEQ_LEN)
    measured.save(folder / "profile.json")
    run = folder / "run"
    words = ["chaos", folder / "plan.json", "--out", run, "--profile", folder / "profile.json", *_options(corpus)]
    done = _plait(*words, *faults)
    assert done.returncode == 0, done.stderr
    report = read_report(run, against=clean)
    steps = [record.step for record in read_log(run / "log.jsonl") if isinstance(record, StepRecord)]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    assert len(steps) - len(set(steps)) == sum(incident.redone_steps for incident in report.incidents)
    assert report.worst is not None
    assert report.worst < LOSS_TOLERANCE
    assert isinstance(report.end, EndRecord)
    assert sum(report.end.seconds.values()) == pytest.approx(report.end.wall_seconds, rel=0.02)
    assert not _workers_of(run)
    return report.incidents


def _workers_of(run: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"executor.member" in words and os.fsencode(run) in words:
            found.append(int(entry.name))
    return found


def test_two_ranks_are_lost_and_no_step_is(tmp_path: Path, corpus: Path, clean: Path) -> None:
    """One between the norm and the update, when others have taken that step: all end at one step.  Another one while
    groups are formed without it.
    """
    plan = _plan([ReplicaShape([TWO], 2, 6)] * 2)
    (incident,) = _drill(plan, tmp_path, corpus, clean, "--kill", "1@6:update", "--kill", "0@1:recovery")
    assert set(incident.lost) == {0, 1}
    assert all("SIGKILL" in cause for cause in incident.lost.values())
    assert incident.seconds["failure_detection"] < 1.0
    assert incident.world_size == 2
    assert incident.batch_kept
    assert incident.source == "memory"
    assert incident.step in (5, 6)


def test_a_stage_is_lost_and_comes_back_then_one_freezes(tmp_path: Path, corpus: Path, clean: Path) -> None:
    plan = _plan([ReplicaShape([ONE, ONE], 1, 6)] * 2)
    faults = ("--kill", "3@3:forward", "--return", "3@3", "--stop", "1@9")
    gone, back, frozen = _drill(plan, tmp_path, corpus, clean, *faults)
    assert gone.world_size < 4
    assert back.world_size == 4
    assert back.returned == (3,)
    assert {gone.source, back.source, frozen.source} == {"memory"}
    assert gone.redone_steps == back.redone_steps == frozen.redone_steps == 0
    assert "not answered" in frozen.lost[1]


def test_a_shard_without_a_copy_comes_from_the_checkpoint(tmp_path: Path, corpus: Path, clean: Path) -> None:
    plan = _plan([ReplicaShape([ONE], 1, 4)] * 3, zero=1)
    first, second = _drill(plan, tmp_path, corpus, clean, "--hang", "2@6", "--kill", "1@11:gather")
    assert "no progress" in first.lost[2]
    for incident, step in ((first, 4), (second, 8)):
        assert incident.source == "checkpoint"
        assert incident.step == step
        assert incident.missing_elements > 0
    assert first.redone_steps == 1


def test_the_supervisor_is_killed(tmp_path: Path, corpus: Path, clean: Path) -> None:
    """Its workers finish their step, save and end; --resume goes on from there."""
    _plan([ReplicaShape([TWO], 2, BATCH)]).save(tmp_path / "plan.json")
    run = tmp_path / "run"
    words = ["train", tmp_path / "plan.json", "--out", run, *_options(corpus)]
    command = [sys.executable, "-m", "cli", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (run / "log.jsonl").exists() and any(isinstance(r, StepRecord) for r in read_log(run / "log.jsonl")):
            break
        time.sleep(0.02)
    os.kill(_workers_of(run)[0], signal.SIGSTOP)  # a frozen worker must not stay either
    process.kill()
    process.wait()
    deadline = time.monotonic() + 70
    while _workers_of(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _workers_of(run)
    assert list((run / "checkpoints").glob("step-*"))
    done = _plait("train", tmp_path / "plan.json", "--out", run, "--resume")
    assert done.returncode == 0, done.stderr
    worst = read_report(run, against=clean).worst
    assert worst is not None
    assert worst < LOSS_TOLERANCE
