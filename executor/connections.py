"""gloo's connections of one generation, so that they can be cut from another thread.

gloo (torch 2.13) has no abort that wakes a thread which waits in a collective: it waits for its peer, or for the time
limit.  Shutting its sockets down does wake it, at once and on both ends, whoever still refers to the groups.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

_DESCRIPTORS = "/proc/self/fd"
_kept: list[dist.ProcessGroup] = []  # groups that were cut and left


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


def leave_groups() -> None:
    """Destroy the process groups, or what is left of groups that could not be formed.

    Keys in the store carry the number of the group, which each process counts for itself.  torch (2.13) begins anew
    when groups are destroyed, not when forming them has failed: the members of the next generation would then wait for
    each other under unlike keys.
    """
    # Destroying joins gloo's threads with the interpreter held: one may never come back (`waiting`), or wait for the
    # interpreter to let go of the last work's tensors.
    if os.path.isdir(_DESCRIPTORS):
        _kept.extend(g for g in dist.distributed_c10d._world.pg_map if dist.get_backend(g) == "gloo")
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0


class Connections:
    """Those that were opened while groups were formed."""

    def __init__(self) -> None:
        self._opened: set[str] = set()
        self._before: set[str] | None = None  # what was open when the opening began that is not over yet

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Sockets opened inside belong to the groups."""
        self._before = before = set(_sockets())
        try:
            yield
        finally:
            self._opened |= set(_sockets()) - before
            self._before = None

    def cut(self) -> None:
        """Shut all of them down: whoever waits on them, here or at the other end, gets an error.

        While groups are being formed, those that were opened so far; call it again for those that come after.
        """
        before = self._before
        for inode, descriptor in _sockets().items():
            if inode not in self._opened and (before is None or inode in before):
                continue
            try:
                with socket.socket(fileno=os.dup(descriptor)) as own:
                    own.getpeername()  # a listening socket has no peer; gloo ends the process when one is shut down
                    own.shutdown(socket.SHUT_RDWR)
            except OSError:  # listening, or closed meanwhile
                continue
