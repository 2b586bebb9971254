"""The main job from end to end on this machine: profile, plan, train, compare.  `make demo` runs it.

Two processes stand for two GPUs whose memory is capped so low that plain data parallelism does not fit.  The best
uniform plan is one way out; the plan that chooses each module's degree is another.  Both are trained, in turns, and
both are compared with what was predicted.  Last, one page shows the longest run beside its plan.
"""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specs.base import load_document
from specs.errors import PlaitError
from specs.plan import Plan
from specs.runlog import EvaluationRecord, StepRecord, read_log
from specs.units import num_bytes, percent, seconds

OUT = Path("runs/demo")
MODEL = "demo"
NUM_RANKS = 2
GLOBAL_BATCH, SEQ_LEN = 8, 256
MEMORY_CAP = "86MiB"
TRAIN_STEPS = 120
# Turns of both plans, a few steps each, so that a slow spell of the machine hits both.
NUM_TURNS, TURN_STEPS = 2, 15


def plait(*arguments: object) -> str:
    """Run a command as a user would, shown first; its standard output."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ plait {shlex.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "cli", *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout


def show(text: str) -> None:
    """Print what a command said."""
    print(text, end="", flush=True)


def make_plans(profile: Path) -> dict[str, Path]:
    """The best uniform plan, and the best plan with every freedom."""
    job = ("--model", MODEL, "--profile", profile, "--global-batch", GLOBAL_BATCH, "--seq-len", SEQ_LEN)
    plans = {"uniform": OUT / "uniform.json", "chosen": OUT / "plan.json"}
    plait("plan", *job, "--memory-cap", MEMORY_CAP, "--freedom", "uniform", "-o", plans["uniform"])
    show(plait("plan", *job, "--memory-cap", MEMORY_CAP, "-o", plans["chosen"]))
    return plans


def take_turns(plans: dict[str, Path]) -> dict[str, list[Path]]:
    """Train every plan for a few steps, again and again in turn; run folders by plan."""
    runs: dict[str, list[Path]] = {name: [] for name in plans}
    for turn in range(1, NUM_TURNS + 1):
        for name, path in plans.items():
            run = OUT / f"turn-{turn}-{path.stem}"
            plait("train", path, "--out", run, "--steps", TURN_STEPS)
            runs[name].append(run)
    return runs


def step_seconds(runs: list[Path]) -> Iterator[float]:
    """Step times after warm-up."""
    for run in runs:
        for record in read_log(run / "log.jsonl"):
            if isinstance(record, StepRecord) and not record.warm_up:
                yield record.seconds


def compared(run: Path) -> dict[str, dict[str, float]]:
    """What `plait compare` says of a run, as data."""
    command = [sys.executable, "-m", "cli", "compare", str(run), "--json"]
    found: dict[str, dict[str, float]] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return found


def summary(plans: dict[str, Path], runs: dict[str, list[Path]]) -> Table:
    """Predicted beside measured for both plans, and what the freedom of each module buys."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("plan", "step predicted", "measured", "error", "10 % .. 90 %", "memory predicted", "measured"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    steps: dict[str, tuple[float, float]] = {}
    for name, path in plans.items():
        prediction = load_document(Plan, path, "plan").predicted
        assert prediction is not None
        measured = sorted(step_seconds(runs[name]))
        tenths = statistics.quantiles(measured, n=10, method="inclusive")
        predicted, median = prediction.step_time_seconds, statistics.median(measured)
        steps[name] = predicted, median
        peak = compared(runs[name][-1])["memory_bytes"]["peak"]
        table.add_row(
            name,
            seconds(predicted),
            seconds(median),
            percent(predicted / median - 1, signed=True),
            f"{1e3 * tenths[0]:.0f} .. {1e3 * tenths[-1]:.0f}",
            num_bytes(peak["predicted"]),
            num_bytes(peak["measured"]),
        )
    gains = [1 - chosen / uniform for uniform, chosen in zip(steps["uniform"], steps["chosen"], strict=True)]
    table.add_row("time saved", percent(gains[0]), percent(gains[1]))
    return table


def main() -> None:
    """Everything, into runs/demo; what an earlier demo left there is replaced."""
    begin = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    profile = OUT / "profile.json"
    sizes = ("--seq-len", SEQ_LEN, "--block-sequences", "1,2,4", "--steps", 6, "--rounds", 2)
    plait("profile", "--model", MODEL, "--nproc", NUM_RANKS, *sizes, "-o", profile)
    plans = make_plans(profile)
    runs = take_turns(plans)
    run = OUT / "run"
    plait("train", plans["chosen"], "--out", run, "--steps", TRAIN_STEPS)
    show(plait("compare", run, "--plot", OUT / "compare.png"))
    page = OUT / "report.html"
    plait("report", run, "--profile", profile, "-o", page)
    held_out = [record for record in read_log(run / "log.jsonl") if isinstance(record, EvaluationRecord)][-1]
    first = next(record for record in read_log(run / "log.jsonl") if isinstance(record, StepRecord))

    console = Console(highlight=False)
    console.print(f"\n[bold]The best uniform plan and the chosen one, under {MEMORY_CAP} a rank[/bold]")
    console.print(summary(plans, runs))
    console.print(
        f"\nloss {first.loss:.2f} at the start, {held_out.loss:.2f} on held-out text after {held_out.step} steps "
        f"(bytes of the Python standard library); the whole demo took {time.monotonic() - begin:.0f} s"
    )
    for path, what in (
        (profile, "what this machine does"),
        (plans["chosen"], "the plan, with its ladder and certificate"),
        (run, "log, checkpoints, options"),
        (OUT / "compare.png", "predicted and measured, as a picture"),
        (page, "all of it on one page: open it in a browser"),
    ):
        console.print(f"  {path!s:<28} {what}")


if __name__ == "__main__":
    try:
        main()
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
