"""Work in a second process while this one goes on."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


class Beside(Generic[A, B, C]):
    """The results of `first` and then `second`, done by a fork of this process: it sees all that is here and changes
    nothing of it.  `either` is done by whichever of the two comes to it first.

    Where there is no second core or no fork that is safe, or all is `small` (takes hardly longer than a process to
    start), each is done here when its result is asked for.  So they must not change what others use.
    """

    def __init__(
        self, first: Callable[[], A], second: Callable[[], B], either: Callable[[], C], *, small: bool = False
    ) -> None:
        self._first, self._second, self._either = first, second, either
        self._receive: Connection | None = None
        if small or not _may_fork():
            return
        from multiprocessing import get_context  # takes a while to import

        context = get_context("fork")
        self._receive, send = context.Pipe(duplex=False)
        self._token, give = os.pipe()  # with one byte in it: who reads that does what either may do
        os.write(give, b".")
        os.close(give)
        self._process = context.Process(target=_send, args=((first, second), either, self._token, send), daemon=True)
        self._process.start()
        send.close()
        weakref.finalize(self, self._process.kill)  # nobody waits for it any more
        weakref.finalize(self, os.close, self._token)

    def first(self) -> A:
        """Waits for it.  Raises what the work raised, and `RuntimeError` when the process died."""
        found: A = self._first() if self._receive is None else self._next(self._receive)
        return found

    def rest(self) -> tuple[B, C]:
        """Of `second` and `either`, after `first`; raises the same."""
        if self._receive is None:
            return self._second(), self._either()
        if os.read(self._token, 1):
            either = self._either()
            found = self._next(self._receive), either
        else:
            found = self._next(self._receive), self._next(self._receive)
        self._process.join()
        return found

    def _next(self, receive: Connection) -> Any:
        try:
            value, raised = receive.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"the second process of the search ended with exit code {self._process.exitcode} before it had a "
                "result. Free some memory if the system killed it, or run on one core (taskset -c 0)."
            ) from None
        if raised is not None:
            error, text = raised
            raise error from RuntimeError(text)
        return value


def _may_fork() -> bool:
    """Linux alone: elsewhere fork is missing, or breaks the system's own libraries."""
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        return False
    from multiprocessing import current_process

    return not current_process().daemon  # which may have no children


def _send(works: Sequence[Callable[[], object]], either: Callable[[], object], token: int, send: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    for work in (*works, either):
        if work is either and not os.read(token, 1):
            return
        value, raised = None, None
        try:
            value = work()
        except Exception as error:
            raised = error, traceback.format_exc()
        send.send((value, raised))
        if raised is not None:
            return
