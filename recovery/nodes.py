"""Other nodes as the supervisor sees them: an agent on each starts and ends workers there at its word.

Workers speak to the supervisor themselves; the line to an agent carries orders about processes, and how they ended.
It is JSON, one message a line, like the workers' own.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from executor.messages import End, Hello, Lines, Message, Ping, Pong
from specs.errors import BadInputError

PING_SECONDS = 1.0


class Start(Message):
    """To an agent: start a worker; `attempt` tells its end from those of the rank's workers before it."""

    kind: Literal["start"] = "start"
    rank: int
    local_rank: int
    local_size: int
    attempt: int


class Kill(Message):
    """To an agent: end a worker."""

    kind: Literal["kill"] = "kill"
    rank: int


class Joined(Message):
    """An agent is there and waits for orders."""

    kind: Literal["joined"] = "joined"
    node: int
    token: str


class Ended(Message):
    """A worker of an agent has ended; `code` is negative for a signal."""

    kind: Literal["ended"] = "ended"
    rank: int
    attempt: int
    code: int


AGENT_ORDERS: TypeAdapter[Start | Kill | Ping | End] = TypeAdapter(
    Annotated[Start | Kill | Ping | End, Field(discriminator="kind")]
)
AGENT_REPORTS: TypeAdapter[Ended | Pong] = TypeAdapter(Annotated[Ended | Pong, Field(discriminator="kind")])
GREETINGS: TypeAdapter[Hello | Joined] = TypeAdapter(Annotated[Hello | Joined, Field(discriminator="kind")])


class RemoteNode:
    """A node whose agent has joined."""

    def __init__(self, number: int, lines: Lines) -> None:
        self.number, self.lines = number, lines
        self._attempts: dict[int, int] = {}  # of workers that have not ended
        self._num_started = 0
        self._ended: list[tuple[int, int]] = []
        self._pinged = 0.0  # monotonic; of the last ping
        self._asked: float | None = None  # of the first ping that is not answered

    @property
    def silent_seconds(self) -> float:
        """Since the agent was asked something that it has not answered."""
        return 0.0 if self._asked is None else time.monotonic() - self._asked

    def start(self, rank: int, *, local_rank: int, local_size: int, control: str) -> None:  # noqa: ARG002
        """Have a worker started.  The agent knows by itself where the supervisor is."""
        self._num_started += 1
        self._attempts[rank] = self._num_started
        order = Start(rank=rank, local_rank=local_rank, local_size=local_size, attempt=self._num_started)
        self.lines.send(order)

    def kill(self, rank: int) -> None:
        """Have a worker ended.  The agent carries orders out in turn, so that its device is free for the next one."""
        if self._attempts.pop(rank, None) is not None:
            self.lines.send(Kill(rank=rank))

    def ended(self) -> list[tuple[int, int]]:
        """Rank and exit code of those that ended since the last call."""
        found, self._ended = self._ended, []
        return found

    def ping(self) -> None:
        """Ask for a word once a second."""
        now = time.monotonic()
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            self._asked = now if self._asked is None else self._asked
            self.lines.send(Ping())

    def read(self) -> bool:
        """Take what the agent says; False when it is gone."""
        received = self.lines.receive()
        if received is None:
            return False
        for line in received:
            self._asked = None
            report = AGENT_REPORTS.validate_json(line)
            if isinstance(report, Ended) and self._attempts.get(report.rank) == report.attempt:
                del self._attempts[report.rank]
                self._ended.append((report.rank, report.code))
        return True


def listen(host: str, port: int) -> socket.socket:
    """A listener for workers and agents.

    At an address given by number it listens there alone; a name may mean the loopback on its own host, so for a name
    it listens at all of the host's addresses.

    Raises:
        BadInputError: the name is unknown, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        try:
            address = str(ipaddress.ip_address(host))
        except ValueError:
            address = "::" if family == socket.AF_INET6 else "0.0.0.0"
        return socket.create_server((address, port), family=family)
    except OSError as error:
        raise BadInputError(
            f"the supervisor cannot listen at {host} port {port}: {error.strerror}. Give an address of this node with "
            "--master-addr, a free port with --master-port."
        ) from None
