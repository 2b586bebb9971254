"""Live metrics: what is served and written are the run log's numbers, on loopback, and only on request."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.live import Live
from specs.errors import BadInputError
from specs.options import TrainOptions
from specs.runlog import CheckpointRecord, EvaluationRecord, IncidentRecord, Record, StepRecord, read_log
from tests import plans, runs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def records() -> list[Record]:
    """A run of six steps with a checkpoint, an evaluation, and a device that is lost."""
    log = runs.whole_run()
    lost = IncidentRecord(
        time=1.0,
        generation=1,
        step=6,
        redone_steps=0,
        lost={1: "killed"},
        policy="reduced",
        layout="",
        world_size=1,
        global_batch=8,
        batch_kept=True,
        source="memory",
        seconds={},
    )
    return [
        *log[:-1],
        CheckpointRecord(time=1.0, step=4, path="x", size_bytes=1, seconds=0.25),
        EvaluationRecord(time=1.0, step=6, loss=4.5, tokens=64, seconds=0.1),
        lost,
        log[-1],
    ]


def served(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_prometheus_serves_the_log(tmp_path: Path) -> None:
    port = free_port()
    with Live(TrainOptions(out=tmp_path, metrics_port=port)) as live:
        for record in records():
            live.record(record)
        found = served(port)
    assert found["plait_step"] == 6
    assert found["plait_loss"] == 5.0
    assert found["plait_held_out_loss"] == 4.5
    assert found["plait_tokens_total"] == 6 * 512
    assert found['plait_step_term_seconds{term="forward"}'] == pytest.approx(0.3)
    assert found['plait_memory_peak_bytes{rank="1"}'] == 1100
    assert found["plait_checkpoint_step"] == 4
    assert found["plait_world_size"] == 1
    assert found['plait_incidents_total{policy="reduced"}'] == 1
    with socket.socket() as again:  # the port is free once the run has ended
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_it_listens_on_loopback_only() -> None:
    assert TrainOptions(out=Path("x")).metrics_address == "127.0.0.1"
    assert TrainOptions(out=Path("x")).metrics_port is None


def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        with pytest.raises(BadInputError, match=f"127.0.0.1:{port}: Address already in use. Choose another"):
            Live(TrainOptions(out=tmp_path, metrics_port=port))


@pytest.mark.parametrize(
    ("option", "package"), [("metrics_port", "prometheus_client"), ("tensorboard", "tensorboardX")]
)
def test_a_missing_package_is_told(option: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadInputError, match=f"needs the package {package}. Install it"):
        Live(TrainOptions.model_validate({"out": tmp_path, option: 1}))


def scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """(name, step, value) of all event files: records of length, its checksum, bytes, their checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            for value in event.summary.value:
                yield value.tag, event.step, value.simple_value
            data = data[16 + size :]


# What torchtitan 0.3 writes for every step on every device (components/metrics.py), memory of the allocator apart.
TORCHTITAN = {
    "loss_metrics/global_avg_loss",
    "grad_norm",
    "throughput(tps)",
    "time_metrics/end_to_end(s)",
    "time_metrics/data_loading(s)",
    "time_metrics/data_loading(%)",
}


def test_tensorboard_has_the_names_of_torchtitan(tmp_path: Path) -> None:
    with Live(TrainOptions(out=tmp_path, tensorboard=True)) as live:
        for record in records():
            live.record(record)
    found = {(name, step): value for name, step, value in scalars(tmp_path / "tensorboard")}
    assert {name for name, _ in found} >= TORCHTITAN | {"validation_metrics/loss", "memory/max_active(GiB)", "lr"}
    assert found["loss_metrics/global_avg_loss", 6] == 5.0
    assert found["throughput(tps)", 6] == pytest.approx(256.0)  # 512 a second on two ranks
    assert found["time_metrics/end_to_end(s)", 3] == pytest.approx(1.0)
    assert found["n_tokens_seen", 6] == 6 * 512


@pytest.mark.gloo
def test_a_run_writes_them(tmp_path: Path) -> None:
    plan = plans.plan(on=plans.cluster(1, kind="cpu"), micro_batches=2)
    plan.model_copy(update={"training": plan.training.model_copy(update={"precision": "fp32"})}).save(
        tmp_path / "p.json"
    )
    command = [str(Path(sys.executable).with_name("plait")), "train", "p.json", "--out", "run", "--steps", "4"]
    options = ["--tensorboard", "--metrics-port", str(free_port())]
    subprocess.run([*command, *options], cwd=tmp_path, check=True, timeout=180, capture_output=True)
    losses = {r.step: r.loss for r in read_log(tmp_path / "run" / "log.jsonl") if isinstance(r, StepRecord)}
    written = {step: v for name, step, v in scalars(tmp_path / "run" / "tensorboard") if name.endswith("avg_loss")}
    assert written == pytest.approx(losses, rel=1e-6)
