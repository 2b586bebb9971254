"""Agents on several nodes: what a supervisor knows of them, and what is left when one of the two dies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.recovery import drop_replicas
from benchmarks.testbed import host_lost
from benchmarks.testbed.plans import MODEL
from executor.messages import Hello, Lines, Pause
from recovery.drill import LOSS_TOLERANCE, read_report
from recovery.nodes import Joined, listen
from recovery.place import Place, find_place, first_host
from recovery.workers import TOKEN_FILE, Back, Event, Lost, Workers
from specs.errors import BadInputError
from specs.presets import model_preset
from specs.runlog import StepRecord, read_log
from tests import plans
from tests.layouts import ReplicaShape, StageShape, build
from tests.profiles import profile

NODES = [range(2), range(2, 4)]
AGENT = (
    "import sys; from pathlib import Path; from recovery.agent import Agent; from recovery.place import Place\n"
    "Agent(Place(1, 2, '127.0.0.1', int(sys.argv[1])), Path(sys.argv[2]), ['tests.stand_in_worker']).run()"
)


class Run:
    """A supervisor's workers on two nodes; the second one's agent is a process of its own."""

    def __init__(self, folder: Path, node_silent_seconds: float) -> None:
        listener = listen("127.0.0.1", 0)
        self.port, self.folder = listener.getsockname()[1], folder
        self.workers = Workers(
            ["tests.stand_in_worker"],
            NODES,
            listener=listener,
            token_path=folder / TOKEN_FILE,
            node_silent_seconds=node_silent_seconds,
        )
        self.agents: list[subprocess.Popen[str]] = []
        self.seen: list[Event] = []

    def start_agent(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", AGENT, str(self.port), str(self.folder)]
        self.agents.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return self.agents[-1]

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not done():
            assert time.monotonic() < deadline
            self.seen += self.workers.events(0.05)

    def start_workers(self, *ranks: int) -> None:
        for rank in ranks:
            self.workers.start(rank)
        self.until(lambda: all(self.workers.is_ready(rank) for rank in ranks))

    def lost(self) -> list[Lost]:
        return [event for _, event in self.seen if isinstance(event, Lost)]


@contextlib.contextmanager
def running(folder: Path, *, node_silent_seconds: float = 10.0) -> Iterator[Run]:
    run = Run(folder, node_silent_seconds)
    try:
        run.start_agent()
        run.workers.wait_for_nodes()
        run.start_workers(*range(4))
        yield run
    finally:
        run.workers.close()
        for agent in run.agents:
            agent.kill()
            agent.communicate()


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def are_gone(processes: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(Path(f"/proc/{process}").exists() for process in processes):
        time.sleep(0.02)
    return not any(Path(f"/proc/{process}").exists() for process in processes)


def test_workers_of_an_agent_end_and_start_like_those_here(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        environments = [
            dict(word.split("=", 1) for word in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in word)
            for child in children(run.agents[0].pid)
        ]
        assert {(e["RANK"], e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"]) for e in environments} == {
            ("2", "0", "2"),
            ("3", "1", "2"),
        }
        run.workers.send(2, Pause())
        run.until(lambda: len(run.lost()) == 1)
        assert run.lost()[0] == Lost(2, "ended with exit code 7", crashed=True)
        run.start_workers(2)
        assert run.workers.kill(3, "hangs") == Lost(3, "hangs")
        run.start_workers(3)  # the end of the one before is not taken for its own
        assert len(run.lost()) == 1
        agent = run.agents[0]
        workers = children(agent.pid)
        run.workers.close()
        assert are_gone(workers, 0.0)
        assert agent.wait(5) == 0
        assert not (tmp_path / TOKEN_FILE).exists()


def test_a_node_is_lost_at_once_and_comes_back(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.seen.clear()
        run.agents[0].kill()
        run.until(lambda: len(run.lost()) == 2)
        assert {lost.rank for lost in run.lost()} == {2, 3}
        assert {lost.cause for lost in run.lost()} == {"is lost with node 1: its agent has ended"}
        assert run.workers.ranks == {0, 1}
        assert not run.workers.has_node(2)
        assert run.workers.has_node(0)
        run.start_agent()
        run.until(lambda: run.workers.has_node(2))
        assert [event for _, event in run.seen if isinstance(event, Back)] == [Back(2), Back(3)]
        run.start_workers(2, 3)


def test_a_frozen_node_is_lost_and_its_workers_end(tmp_path: Path) -> None:
    with running(tmp_path, node_silent_seconds=0.5) as run:
        agent = run.agents[0]
        workers = children(agent.pid)
        agent.send_signal(signal.SIGSTOP)
        run.until(lambda: len(run.lost()) == 2)
        assert {lost.cause for lost in run.lost()} == {"is lost with node 1: its agent does not answer"}
        assert all(lost.seconds is not None and lost.seconds > 0.5 for lost in run.lost())
        agent.send_signal(signal.SIGCONT)
        assert agent.wait(10) == 1
        assert are_gone(workers, 1.0)


def test_an_agent_outlives_the_supervisor_no_longer_than_its_workers(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        agent = run.agents[0]
        workers = children(agent.pid)
        # As if the supervisor's process ended: every line is closed, nothing is said.
        for rank in range(4):
            lines = run.workers.worker(rank).lines
            assert lines is not None
            lines.connection.shutdown(socket.SHUT_RDWR)
        run.workers._remote[1].lines.connection.shutdown(socket.SHUT_RDWR)
        _, said = agent.communicate(timeout=10)
        assert agent.returncode == 1
        assert "lost the supervisor, which closed the connection" in said
        assert are_gone(workers, 0.0)


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 10_000,
        Hello(rank=2, token="wrong").model_dump_json().encode() + b"\n",
        Joined(node=1, token="wrong").model_dump_json().encode() + b"\n",
    ],
    ids=["http", "endless", "worker", "agent"],
)
def test_strangers_are_sent_away(greeting: bytes, tmp_path: Path) -> None:
    workers = Workers(["tests.stand_in_worker"], NODES, token_path=tmp_path / TOKEN_FILE)
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o077 == 0
    try:
        stranger = Lines(socket.create_connection(workers._listener.getsockname()))
        stranger.connection.sendall(greeting)
        for _ in range(5):
            assert workers.events(0.02) == []
        assert stranger.receive() is None
        assert workers.absent_nodes == [1]
    finally:
        workers.close()


def test_where_a_command_is() -> None:
    assert find_place(None, None, None, None, {}) is None
    assert find_place(1, 0, None, None, {}) is None
    assert find_place(2, 1, "head", None, {}) == Place(1, 2, "head", 29500)
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
    step["SLURM_STEP_NODELIST"] = "gpu[07-08]"
    assert find_place(None, None, None, 1234, step) == Place(1, 2, "gpu07", 1234)
    assert find_place(None, None, "10.0.0.7", None, step) == Place(1, 2, "10.0.0.7", 29500)
    assert find_place(None, None, None, None, {"SLURM_NNODES": "2", "SLURM_NODEID": "0"}) is None  # no step of srun
    assert find_place(None, None, None, None, {"RANK": "3"}) is None
    for arguments, environment, problem in (
        ((2, None, "head", None), {}, "needs --nnodes N --node-rank K --master-addr HOST"),
        ((2, 0, None, None), {}, "needs --nnodes N"),
        ((None, None, "head", None), {}, "--master-addr needs the number of nodes"),
        ((2, 2, "head", None), {}, "--node-rank 2 is not one of 2 nodes"),
        ((2, 0, "head", None), {"RANK": "0"}, "under torchrun every process is a worker"),
        ((None,) * 4, {**step, "SLURM_STEP_NUM_TASKS": "16"}, "16 tasks on 2 nodes"),
    ):
        with pytest.raises(BadInputError, match=problem):
            find_place(*arguments, environment)
    plan = plans.plan(replicas=16, on=plans.cluster(16))
    Place(0, 2, "head", 1).check_plan(plan)
    with pytest.raises(BadInputError, match="has 2 nodes with devices in use, the command was started for 3"):
        Place(0, 3, "head", 1).check_plan(plan)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("head", "head"),
        ("a1,a2", "a1"),
        ("node[03-05,9],head", "node03"),
        ("n[1,4]", "n1"),
        ("rack2-n[10-11].local", "rack2-n10.local"),
    ],
)
def test_first_of_a_host_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.gloo
def test_a_whole_node_is_lost_and_no_step_is(tmp_path: Path) -> None:
    """Two real commands, one of them killed with its worker; the losses are those of a run of one process."""
    steps, batch, seq_len = 30, 4, 32
    shape = [ReplicaShape([StageShape(1)], 1, batch // 2)] * 2
    plan = build(model_preset("tiny"), shape, seq_len=seq_len)
    plan = plan.model_copy(update={"cluster": plans.cluster(2, per_node=1, kind="cpu")})
    plan.save(tmp_path / "plan.json")
    build(model_preset("tiny"), [ReplicaShape([StageShape(1)], 1, batch)], seq_len=seq_len).save(tmp_path / "one.json")
    measured = profile(plan.model, plan.cluster, degrees=(1, 2), tokens=(16, 32, 64, 128), seq_len=seq_len)
    across = tuple(timing.model_copy(update={"level": "scale_out"}) for timing in measured.collectives)
    measured.model_copy(update={"collectives": measured.collectives + across}).save(tmp_path / "profile.json")
    (tmp_path / "corpus.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(500)))
    common = ["--data", str(tmp_path / "corpus.txt"), "--steps", str(steps), "--checkpoint-every", "0"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def command(plan_name: str, run: str, *words: str) -> list[str]:
        return [sys.executable, "-m", "cli", "train", str(tmp_path / plan_name), "--out", str(tmp_path / run), *words]

    nodes = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    profiled = ["--profile", str(tmp_path / "profile.json")]
    commands = [
        subprocess.Popen(
            command("plan.json", "run", *common, *profiled, *nodes, "--node-rank", str(node)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    log = tmp_path / "run" / "log.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not log.exists() or sum(isinstance(record, StepRecord) for record in read_log(log)) < 3:
            assert commands[0].poll() is None, commands[0].communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for process in (commands[1].pid, *children(commands[1].pid)):
            os.kill(process, signal.SIGKILL)
        _, said = commands[0].communicate(timeout=120)
    finally:
        for process in commands:
            process.kill()
            process.communicate()
    assert commands[0].returncode == 0, said
    subprocess.run(command("one.json", "clean", *common), check=True, capture_output=True, timeout=120)
    report = read_report(tmp_path / "run", against=tmp_path / "clean")
    (incident,) = report.incidents
    assert incident.lost == {1: "is lost with node 1: its agent has ended"}
    assert incident.source == "memory"
    assert incident.batch_kept
    assert report.worst is not None
    assert report.worst < LOSS_TOLERANCE


def test_the_trace_of_the_testbed_tells_policies_apart() -> None:
    """The loss of host 1 leaves a whole replica, half of one and none of the third."""
    shapes = host_lost.shapes()
    plan = build(MODEL, shapes, seq_len=host_lost.SEQ_LEN)
    lost = frozenset(range(host_lost.BED.ranks_per_host, host_lost.BED.world_size))
    assert [len(lost.intersection(replica.ranks)) for replica in plan.replicas] == [0, 1, 1]
    assert [len(replica.ranks) for replica in plan.replicas] == [1, 2, 1]
    dropped = drop_replicas(plan, lost).plan
    assert [replica.ranks for replica in dropped.replicas] == [(0,)]
    assert dropped.training.global_batch == plan.training.global_batch
