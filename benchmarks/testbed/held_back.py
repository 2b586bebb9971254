"""What every rank of the testbed starts as: it enters its CPU quota, if it has one, and becomes its program.

python -m benchmarks.testbed.held_back RANK=CGROUP,... MODULE ARGUMENTS...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Never returns."""
    quotas = dict(entry.split("=", 1) for entry in sys.argv[1].split(",") if entry)
    folder = quotas.get(os.environ["RANK"])
    if folder is not None:
        (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])


if __name__ == "__main__":
    main()
