"""Plans from the solver in the executor's dry run: bytes of every kind of rank, by formula and played.

    python -m benchmarks.dry_run_plans [--minutes N] [--out build/dry-run-plans] [JOB ...]        an hour of one core

Every model preset that the executor runs is planned on a cluster where it fits, and one rank of every kind is played
with fake tensors (`executor.dry_run`), with no more micro-batches than bring its stages to the moments at which they
hold most.  Compared are the bytes that it holds between two actions of the schedule, and its peak: weights, gradients,
optimizer states, activations, what modules work in, buffers.  What a device reserves besides is in neither.  Plans and
ranks that the folder has already are not made again; writes benchmarks/results/dry_run_plans.md.  Exit code 1 when a
peak is more than 2 % off.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cost_models.rank_work import PlanWork, RankWork, Seat
from cost_models.sources import device_costs
from executor.dry_run import dry_run
from planner.make import make_plan
from planner.problem import Problem
from specs.base import load_document, write_whole
from specs.plan import Pipeline, Plan, Provenance, TrainingSpec
from specs.presets import cluster_preset, model_preset
from specs.schedule import Held, most_held

GIB = 2**30
BOUND = 0.02
RESULTS = Path(__file__).parent / "results" / "dry_run_plans.md"
MADE = Provenance(created_by="benchmarks/dry_run_plans.py", created_at="-")
HEAD = f"""# Do plans hold what they are predicted to hold?

One rank of every kind of the solver's plans, played with fake tensors through the executor's own code, beside the
formulas that the search goes by. "Held" is the most between two actions of the schedule, "peak" the most at any time;
ratios are predicted over played, so that above 1 a plan leaves memory unused. Peaks are to be within {BOUND:.0%}.

"""


@dataclass(frozen=True)
class Job:
    """What to plan; `cap_gib` None: the device's memory."""

    model: str
    cluster: str
    global_batch: int
    seq_len: int
    cap_gib: float | None = None

    @property
    def name(self) -> str:
        return self.model if self.cap_gib is None else f"{self.model}-{self.cap_gib:g}gib"

    def plan(self) -> Plan:
        """Raises as planning does."""
        problem = Problem(
            model=model_preset(self.model),
            cluster=cluster_preset(self.cluster),
            training=TrainingSpec(global_batch=self.global_batch, seq_len=self.seq_len),
            provenance=MADE,
            memory_cap_bytes=None if self.cap_gib is None else round(self.cap_gib * GIB),
        )
        return make_plan(problem, device_costs, top_k=0)


# All presets but DeepSeek-V3 and Nemotron Nano: the executor runs neither latent attention nor Mamba-2.
JOBS = (
    Job("tiny", "h100x8", 64, 256),
    Job("demo", "h100x8", 64, 256),
    Job("gpt2", "h100x8", 64, 1024),
    Job("openelm-3b", "h100x8", 256, 2048),
    Job("openelm-3b", "h100x8", 256, 2048, 14),
    Job("llama-3-8b", "h100x8", 64, 8192),
    Job("llama-3-8b", "h100x8", 64, 8192, 40),
    Job("mixtral-8x7b", "h100x64", 512, 4096),
    Job("qwen3-30b-a3b", "h100x64", 512, 4096),
    Job("nemotron-super-49b", "h100x64", 256, 4096),
    Job("llama-3-70b", "h100x64", 256, 8192),
    Job("qwen3-235b-a22b", "h100x256", 1024, 4096),
    Job("nemotron-ultra-253b", "h100x1024", 1024, 4096),
    Job("llama-3-405b", "h100x16384", 2048, 8192),
)


@dataclass(frozen=True)
class Row:
    """One kind of rank, bytes by formula and played."""

    stage: int
    position: int
    held: float
    held_played: float
    peak: float
    peak_played: float

    @classmethod
    def of(cls, seat: Seat, formulas: RankWork, played: RankWork) -> Row:
        return cls(
            seat.stage, seat.position, formulas.held_bytes, played.held_bytes, formulas.peak_bytes, played.peak_bytes
        )

    @property
    def held_ratio(self) -> float:
        return self.held / self.held_played

    @property
    def peak_ratio(self) -> float:
        return self.peak / self.peak_played


def plan_of(job: Job, folder: Path) -> Plan:
    """The job's plan; one that the folder has already is read."""
    path = folder / f"{job.name}.plan.json"
    if not path.exists():
        job.plan().save(path)
    return load_document(Plan, path, "plan")


def shortened(plan: Plan) -> Plan:
    """The plan with fewer micro-batches, where more of them only repeat what happens."""
    replicas = tuple(
        replica.model_copy(
            update={
                "sequences": fewest(plan.pipelines[replica.pipeline], plan.num_micro_batches(replica))
                * plan.pipelines[replica.pipeline].micro_batch
            }
        )
        for replica in plan.replicas
    )
    batch = sum(replica.sequences for replica in replicas)
    training = plan.training.model_copy(update={"global_batch": batch})
    return plan.model_copy(update={"replicas": replicas, "training": training})


