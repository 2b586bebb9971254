"""The workers of a run by rank, on this node and on others: starting, hearing, ending.  No torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from executor.messages import REPORTS, End, Hello, Lines, Order, Pong, Report
from recovery.nodes import GREETINGS, Joined, RemoteNode
from recovery.policy import words
from recovery.processes import Processes
from specs.errors import BadInputError

EXIT_SECONDS = 2.0  # for a process whose line is closed to be gone
NODE_SILENT_SECONDS = 10.0  # an agent does nothing but answer
CLOSE_SECONDS = 5.0  # for agents to end their workers when the run is over
JOIN_SECONDS = 300.0  # for the commands of all nodes to be started
MAX_GREETING_BYTES = 4096
TOKEN_FILE = "token"  # in the run folder, readable by its owner alone: agents show it when they join


@dataclass
class Worker:
    """One process.  `heard`: monotonic time of its last word; `pong`: what it last said about where it is.

    `cut`: monotonic time when its line was closed; its end is usually known a moment later.
    """

    rank: int
    lines: Lines | None = None
    heard: float = field(default_factory=time.monotonic)
    pong: Pong | None = None
    cut: float | None = None


@dataclass(frozen=True)
class Lost:
    """A worker is gone: `cause` in words; `crashed` when it ended of an exception of its own.

    `seconds`: from its last sign of life to now, where silence told.
    """

    rank: int
    cause: str
    crashed: bool = False
    seconds: float | None = None


@dataclass(frozen=True)
class Back:
    """The node of a rank has an agent again."""

    rank: int


Event = tuple[int, Report | Lost | Back]


class Workers:
    """`nodes`: the ranks of each; node 0 is this one, `python -m arguments...` runs a worker.

    `listener`: where workers and agents find the supervisor; by default the loopback, for one node.
    """

    def __init__(
        self,
        arguments: Iterable[str],
        nodes: Sequence[range],
        *,
        listener: socket.socket | None = None,
        token_path: Path | None = None,
        node_silent_seconds: float = NODE_SILENT_SECONDS,
    ) -> None:
        self._local = Processes(arguments)
        self._node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
        self._nodes = list(nodes)
        self._remote: dict[int, RemoteNode] = {}
        self._silent_seconds = node_silent_seconds
        self._token = secrets.token_hex(16)
        self._token_path = token_path
        self._listener = socket.create_server(("127.0.0.1", 0)) if listener is None else listener
        self._host = str(self._listener.getsockname()[0])  # at which this node's workers, too, are found by others
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._by_rank: dict[int, Worker] = {}
        self._strangers: set[Lines] = set()  # connected, not said yet who it is
        if token_path is not None:
            _write_secret(token_path, self._token)

    @property
    def ranks(self) -> set[int]:
        """Ranks that have a process."""
        return set(self._by_rank)

    @property
    def absent_nodes(self) -> list[int]:
        """Nodes without an agent."""
        return [number for number in range(1, len(self._nodes)) if number not in self._remote]

    def wait_for_nodes(self) -> None:
        """Until all have an agent.  Raises `BadInputError` when that takes too long."""
        deadline = time.monotonic() + JOIN_SECONDS
        while self.absent_nodes:
            if time.monotonic() > deadline:
                raise BadInputError(
                    f"{words(self.absent_nodes, 'node')} did not join in {JOIN_SECONDS:.0f} s. Start the same command "
                    "there, with its --node-rank."
                )
            self.events(0.05)

    def has_node(self, rank: int) -> bool:
        """Whether a worker could be started for a rank."""
        return self._node_of[rank] not in self.absent_nodes

    def worker(self, rank: int) -> Worker:
        """The process of a rank."""
        return self._by_rank[rank]

    def is_ready(self, rank: int) -> bool:
        """Whether a rank has a process that waits for orders."""
        return rank in self._by_rank and self._by_rank[rank].lines is not None

    def start(self, rank: int) -> None:
        """Start a process for a rank whose node is there; it says hello when it is ready."""
        number = self._node_of[rank]
        ranks = self._nodes[number]
        control = f"{self._host}:{self._listener.getsockname()[1]}:{self._token}"
        node = self._local if number == 0 else self._remote[number]
        node.start(rank, local_rank=rank - ranks.start, local_size=len(ranks), control=control)
        self._by_rank[rank] = Worker(rank)

    def send(self, rank: int, order: Order) -> None:
        """Give an order.  A worker that is gone is found by `events`."""
        lines = self._by_rank[rank].lines
        if lines is not None:
            lines.send(order)

    def events(self, seconds: float) -> list[Event]:
        """What was said and who was lost, at the latest after `seconds`."""
        found: list[Event] = []
        for node in self._remote.values():
            node.ping()
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            elif isinstance(key.data, RemoteNode):
                if not key.data.read():
                    found += self._lose_node(key.data, "its agent has ended")
            elif key.fileobj.fileno() >= 0:  # not closed since, with its node  # type: ignore[union-attr]
                found += self._read(key.data)
        for node in list(self._remote.values()):
            found += self._ends(node.ended())
            if node.silent_seconds > self._silent_seconds:
                found += self._lose_node(node, "its agent does not answer")
        found += self._ends(self._local.ended())
        now = time.monotonic()
        for worker in list(self._by_rank.values()):
            if worker.cut is not None and now - worker.cut > EXIT_SECONDS:
                lost = self.kill(worker.rank, "lost its connection to the supervisor and was ended")
                found.append((worker.rank, lost))
        return found

    def _ends(self, ended: Iterable[tuple[int, int]]) -> Iterator[Event]:
        """Processes that have ended, with an exit code each."""
        for rank, code in ended:
            worker = self._by_rank.get(rank)
            if worker is None:
                continue
            if worker.lines is not None:  # its last words
                yield from self._drain(worker.lines)
            self._forget(rank)
            if code < 0:
                hint = " (out of memory?)" if code == -signal.SIGKILL else ""
                yield rank, Lost(rank, f"was ended by {signal.Signals(-code).name}{hint}")
            else:
                yield rank, Lost(rank, f"ended with exit code {code}", crashed=code != 0)

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
            if owner is not None:
                owner.lines, owner.cut = None, time.monotonic()
            return []
        if lines in self._strangers:
            return self._greet(lines, received)
        return [] if owner is None else self._take(owner, received)

    def _greet(self, lines: Lines, received: Iterator[bytes]) -> list[Event]:
        """The first words on a connection.  Whoever does not know the token does not belong to this run."""
        first = next(received, None)
        if first is None and lines.num_pending < MAX_GREETING_BYTES:
            return []
        try:
            greeting = GREETINGS.validate_json(first or b"")
        except ValidationError:
            greeting = None
        if greeting is not None and secrets.compare_digest(greeting.token.encode(), self._token.encode()):
            if isinstance(greeting, Joined) and greeting.node in self.absent_nodes:
                return self._join(greeting.node, lines)
            if isinstance(greeting, Hello) and greeting.rank in self._by_rank:
                self._strangers.discard(lines)
                worker = self._by_rank[greeting.rank]
                worker.lines = lines
                return self._take(worker, received, greeting)
        self._close(lines)
        return []

    def _join(self, number: int, lines: Lines) -> list[Event]:
        """An agent is there."""
        self._strangers.discard(lines)
        node = self._remote[number] = RemoteNode(number, lines)
        self._host = str(lines.connection.getsockname()[0])  # other nodes reach this one there
        self._selector.modify(lines.connection, selectors.EVENT_READ, node)
        node.ping()
        return [(rank, Back(rank)) for rank in self._nodes[number]]

    def _take(self, owner: Worker, received: Iterable[bytes], *first: Report) -> list[Event]:
        found: list[Event] = []
        owner.heard = time.monotonic()
        for report in (*first, *map(REPORTS.validate_json, received)):
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
            found += self._read(lines)
        return found

    def _close(self, lines: Lines) -> None:
        self._strangers.discard(lines)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(lines.connection)
        lines.close()

    def _forget(self, rank: int) -> None:
        worker = self._by_rank.pop(rank)
        if worker.lines is not None:
            self._close(worker.lines)

    def _lose_node(self, node: RemoteNode, cause: str) -> list[Event]:
        """All its ranks are lost at once.  Those that live see their line closed, and end."""
        del self._remote[node.number]
        self._close(node.lines)
        ranks = self._nodes[node.number]  # spare ones too
        for rank in self.ranks.intersection(ranks):
            self._forget(rank)
        what, seconds = f"is lost with node {node.number}: {cause}", node.silent_seconds
        return [(rank, Lost(rank, what, seconds=seconds)) for rank in ranks]

    def kill(self, rank: int, cause: str) -> Lost:
        """End a process that cannot be used any more; `cause` says why."""
        number = self._node_of[rank]
        if number == 0:
            self._local.kill(rank)
        elif number in self._remote:
            self._remote[number].kill(rank)
        self._forget(rank)
        return Lost(rank, cause)

    def close(self) -> None:
        """End all processes, whatever they do, agents too, and stop listening."""
        self._local.close()
        for node in self._remote.values():
            node.lines.send(End())
        deadline = time.monotonic() + CLOSE_SECONDS
        for node in self._remote.values():
            node.lines.connection.settimeout(max(0.1, deadline - time.monotonic()))
            while node.lines.receive() is not None:
                pass
            self._close(node.lines)
        self._remote.clear()
        for rank in self.ranks:
            self._forget(rank)
        for lines in list(self._strangers):
            self._close(lines)
        self._selector.close()
        self._listener.close()
        if self._token_path is not None:
            self._token_path.unlink(missing_ok=True)


def _write_secret(path: Path, text: str) -> None:
    """Whole or not at all, readable by its owner alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(temporary, path)
