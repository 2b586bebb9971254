"""Waiting for peers in a way that can be given up.

gloo (torch 2.13) may lose a wake-up: a peer that says it is ready to receive and is gone a moment later makes the send
fail in gloo's own thread, after the buffer has left its queue, so that nobody tells whoever waits for that buffer; its
socket is closed, and only the time limit of minutes would end the wait.  A supervised worker therefore waits in slices,
between which it looks whether it is to leave.  What it gives up waiting for stays with gloo until the process ends.
"""

from __future__ import annotations

import queue
import threading
from datetime import timedelta

import torch.distributed as dist

SLICE = timedelta(seconds=0.5)
_Outcome = queue.SimpleQueue[BaseException | None]


class PeersLostError(Exception):
    """The generation cannot go on: a peer is gone, or the supervisor said to leave."""


class _Waiter:
    """A thread that waits for sends and receives: gloo has no slices for those, giving up on one closes all others."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[dist.Work, _Outcome]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, work: dist.Work) -> _Outcome:
        outcome: _Outcome = queue.SimpleQueue()
        self._works.put((work, outcome))
        return outcome

    def _run(self) -> None:
        while True:
            work, outcome = self._works.get()
            try:
                work.wait()
            except RuntimeError as error:
                outcome.put(error)
            else:
                outcome.put(None)


_left: threading.Event | None = None  # None: nobody can be told to leave, one wait is all
_waiter: _Waiter | None = None


def may_leave(left: threading.Event) -> None:
    """From now on waits end with `PeersLostError` once `left` is set and gloo has not ended them itself."""
    global _left
    _left = left


def wait(work: dist.Work | None) -> None:
    """Wait for a collective.  Raises `PeersLostError` when told to leave, `RuntimeError` when it failed."""
    if work is None:
        return
    if _left is None:
        work.wait()
        return
    while True:
        try:
            work.wait(SLICE)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises what it failed of
                return
            if _left.is_set():
                raise PeersLostError("told to leave a collective that gloo did not end") from None


def wait_transfer(work: dist.Work) -> None:
    """Wait for a send or receive.  Raises as `wait`."""
    global _waiter
    if _left is None:
        work.wait()
        return
    _waiter = _waiter or _Waiter()
    outcome = _waiter.begin(work)
    while True:
        try:
            error = outcome.get(timeout=SLICE.total_seconds())
        except queue.Empty:
            if _left.is_set():
                _waiter = None  # that thread waits on
                raise PeersLostError("told to leave a transfer that gloo did not end") from None
        else:
            if error is not None:
                raise error
            return
