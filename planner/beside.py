"""Work in a second process while this one goes on."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")


class Beside(Generic[T]):
    """The result of `work`, done by a fork of this process: it sees all that is here and changes nothing of it.

    Where there is no second core or no fork that is safe, or it is `small` (takes hardly longer than a process to
    start), it is done here when its result is asked for.  So it must not change what others use.
    """

    def __init__(self, work: Callable[[], T], *, small: bool = False) -> None:
        self._work = work
        self._receive: Connection | None = None
        if small or not _may_fork():
            return
        from multiprocessing import get_context  # takes a while to import

        context = get_context("fork")
        self._receive, send = context.Pipe(duplex=False)
        self._process = context.Process(target=_send, args=(work, send), daemon=True)
        self._process.start()
        send.close()
        weakref.finalize(self, self._process.kill)  # nobody waits for it any more

    def result(self) -> T:
        """Waits for it.  Raises what the work raised, and `RuntimeError` when the process died."""
        if self._receive is None:
            return self._work()
        try:
            value, raised = self._receive.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"the second process of the search ended with exit code {self._process.exitcode} before it had a "
                "result. Free some memory if the system killed it, or run on one core (taskset -c 0)."
            ) from None
        self._process.join()
        if raised is not None:
            error, text = raised
            raise error from RuntimeError(text)
        found: T = value
        return found


def _may_fork() -> bool:
    """Linux alone: elsewhere fork is missing, or breaks the system's own libraries."""
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        return False
    from multiprocessing import current_process

    return not current_process().daemon  # which may have no children


def _send(work: Callable[[], T], send: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    value, raised = None, None
    try:
        value = work()
    except Exception as error:
        raised = error, traceback.format_exc()
    send.send((value, raised))
