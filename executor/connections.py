"""gloo's connections of one generation, so that they can be cut from another thread.

gloo (torch 2.13) has no abort that wakes a thread which waits in a collective: it waits for its peer, or for the time
limit.  Shutting its sockets down does wake it, at once and on both ends, whoever still refers to the groups.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_DESCRIPTORS = "/proc/self/fd"


def _sockets() -> dict[str, int]:
    """This process's sockets by inode (Linux; elsewhere none, and peers are freed when the groups are closed)."""
    found: dict[str, int] = {}
    if not os.path.isdir(_DESCRIPTORS):
        return found
    for name in os.listdir(_DESCRIPTORS):
        try:
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:"):
            found[target] = int(name)
    return found


class Connections:
    """Those that were opened while groups were formed."""

    def __init__(self) -> None:
        self._opened: set[str] = set()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Sockets opened inside belong to the groups."""
        before = set(_sockets())
        try:
            yield
        finally:
            self._opened |= set(_sockets()) - before

    def cut(self) -> None:
        """Shut all of them down: whoever waits on them, here or at the other end, gets an error."""
        opened, self._opened = self._opened, set()
        for inode, descriptor in _sockets().items():
            if inode not in opened:
                continue
            try:
                with socket.socket(fileno=os.dup(descriptor)) as own:
                    own.getpeername()  # a listening socket has no peer; gloo ends the process when one is shut down
                    own.shutdown(socket.SHUT_RDWR)
            except OSError:  # listening, or closed meanwhile
                continue
