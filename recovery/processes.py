"""Worker processes of this node: starting, ending, seeing them end.  No torch."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping

from executor.messages import CONTROL


class Processes:
    """Each runs `python -m arguments...`; the environment says which rank it is and who supervises it."""

    def __init__(self, arguments: Iterable[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = [sys.executable, "-m", *arguments]
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **(environment or {}),
        }
        self._by_rank: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def ranks(self) -> set[int]:
        """Ranks that have a process."""
        return set(self._by_rank)

    def start(self, rank: int, *, local_rank: int, local_size: int, control: str) -> None:
        """Start a process for a rank; one that it may have is ended first.  `control`: host:port:token."""
        self.kill(rank)
        environment = {
            **self._environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_size),
            CONTROL: control,
        }
        # A session of their own: Ctrl-C reaches this process alone, which asks for a clean stop.
        self._by_rank[rank] = subprocess.Popen(self._command, env=environment, start_new_session=True)

    def ended(self) -> list[tuple[int, int]]:
        """Rank and exit code of those that ended since the last call."""
        codes = [(rank, process.poll()) for rank, process in self._by_rank.items()]
        found = [(rank, code) for rank, code in codes if code is not None]
        for rank, _ in found:
            del self._by_rank[rank]
        return found

    def kill(self, rank: int) -> None:
        """End a rank's process, if it has one, and wait until it is gone."""
        process = self._by_rank.pop(rank, None)
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End all of them, whatever they do."""
        for process in self._by_rank.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for rank in self.ranks:
            self.kill(rank)
