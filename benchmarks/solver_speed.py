"""How long planning takes, whole process, and how much is proven.

    python -m benchmarks.solver_speed [8b 70b 405b ...]

Prints one line per case: wall and CPU seconds of `plait plan`, peak memory, step time, gap.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

# Name: model, cluster, global batch, sequence length, seconds that are allowed.
CASES = {
    "8b": ("llama-3-8b", "h100x8", 64, 8192, 1.0),
    "70b": ("llama-3-70b", "h100x64", 1024, 8192, 1.5),
    "405b": ("llama-3-405b", "h100x16384", 2048, 8192, 4.0),
    "ultra": ("nemotron-ultra-253b", "h100x1024", 1024, 8192, 10.0),
    "deepseek": ("deepseek-v3", "h100x2048", 4096, 4096, 10.0),
}


def run(model: str, cluster: str, global_batch: int, seq_len: int) -> tuple[float, float, float, dict[str, object]]:
    """(wall seconds, CPU seconds, peak bytes so far of any child, the plan as JSON)."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = ["plan", "--model", model, "--cluster", cluster, "--global-batch", str(global_batch)]
    done = subprocess.run(
        [sys.executable, "-m", "cli", *command, "--seq-len", str(seq_len), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, cpu, after.ru_maxrss * 1024.0, json.loads(done.stdout)


def main() -> None:
    table = Table("case", "wall s", "CPU s", "allowed s", "peak MiB", "step s", "gap %", "ladder gain %", box=None)
    for name in sys.argv[1:] or CASES:
        *shape, allowed = CASES[name]
        wall, cpu, peak, plan = run(*shape)  # type: ignore[arg-type]
        ladder = [rung["step_time_seconds"] for rung in plan["ladder"] if rung["step_time_seconds"]]  # type: ignore[attr-defined]
        table.add_row(
            f"{shape[0]} on {shape[1]}",
            f"{wall:.2f}",
            f"{cpu:.2f}",
            f"{allowed:g}",
            f"{peak / 2**20:.0f}",
            f"{ladder[-1]:.4g}",
            f"{100 * plan['certificate']['gap']:.3f}",  # type: ignore[index]
            f"{100 * (1 - ladder[-1] / ladder[0]):.2f}",
        )
    Console(highlight=False, width=120).print(table)


if __name__ == "__main__":
    main()
