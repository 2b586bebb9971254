"""What a supervisor and its workers say to each other: JSON, one message a line, over a socket.  No torch.

Orders go to a worker, reports come from it.  A *generation* is a set of workers that train together under one plan;
each loss or return of a device begins a new one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from specs.base import Spec
from specs.faults import Fault
from specs.runlog import Bucket, Record

WAITING_TERMS = frozenset({"tp_communication", "pipeline_idle", "gradient_sync"})  # in which a rank waits for others
CONTROL = "PLAIT_CONTROL"  # environment of a worker: host:port:token of its supervisor
WITH_AGENT = "PLAIT_AGENT"  # environment of a worker that another node's agent has started: the node's number
LEASE_SECONDS = 60.0  # without a word from the supervisor, which pings every second: the network between is cut
ORPHAN_SECONDS = 60.0  # a worker without supervisor may take this long to finish its step and save


class Message(Spec):
    """One line."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


class Totals(Message):
    """What all ranks summed in a step: squared norm, loss, flags.  It proves that all gradients were final."""

    step: int
    values: tuple[float, ...]


class Form(Message):
    """Join a generation.  `members`: ranks by process number.  Steps up to `logged`, `evaluated` and `saved` are so."""

    kind: Literal["form"] = "form"
    generation: int
    plan: str  # path
    members: tuple[int, ...]
    hosts_store: bool
    reports: bool  # this worker speaks for the generation
    totals: Totals | None = None  # take this step first, if its gradients are ready here
    logged: int = 0
    evaluated: int = 0
    saved: int = 0
    faults: tuple[Fault, ...] = ()


class Store(Message):
    """Where the generation meets."""

    kind: Literal["store"] = "store"
    generation: int
    host: str
    port: int


class Leave(Message):
    """A peer is lost: leave the generation's collectives, keep the state, wait for orders."""

    kind: Literal["leave"] = "leave"
    generation: int


class Pause(Message):
    """Halt together at the end of the next step and ask what to do."""

    kind: Literal["pause"] = "pause"


class Continue(Message):
    """After a pause: go on, or save and end."""

    kind: Literal["continue"] = "continue"
    stop: bool


class Ping(Message):
    """Say where you are."""

    kind: Literal["ping"] = "ping"


class End(Message):
    """Nothing is left to do: end the process."""

    kind: Literal["end"] = "end"


class Hello(Message):
    """A worker has started and waits for orders."""

    kind: Literal["hello"] = "hello"
    rank: int
    token: str


class StoreOpen(Message):
    """The store of a generation listens here."""

    kind: Literal["store_open"] = "store_open"
    generation: int
    host: str
    port: int


class Formed(Message):
    """This worker's part of the generation is ready to train.  `missing`: elements that no survivor held."""

    kind: Literal["formed"] = "formed"
    generation: int
    step: int
    source: Literal["memory", "checkpoint", "start"]
    missing: int = 0
    loading_seconds: float = 0.0


class StepDone(Message):
    """A step is taken; `busy_seconds` of it were this rank's own work, not waiting for others."""

    kind: Literal["step_done"] = "step_done"
    step: int
    busy_seconds: float


class Logged(Message):
    """A record for the run log, with the generation's seconds by bucket so far."""

    kind: Literal["logged"] = "logged"
    record: Record
    seconds: dict[Bucket, float]


class Phase(Message):
    """What the worker does from now on: sign of life, and which patience applies."""

    kind: Literal["phase"] = "phase"
    name: Literal["forming", "loading", "training", "evaluating", "saving"]


class Halted(Message):
    """Out of the generation's collectives: `step` is taken, the next one's gradients may be ready."""

    kind: Literal["halted"] = "halted"
    generation: int
    step: int
    ready: int | None
    applied: Totals | None
    cause: str


class Paused(Message):
    """At the end of a step, as asked."""

    kind: Literal["paused"] = "paused"
    step: int


class Pong(Message):
    """Where the training thread is: the clock's term and the innermost line of ours."""

    kind: Literal["pong"] = "pong"
    term: str
    where: str


class Injected(Message):
    """A drill's fault happens now (seconds since the epoch)."""

    kind: Literal["injected"] = "injected"
    fault: Fault
    time: float


class Finished(Message):
    """Trained to the end, or stopped as asked."""

    kind: Literal["finished"] = "finished"
    step: int
    reason: Literal["finished", "interrupted"]


class Failed(Message):
    """A user's mistake, or a disk that refuses: ends the run."""

    kind: Literal["failed"] = "failed"
    message: str
    exit_code: int


Order = Annotated[Form | Store | Leave | Pause | Continue | Ping | End, Field(discriminator="kind")]
Report = Annotated[
    Hello | StoreOpen | Formed | StepDone | Logged | Phase | Halted | Paused | Pong | Injected | Finished | Failed,
    Field(discriminator="kind"),
]
ORDERS: TypeAdapter[Order] = TypeAdapter(Order)
REPORTS: TypeAdapter[Report] = TypeAdapter(Report)


class Lines:
    """A socket that sends and receives whole messages.  Sending is safe from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""
        self._lock = threading.Lock()

    def send(self, message: Message) -> bool:
        """False when the other end is gone."""
        payload = message.model_dump_json().encode() + b"\n"
        try:
            with self._lock:
                self.connection.sendall(payload)
        except OSError:
            return False
        return True

    @property
    def num_pending(self) -> int:
        """Bytes of a line that is not whole yet."""
        return len(self._rest)

    def receive(self) -> Iterator[bytes] | None:
        """The whole lines of one read (it waits for the first byte); None when the other end is gone."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return iter(lines)

    def close(self) -> None:
        self.connection.close()
