"""A worker's end of the line to its supervisor: a thread that listens while the training thread works."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from executor.messages import (
    CONTROL,
    LEASE_SECONDS,
    ORDERS,
    ORPHAN_SECONDS,
    Continue,
    End,
    Form,
    Halted,
    Hello,
    Leave,
    Lines,
    Order,
    Pause,
    Ping,
    Pong,
    Report,
    Store,
    StoreOpen,
)


class SupervisorLostError(Exception):
    """Nobody gives orders any more."""


class Control:
    """Orders for the training thread, and answers that must not wait for it."""

    def __init__(self, rank: int) -> None:
        host, port, token = os.environ[CONTROL].rsplit(":", 2)
        connection = socket.create_connection((host, int(port)))
        connection.settimeout(LEASE_SECONDS)
        self.lines = Lines(connection)
        self.host = self.lines.connection.getsockname()[0]
        self.pause_asked = False
        self.orphaned = False
        self.where: Callable[[], str] = lambda: ""  # the clock's term
        self.on_leave: Callable[[], None] = lambda: None
        self.left = threading.Event()  # a second after the word to leave: whoever waits still gives up
        self._leaving = False  # told to leave a generation and not out of it yet
        self._orders: queue.Queue[Order | None] = queue.Queue()
        self._server: dist.TCPStore | None = None
        self._main = threading.main_thread().ident
        self.lines.send(Hello(rank=rank, token=token))
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, report: Report) -> None:
        """Tell the supervisor.  Without one this does nothing: the listening thread sees to that."""
        if isinstance(report, Halted):
            self._leaving = False
        self.lines.send(report)

    def next(self) -> Order:
        """The next order for the training thread.  Raises `SupervisorLostError` when none will come."""
        order = self._orders.get()
        if order is None:
            self._orders.put(None)
            raise SupervisorLostError
        return order

    def close_store(self) -> None:
        """Stop hosting the meeting place; peers that wait there fail at once."""
        self._server = None

    def cut(self) -> None:
        """A drill's partition: hear and say nothing more."""
        self.lines.connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        while (lines := self.lines.receive()) is not None:
            for line in lines:
                self._take(ORDERS.validate_json(line))
        self.orphaned = self.pause_asked = True
        self._orders.put(None)
        # Cut off or orphaned: the training thread may end the step and save; it must not stay.
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    def _take(self, order: Order) -> None:
        match order:
            case Ping():
                self.send(Pong(term=self.where(), where=_innermost(self._main)))
                if self._leaving:  # the training thread may have opened more connections since, and wait on those
                    self.on_leave()
                    self.left.set()
            case Pause():
                self.pause_asked = True
            case Leave():
                self._leaving = True
                self.close_store()
                self.on_leave()
                self._orders.put(order)
            case Form():
                self._leaving = False
                self.left.clear()
                if order.hosts_store:
                    self._host(order.generation)
                self._orders.put(order)
            case Store() | Continue() | End():
                self._orders.put(order)

    def _host(self, generation: int) -> None:
        # The server lives here, not in the training thread, so that dropping it frees those who wait in it.
        self._server = dist.TCPStore(
            self.host, 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.send(StoreOpen(generation=generation, host=self.host, port=self._server.port))


def _innermost(thread: int | None) -> str:
    """`file:line function` of the innermost frame of ours in a thread."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    root = str(Path(__file__).resolve().parents[1])
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(root) and "site-packages" not in name:
            return f"{name.removeprefix(root + os.sep)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
