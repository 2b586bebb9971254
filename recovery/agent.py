"""`plait train` on a node without the supervisor: it starts, watches and ends workers here at the supervisor's word.

Without a supervisor it gives its workers the time to finish their step and save, then ends those that are left.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from executor.launch import WorkerError
from executor.messages import LEASE_SECONDS, ORPHAN_SECONDS, WITH_AGENT, End, Lines, Ping, Pong
from recovery.nodes import AGENT_ORDERS, Ended, Joined, Kill, Start
from recovery.place import Place
from recovery.processes import Processes
from recovery.workers import JOIN_SECONDS, TOKEN_FILE
from specs.errors import BadInputError

ANSWER_SECONDS = 10.0  # for a supervisor that is there to take an agent in
RETRY_SECONDS = 0.5
WATCH_SECONDS = 0.05


class Agent:
    """Of one node.  `arguments`: of the workers' command."""

    def __init__(self, place: Place, out: Path, arguments: list[str], *, join_seconds: float = JOIN_SECONDS) -> None:
        self._place, self._out, self._join_seconds = place, out, join_seconds
        self._processes = Processes(arguments, {WITH_AGENT: str(place.node)})
        self._attempts: dict[int, int] = {}  # by rank
        self._signals = 0

    def run(self) -> None:
        """Until the run is over.

        Raises:
            BadInputError: there is no supervisor, or it does not take this node.
            WorkerError: the supervisor is lost; all workers have ended.
            KeyboardInterrupt: a second signal; the first one is the supervisor's affair.
        """
        self._say(f"waits for the supervisor at {self._place.host} port {self._place.port}")
        lines, control, orders = self._join()
        self._say("takes part")
        handlers = {name: signal.signal(name, self._hold_out) for name in (signal.SIGINT, signal.SIGTERM)}
        try:
            cause = self._serve(lines, control, orders)
            if cause:
                self._outlast(cause)
        finally:
            self._processes.close()
            lines.close()
            for name, handler in handlers.items():
                signal.signal(name, handler)

    def _say(self, text: str) -> None:
        print(f"plait: node {self._place.node} {text}.", file=sys.stderr, flush=True)

    def _hold_out(self, signum: int, frame: object) -> None:  # noqa: ARG002
        """Ctrl-C or SIGTERM, which usually reach the supervisor too."""
        self._signals += 1
        if self._signals > 1:
            raise KeyboardInterrupt
        os.write(2, b"plait: the supervisor decides when to stop; a second signal ends this node's workers at once.\n")

    def _join(self) -> tuple[Lines, str, Iterable[bytes]]:
        """The line to the supervisor, what workers need to find it (host:port:token), and the first orders."""
        deadline = time.monotonic() + self._join_seconds
        while True:
            try:
                return self._try_to_join()
            except OSError as error:
                problem = error.strerror or str(error)
            if time.monotonic() > deadline:
                raise BadInputError(
                    f"node {self._place.node} found no supervisor at {self._place.host} port {self._place.port} in "
                    f"{self._join_seconds:.0f} s: {problem}. Start the same command with --node-rank 0 there, with the "
                    f"same --out on a disk that all nodes share."
                )
            time.sleep(RETRY_SECONDS)

    def _try_to_join(self) -> tuple[Lines, str, Iterable[bytes]]:
        """Raises `OSError` when there is no supervisor yet, or one of another run."""
        token = (self._out / TOKEN_FILE).read_text()
        connection = socket.create_connection((self._place.host, self._place.port), timeout=ANSWER_SECONDS)
        lines = Lines(connection)
        lines.send(Joined(node=self._place.node, token=token))
        orders = lines.receive()  # a ping at least
        if orders is None:
            lines.close()
            raise OSError(f"it does not take node {self._place.node} of this run folder")
        host, port = connection.getpeername()[:2]
        return lines, f"{host}:{port}:{token}", orders

    def _serve(self, lines: Lines, control: str, orders: Iterable[bytes]) -> str:
        """Follow orders until the end; gives the reason when there is nobody any more to give them."""
        heard = time.monotonic()
        while time.monotonic() - heard < LEASE_SECONDS:
            for line in orders:
                heard = time.monotonic()
                order = AGENT_ORDERS.validate_json(line)
                if isinstance(order, End):
                    return ""
                self._follow(order, lines, control)
            for rank, code in self._processes.ended():
                lines.send(Ended(rank=rank, attempt=self._attempts[rank], code=code))
            ready, _, _ = select.select([lines.connection], [], [], WATCH_SECONDS)
            received = lines.receive() if ready else ()
            if received is None:
                return "closed the connection"
            orders = received
        return f"has not been heard for {LEASE_SECONDS:.0f} s"

    def _follow(self, order: Start | Kill | Ping, lines: Lines, control: str) -> None:
        match order:
            case Start():
                self._attempts[order.rank] = order.attempt
                self._processes.start(
                    order.rank, local_rank=order.local_rank, local_size=order.local_size, control=control
                )
            case Kill():
                self._processes.kill(order.rank)
            case Ping():
                lines.send(Pong(term="", where=""))

    def _outlast(self, cause: str) -> None:
        """The workers see by themselves that the supervisor is lost: they finish their step, save and end."""
        self._say(f"has lost the supervisor, which {cause}; workers finish their step, save if they can, and end")
        deadline = time.monotonic() + ORPHAN_SECONDS
        while self._processes.ranks and time.monotonic() < deadline:
            self._processes.ended()
            time.sleep(WATCH_SECONDS)
        raise WorkerError(
            f"node {self._place.node} has lost the supervisor, which {cause}; the workers of this node were ended. "
            "The same command with --resume on every node continues from the last checkpoint."
        )
