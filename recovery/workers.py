"""Worker processes of one node and the lines to them: starting, hearing, ending.  No torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from executor.messages import CONTROL, REPORTS, Hello, Lines, Order, Pong, Report

EXIT_SECONDS = 2.0  # for a process whose line is closed to be gone


@dataclass
class Worker:
    """One process.  `heard`: monotonic time of its last word; `pong`: what it last said about where it is."""

    rank: int
    process: subprocess.Popen[bytes]
    lines: Lines | None = None
    heard: float = field(default_factory=time.monotonic)
    pong: Pong | None = None


@dataclass(frozen=True)
class Lost:
    """A worker is gone: `cause` in words; `crashed` when it ended of an exception of its own."""

    rank: int
    cause: str
    crashed: bool = False


Event = tuple[int, Report | Lost]


class Workers:
    """The workers of this node, by rank of the plan."""

    def __init__(self, arguments: Iterable[str], num_devices: int) -> None:
        self._command = [sys.executable, "-m", *arguments]
        self._environment = {
            **os.environ,
            "LOCAL_WORLD_SIZE": str(num_devices),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._by_rank: dict[int, Worker] = {}
        self._strangers: set[Lines] = set()  # connected, rank not said yet

    @property
    def ranks(self) -> set[int]:
        """Ranks that have a process."""
        return set(self._by_rank)

    def worker(self, rank: int) -> Worker:
        """The process of a rank."""
        return self._by_rank[rank]

    def is_ready(self, rank: int) -> bool:
        """Whether a rank has a process that waits for orders."""
        return rank in self._by_rank and self._by_rank[rank].lines is not None

    def start(self, rank: int) -> None:
        """Start a process for a rank; it says hello when it is ready."""
        host, port = self._listener.getsockname()
        environment = {
            **self._environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            CONTROL: f"{host}:{port}:{self._token}",
        }
        # A session of their own: Ctrl-C reaches the supervisor alone, which asks for a clean stop.
        process = subprocess.Popen(self._command, env=environment, start_new_session=True)
        self._by_rank[rank] = Worker(rank, process)

    def send(self, rank: int, order: Order) -> None:
        """Give an order.  A worker that is gone is found by `events`."""
        lines = self._by_rank[rank].lines
        if lines is not None:
            lines.send(order)

    def events(self, seconds: float) -> list[Event]:
        """What was said and who was lost, at the latest after `seconds`."""
        found: list[Event] = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            else:
                found += self._read(key.data)
        for rank, worker in list(self._by_rank.items()):
            if worker.process.poll() is not None:
                if worker.lines is not None:  # its last words
                    found += self._drain(worker.lines)
                found.append((rank, self._forget(rank)))
        return found

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        lines = Lines(connection)
        self._strangers.add(lines)
        self._selector.register(connection, selectors.EVENT_READ, lines)

    def _read(self, lines: Lines) -> list[Event]:
        received = lines.receive()
        owner = next((worker for worker in self._by_rank.values() if worker.lines is lines), None)
        if received is None:
            self._close(lines)
            return [] if owner is None else [(owner.rank, self._cut_off(owner))]
        found: list[Event] = []
        for line in received:
            report = REPORTS.validate_json(line)
            if isinstance(report, Hello):
                owner = self._introduce(lines, report)
            if owner is None:  # whoever it is, it does not belong to this run
                self._close(lines)
                break
            owner.heard = time.monotonic()
            if isinstance(report, Pong):
                owner.pong = report
            else:
                found.append((owner.rank, report))
        return found

    def _drain(self, lines: Lines) -> list[Event]:
        found: list[Event] = []
        lines.connection.settimeout(0.0)
        while lines.connection.fileno() >= 0:
            try:
                if not lines.connection.recv(1, socket.MSG_PEEK):
                    break
            except OSError:
                break
            found += [event for event in self._read(lines) if not isinstance(event[1], Lost)]
        return found

    def _introduce(self, lines: Lines, hello: Hello) -> Worker | None:
        self._strangers.discard(lines)
        if not secrets.compare_digest(hello.token, self._token) or hello.rank not in self._by_rank:
            return None
        worker = self._by_rank[hello.rank]
        worker.lines = lines
        return worker

    def _close(self, lines: Lines) -> None:
        self._strangers.discard(lines)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(lines.connection)
        lines.close()

    def _cut_off(self, worker: Worker) -> Lost:
        """The line is closed: usually the process ended a moment ago; one that lives has lost us and is ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(EXIT_SECONDS)
        if worker.process.poll() is None:
            return self.kill(worker.rank, "lost its connection to the supervisor and was ended")
        return self._forget(worker.rank)

    def _forget(self, rank: int) -> Lost:
        worker = self._by_rank.pop(rank)
        if worker.lines is not None:
            self._close(worker.lines)
        code = worker.process.returncode
        if code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return Lost(rank, f"was ended by {signal.Signals(-code).name}{hint}")
        return Lost(rank, f"ended with exit code {code}", crashed=code != 0)

    def kill(self, rank: int, cause: str) -> Lost:
        """End a process that cannot be used any more; `cause` says why."""
        worker = self._by_rank[rank]
        worker.process.kill()
        worker.process.wait()
        self._forget(rank)
        return Lost(rank, cause)

    def close(self) -> None:
        """End all processes, whatever they do, and stop listening."""
        for worker in self._by_rank.values():
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
        for rank in list(self._by_rank):
            self._by_rank[rank].process.wait()
            self._forget(rank)
        for lines in list(self._strangers):
            self._close(lines)
        self._selector.close()
        self._listener.close()
