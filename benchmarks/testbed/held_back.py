"""What every rank of the testbed starts as: it takes its core, enters its CPU quota, if any, and becomes its program.

python -m benchmarks.testbed.held_back RANK=CGROUP,... MODULE ARGUMENTS...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.testbed.quotas import GROUP


def main() -> None:
    """Never returns."""
    quotas = dict(entry.split("=", 1) for entry in sys.argv[1].split(",") if entry)
    rank, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    # Neighbours on different cores, so that ranks that work together can work at the same time.
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    folder = quotas.get(str(rank))
    if folder is not None:
        os.environ[GROUP] = folder
        (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])


if __name__ == "__main__":
    main()
