"""How long planning takes, whole process, how much is proven, and how both grow with the cluster.

    python -m benchmarks.solver_speed [8b 70b ... growth]

Prints one line per case: wall seconds of `plait plan`, CPU seconds of its two processes, peak memory of the larger one,
step time, proven gap.  `growth` plans Llama 3 405B for 64 to 32,768 GPUs and draws results/solver_growth.png.
Sources are compiled before, as they are for everyone from the second command on.
"""

from __future__ import annotations

import compileall
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PLOT = Path(__file__).parent / "results" / "solver_growth.png"

# Name: model, cluster, global batch, sequence length, seconds that are allowed.
CASES = {
    "8b": ("llama-3-8b", "h100x8", 64, 8192, 1.0),
    "70b": ("llama-3-70b", "h100x64", 1024, 8192, 1.5),
    "405b": ("llama-3-405b", "h100x16384", 2048, 8192, 4.0),
    "ultra": ("nemotron-ultra-253b", "h100x1024", 1024, 8192, 10.0),
    "deepseek": ("deepseek-v3", "h100x2048", 4096, 4096, 10.0),
}
GROWTH = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
SEQUENCES_PER_GPU = 4  # of growth: up to 2,048 GPUs as many sequences as fill them, then 8,192


@dataclass(frozen=True)
class Run:
    """One `plait plan`: wall and CPU seconds, peak bytes of one process, the plan (None: exit code 3, nothing fits)."""

    wall: float
    cpu: float
    peak: float
    plan: dict[str, Any] | None


def run(model: str, cluster: str, global_batch: int, seq_len: int) -> Run:
    """Raises `RuntimeError` for any exit code but 0 and 3."""
    start = time.perf_counter()
    job = ["plan", "--model", model, "--cluster", cluster, "--global-batch", str(global_batch)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", *job, "--seq-len", str(seq_len), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall, code = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
    if code not in (0, 3):
        raise RuntimeError(f"plait {' '.join(job)} ended with exit code {code}")
    plan = json.loads(text) if code == 0 else None
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0, plan)


def cases(names: list[str]) -> Table:
    table = Table("case", "wall s", "CPU s", "allowed s", "peak MiB", "step s", "gap %", "ladder gain %", box=None)
    for name in names:
        model, cluster, global_batch, seq_len, allowed = CASES[name]
        done = run(model, cluster, global_batch, seq_len)
        assert done.plan is not None
        ladder = [rung["step_time_seconds"] for rung in done.plan["ladder"] if rung["step_time_seconds"]]
        table.add_row(
            f"{model} on {cluster}",
            f"{done.wall:.2f}",
            f"{done.cpu:.2f}",
            f"{allowed:g}",
            f"{done.peak / 2**20:.0f}",
            f"{ladder[-1]:.4g}",
            f"{100 * done.plan['certificate']['gap']:.3f}",
            f"{100 * (1 - ladder[-1] / ladder[0]):.2f}",
        )
    return table


def growth() -> Table:
    """Table of planning against the size of the cluster, and its plot."""
    table = Table("GPUs", "global batch", "wall s", "CPU s", "peak MiB", "gap %", box=None)
    found: list[tuple[int, Run]] = []
    for size in GROWTH:
        global_batch = min(SEQUENCES_PER_GPU * size, 8192)
        done = run("llama-3-405b", f"h100x{size}", global_batch, 8192)
        gap = "nothing fits" if done.plan is None else f"{100 * done.plan['certificate']['gap']:.3f}"
        table.add_row(
            str(size), str(global_batch), f"{done.wall:.2f}", f"{done.cpu:.2f}", f"{done.peak / 2**20:.0f}", gap
        )
        found.append((size, done))
    _draw(found)
    return table


def _draw(found: list[tuple[int, Run]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.0, 4.0))
    sizes = [size for size, _ in found]
    axes.plot(sizes, [done.wall for _, done in found], "o-", label="wall clock")
    axes.plot(sizes, [done.cpu for _, done in found], "s--", label="CPU")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("seconds of plait plan")
    axes.set_title("Planning Llama 3 405B, whole process")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=150)


def main() -> None:
    names = sys.argv[1:] or [*CASES, "growth"]
    console = Console(highlight=False, width=120)
    compileall.compile_dir(Path(__file__).parents[1], maxlevels=1, quiet=1)
    console.print(cases([name for name in names if name in CASES]))
    if "growth" in names:
        console.print(growth())


if __name__ == "__main__":
    main()
