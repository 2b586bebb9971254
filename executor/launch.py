"""Starts the workers of one node, watches them, and ends them all when one fails or the user says stop."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from specs.errors import BadInputError, PlaitError

ERROR_FILE = "PLAIT_ERROR_FILE"  # environment: where a worker leaves its error for the launcher
QUIET = "PLAIT_QUIET"  # environment: show no progress
STARTED = "PLAIT_STARTED"  # environment: when the command started, seconds since the epoch
GRACE_SECONDS = 120.0  # for a clean stop: finish the step, write a checkpoint


class WorkerError(PlaitError):
    """A worker died of something that is no user's mistake: a crash, a signal, the machine's memory."""

    exit_code = 1


def run_workers(
    arguments: Sequence[str], num_workers: int, *, after_crash: str, stdout: IO[bytes] | None = None
) -> None:
    """Run `python -m arguments...` once per rank with torchrun's environment variables, until all are done.

    Their standard output is the command's own, or the file `stdout`.
    The first failure ends the others and is raised: a worker's own `PlaitError` with its message and exit code, a
    crash as `WorkerError` with `after_crash` as the next step.  Ctrl-C and SIGTERM ask the workers for a clean stop,
    a second Ctrl-C ends them at once.
    """
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        error_file = Path(folder) / "error.json"
        common = {
            **os.environ,
            "WORLD_SIZE": str(num_workers),
            "LOCAL_WORLD_SIZE": str(num_workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            ERROR_FILE: str(error_file),
            STARTED: os.environ.get(STARTED, repr(time.time())),
        }
        command = [sys.executable, "-m", *arguments]
        workers: list[subprocess.Popen[bytes]] = []
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            for rank in range(num_workers):
                environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                # A session of their own: Ctrl-C reaches the launcher alone, which asks for a clean stop.
                workers.append(subprocess.Popen(command, env=environment, stdout=stdout, start_new_session=True))
            try:
                _wait(workers, error_file, after_crash)
            except KeyboardInterrupt:
                _stop_cleanly(workers)
                raise
        finally:
            _kill(workers)
            signal.signal(signal.SIGTERM, previous)


def _interrupt(signum: int, frame: object) -> None:  # noqa: ARG001
    raise KeyboardInterrupt


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(workers: Sequence[subprocess.Popen[bytes]], error_file: Path, after_crash: str) -> None:
    while True:
        codes = [worker.poll() for worker in workers]
        failed = [(rank, code) for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed or error_file.exists():
            _raise_failure(failed, error_file, after_crash)
        if all(code == 0 for code in codes):
            return
        time.sleep(0.05)


def _raise_failure(failed: list[tuple[int, int | None]], error_file: Path, after_crash: str) -> None:
    if error_file.exists():
        entry = json.loads(error_file.read_text())
        error = BadInputError(entry["message"])
        error.exit_code = entry["exit_code"]
        raise error
    rank, code = failed[0]
    assert code is not None
    cause = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    hint = " (the machine may have run out of memory)" if code == -signal.SIGKILL else ""
    raise WorkerError(
        f"worker {rank} {cause}{hint}; the other workers were ended. What it had to say is above. {after_crash}"
    )


def _stop_cleanly(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
        time.sleep(0.05)


def _kill(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
    for worker in workers:
        worker.wait()


def end_with_parent() -> None:
    """Called by a worker: the kernel ends it when its launcher dies, however that happens (Linux)."""
    signal_with_parent(signal.SIGKILL)


def signal_with_parent(signum: signal.Signals) -> None:
    """Called by a worker: the kernel sends it `signum` when its parent dies (Linux)."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signum)


def report_error(error: PlaitError) -> None:
    """Called by a worker: leave a user's mistake for the launcher to print once; without a launcher, print it.

    With a launcher this waits to be ended: a worker that left would make its peers fail of lost connections.
    """
    path = os.environ.get(ERROR_FILE)
    if path is None:
        print(f"plait: {error}", file=sys.stderr)
        return
    temporary = f"{path}.{os.getpid()}"
    Path(temporary).write_text(json.dumps({"message": str(error), "exit_code": error.exit_code}))
    # The first to arrive wins: its error is the cause, later ones are consequences.
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    time.sleep(GRACE_SECONDS)