def fewest(pipeline: Pipeline, number: int) -> int:
    """Micro-batches with which every stage comes to the moments at which it holds most with `number` of them, and has
    another one on its way then; as many turns as are alike when interleaved.
    """
    if pipeline.schedule == "given":
        return number
    num_stages = len(pipeline.stages)
    turn = num_stages if pipeline.schedule == "interleaved" and number % num_stages == 0 else 1

    def fullest(count: int) -> list[set[Held]]:
        return [set(most_held(own)) for own in pipeline.stage_actions(count)]

    most = fullest(number)
    enough = next((count for count in range(num_stages, number, turn) if fullest(count) == most), number)
    return min(number, enough + (turn == 1))


def play(job: Job, folder: Path, progress: Progress, until: float) -> tuple[Plan, list[Row]] | None:
    """The kinds of ranks of a job's plan, those that are played before time is up; None when there are none."""
    plan, path = plan_of(job, folder), folder / f"{job.name}.rows.json"
    known: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    formulas, rows, seats = PlanWork(plan), [], kinds(plan)
    task = progress.add_task(job.name, total=len(seats))
    for seat in seats:
        key = f"{seat.stage}.{seat.position}"
        if key not in known:
            if time.monotonic() > until:
                continue
            played = dry_run(shortened(plan), seat.process)
            known[key] = {"held": played.held_bytes, "peak": played.peak_bytes}
            write_whole(path, json.dumps(known, indent=1))
        work = formulas.of(seat)
        one = known[key]
        rows.append(Row(seat.stage, seat.position, work.held_bytes, one["held"], work.peak_bytes, one["peak"]))
        progress.advance(task)
    return (plan, rows) if rows else None


def kinds(plan: Plan) -> list[Seat]:
    """One rank of every kind; of stages that hold, compute and send the same, one."""
    formulas = PlanWork(plan)
    seats = {repr(formulas.of(seat)): seat for seat in reversed(formulas.unlike_seats())}
    return sorted(seats.values())


def furthest(ratios: Iterator[float]) -> float:
    """The ratio that is furthest from 1."""
    return max(ratios, key=lambda ratio: abs(ratio - 1.0))


def summary(job: Job, plan: Plan, rows: list[Row]) -> str:
    """A line of the first table."""
    most = max(rows, key=lambda row: row.peak_played)
    cells = [
        job.name,
        f"{job.cluster}, {job.global_batch} x {job.seq_len}",
        plan.ladder[-1].layout,
        f"{len(rows)}" if len(rows) == len(kinds(plan)) else f"{len(rows)} of {len(kinds(plan))}",
        f"{most.peak / GIB:.3f}",
        f"{most.peak_played / GIB:.3f}",
        f"{furthest(row.held_ratio for row in rows):.4f}",
        f"{min(row.peak_ratio for row in rows):.4f}",
        f"{max(row.peak_ratio for row in rows):.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def detail(job: Job, rows: list[Row]) -> Iterator[str]:
    """Lines of the second table."""
    for row in rows:
        held = f"{row.held / GIB:.3f} | {row.held_played / GIB:.3f} | {row.held_ratio:.4f}"
        peak = f"{row.peak / GIB:.3f} | {row.peak_played / GIB:.3f} | {row.peak_ratio:.4f}"
        yield f"| {job.name} | {row.stage} | {row.position} | {held} | {peak} |"


def page(found: list[tuple[Job, Plan, list[Row]]]) -> str:
    """The results as Markdown."""
    made = f"Made by `python -m benchmarks.dry_run_plans` on {datetime.now(tz=timezone.utc).date()}, {os.cpu_count()} "
    made += f"CPU cores, Python {platform.python_version()}, torch {torch.__version__}."
    lines = [f"{HEAD}{made}", ""]
    lines.append(
        "| job | cluster, batch | layout | kinds | fullest rank, GiB | played | held | least peak | most peak |"
    )
    lines.append("|---|---|---|---:|---:|---:|---:|---:|---:|")
    lines += [summary(*one) for one in found]
    lines += ["", "## Every kind of rank, GiB", ""]
    lines.append("| job | stage | position | held | played | ratio | peak | played | ratio |")
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    lines += [line for job, _, rows in found for line in detail(job, rows)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {job.name: job for job in JOBS}
    parser.add_argument("jobs", nargs="*", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=Path("build/dry-run-plans"), help="plans and what was played")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the page")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then write the page with what there is")
    given = parser.parse_args()
    if unknown := sorted(set(given.jobs) - set(known)):
        parser.error(f"no such job: {', '.join(unknown)}")
    given.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60.0 * given.minutes
    found: list[tuple[Job, Plan, list[Row]]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for job in (known[name] for name in given.jobs or known):
            if time.monotonic() > until and not (given.out / f"{job.name}.rows.json").exists():
                continue
            played = play(job, given.out, progress, until)
            if played is not None:
                found.append((job, *played))
    write_whole(given.results, page(found))
    off = [(job.name, row) for job, _, rows in found for row in rows if abs(row.peak_ratio - 1.0) > BOUND]
    for name, row in off:
        print(f"{name}, stage {row.stage}, position {row.position}: predicted {row.peak_ratio:.4f} of what was played")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
