"""`plait train` as a user meets it: stop and resume, faults, bad input.  Every run is a real command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specs.presets import model_preset
from specs.runlog import EndRecord, EvaluationRecord, MemoryRecord, StartRecord, StepRecord, read_log
from tests.layouts import ReplicaShape, StageShape, build

pytestmark = pytest.mark.gloo
STEPS = 12


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    """The tiny model on two ranks, attention cut once per rank, the rest two ways."""
    shape = ReplicaShape([StageShape(2, {"attention": (1, 1)})], 2, 4)
    build(model_preset("tiny"), [shape], seq_len=64).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(2000)))
    return path


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "cli", "train", *map(str, arguments)]


def _train(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(*arguments), capture_output=True, text=True, timeout=120, check=False, **options)


def _steps(run: Path) -> dict[int, StepRecord]:
    return {r.step: r for r in read_log(run / "log.jsonl") if isinstance(r, StepRecord)}


def _wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (run / "log.jsonl").exists() and any(number >= step for number in _steps(run)):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("the run made no progress")


def _workers_of(run: Path) -> list[int]:
    """Processes whose command line names the run folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"executor.member" in words and os.fsencode(run) in words:
            found.append(int(entry.name))
    return found


def _one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.startswith("plait: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


@pytest.fixture(scope="module")
def whole_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the uninterrupted run, which is also checked as a run."""
    folder = tmp_path_factory.mktemp("whole")
    shape = ReplicaShape([StageShape(2, {"attention": (1, 1)})], 2, 4)
    build(model_preset("tiny"), [shape], seq_len=64).save(folder / "plan.json")
    (folder / "corpus.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(2000)))
    run = folder / "run"
    done = _train(folder / "plan.json", "--out", run, "--data", folder / "corpus.txt", "--steps", STEPS)
    assert done.returncode == 0, done.stderr
    records = read_log(run / "log.jsonl")
    steps = _steps(run)
    assert list(steps) == list(range(1, STEPS + 1))
    assert steps[STEPS].loss < steps[1].loss - 0.5
    assert isinstance(records[0], StartRecord)
    end = records[-1]
    assert isinstance(end, EndRecord)
    assert end.reason == "finished"
    assert sum(end.seconds.values()) == pytest.approx(end.wall_seconds, rel=0.01)
    for record in steps.values():
        assert record.terms.total() == pytest.approx(record.seconds)
    memory = next(r for r in records if isinstance(r, MemoryRecord))
    assert set(memory.peak_bytes) == {0, 1}
    assert all(memory.peak_bytes[r] > memory.static_bytes[r] > 0 for r in (0, 1))
    assert any(isinstance(r, EvaluationRecord) for r in records)
    return {number: record.loss for number, record in steps.items()}


def test_ctrl_c_saves_and_resume_continues_the_same_losses(
    tmp_path: Path, plan_path: Path, corpus: Path, whole_losses: dict[int, float]
) -> None:
    run = tmp_path / "run"
    arguments = (plan_path, "--out", run, "--data", corpus, "--steps", STEPS, "--checkpoint-every", 100)
    process = subprocess.Popen(_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _wait_for_step(run, 3, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    last = read_log(run / "log.jsonl")[-1]
    assert isinstance(last, EndRecord)
    assert last.reason == "interrupted"
    assert last.step < STEPS
    assert not _workers_of(run)
    done = _train(plan_path, "--out", run, "--resume")
    assert done.returncode == 0, done.stderr
    losses = {number: record.loss for number, record in _steps(run).items()}
    assert losses == pytest.approx(whole_losses, rel=1e-6)


def test_a_killed_worker_is_named_and_nothing_is_left_behind(
    tmp_path: Path, plan_path: Path, corpus: Path, whole_losses: dict[int, float]
) -> None:
    run = tmp_path / "run"
    arguments = (plan_path, "--out", run, "--data", corpus, "--steps", STEPS, "--checkpoint-every", 2)
    arguments += ("--on-loss", "stop")
    process = subprocess.Popen(_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _wait_for_step(run, 3, process)
    os.kill(_workers_of(run)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "SIGKILL" in errors
    assert "--resume" in errors
    assert not _workers_of(run)
    done = _train(plan_path, "--out", run, "--resume")
    assert done.returncode == 0, done.stderr
    losses = {number: record.loss for number, record in _steps(run).items()}
    assert losses == pytest.approx(whole_losses, rel=1e-6)


def test_workers_die_with_their_launcher(tmp_path: Path, plan_path: Path, corpus: Path) -> None:
    run = tmp_path / "run"
    arguments = (plan_path, "--out", run, "--data", corpus, "--steps", 100000)
    process = subprocess.Popen(_command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    _wait_for_step(run, 1, process)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while _workers_of(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _workers_of(run)


@pytest.mark.parametrize("delay", [0.3, 1.5, 3.0])
def test_ctrl_c_at_any_moment_of_the_start(tmp_path: Path, plan_path: Path, corpus: Path, delay: float) -> None:
    run = tmp_path / "run"
    arguments = (plan_path, "--out", run, "--data", corpus, "--steps", 100000)
    process = subprocess.Popen(_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT), errors
    assert not _workers_of(run)


def test_a_full_disk_under_the_log_ends_the_run_with_one_sentence(
    tmp_path: Path, plan_path: Path, corpus: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").symlink_to("/dev/full")
    build_arguments = (plan_path, "--out", run, "--data", corpus, "--steps", 3, "--resume")
    # A run folder that exists is resumed; its options must be there.
    from specs.options import TrainOptions

    TrainOptions(out=run).save(run / "options.json")
    done = _train(*build_arguments)
    assert done.returncode == 2
    assert "No space left" in _one_sentence(done)
    assert not _workers_of(run)


def test_a_full_disk_under_a_checkpoint_keeps_the_one_before(tmp_path: Path, plan_path: Path, corpus: Path) -> None:
    import resource

    run = tmp_path / "run"
    arguments = (plan_path, "--out", run, "--data", corpus, "--checkpoint-every", 2)
    assert _train(*arguments, "--steps", 2).returncode == 0

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = _train(*arguments, "--steps", 4, "--resume", preexec_fn=limit)
    assert done.returncode == 2, done.stderr
    assert "checkpoint of step 4 was not saved" in _one_sentence(done)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["LATEST", "step-00000002"]


def test_a_run_folder_is_not_overwritten(tmp_path: Path, plan_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").write_text("")
    done = _train(plan_path, "--out", run)
    assert done.returncode == 2
    assert "--resume" in _one_sentence(done)
    done = _train(plan_path, "--out", tmp_path / "other", "--resume")
    assert done.returncode == 2
    assert "no run to resume" in _one_sentence(done)


def test_an_empty_corpus(tmp_path: Path, plan_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    done = _train(plan_path, "--out", tmp_path / "run", "--data", tmp_path / "empty.txt")
    assert done.returncode == 2
    assert "holds no text" in _one_sentence(done)


def test_a_plan_for_another_world_size_under_torchrun(tmp_path: Path, plan_path: Path) -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = _train(plan_path, "--out", tmp_path / "run", env=environment)
    assert done.returncode == 2
    assert "the plan is for 2 ranks, 3 processes were started" in _one_sentence(done)


def test_a_plan_for_gpus_where_none_are(tmp_path: Path, plan_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    text = plan_path.read_text().replace('"kind": "cpu"', '"kind": "gpu"')
    plan_path.write_text(text)
    done = _train(plan_path, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "torch sees no GPU here" in _one_sentence(done)


def test_torchrun_starts_the_same_training(
    tmp_path: Path, plan_path: Path, corpus: Path, whole_losses: dict[int, float]
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "cli", "train"]
    arguments = (plan_path, "--out", run, "--data", corpus, "--steps", STEPS)
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    losses = {number: record.loss for number, record in _steps(run).items()}
    assert losses == pytest.approx(whole_losses, rel=1e-6)
