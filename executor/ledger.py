"""The account of a run's seconds, and its log file."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from specs.errors import BadInputError
from specs.runlog import Bucket, Record


class Ledger:
    """Every second since `started` belongs to one bucket; what no bucket claims is `other`."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._seconds: defaultdict[Bucket, float] = defaultdict(float)
        self._seconds["program_startup"] = time.time() - started

    @contextlib.contextmanager
    def bucket(self, name: Bucket) -> Iterator[None]:
        """Seconds inside belong to `name`.  Buckets do not nest."""
        begin = time.time()
        try:
            yield
        finally:
            self._seconds[name] += time.time() - begin

    def add(self, name: Bucket, seconds: float) -> None:
        """Seconds that were measured elsewhere."""
        self._seconds[name] += seconds

    def wall_seconds(self) -> float:
        """Since the command started."""
        return time.time() - self._started

    def seconds(self) -> dict[Bucket, float]:
        """By bucket; they add up to the wall clock."""
        named = dict(self._seconds)
        named["other"] = max(0.0, self.wall_seconds() - sum(named.values()))
        return named


class RunLog:
    """Appends records to a JSON-lines file, one whole line at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise BadInputError(f"run log {path} cannot be opened: {error.strerror}.") from None

    def write(self, record: Record) -> None:
        """Append and flush.  Raises `BadInputError` when the disk is full."""
        try:
            self._file.write(record.model_dump_json() + "\n")
            self._file.flush()
        except OSError as error:
            raise BadInputError(
                f"run log {self._path} cannot be written: {error.strerror}. Free space, then continue with --resume."
            ) from None

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def _drop_torn_line(path: Path) -> None:
    """A killed run may have left half a line; a new record must not be appended to it."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) != len(content):
        path.write_bytes(whole)
