"""Measures on the testbed: a profile, and the steps of plans in turns."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.hosts import Running
from benchmarks.testbed.turns import Job
from planner.constraints import Constraints
from planner.search import Freedom
from planner.start import start_plan
from specs.base import load_document, write_whole
from specs.plan import Plan
from specs.profile import Profile

NUM_TURNS = 5


@dataclass(frozen=True)
class Measured:
    """Seconds of one step: the median over turns, each turn being the median of its steps; the middle 80 %."""

    seconds: float
    p10: float
    p90: float
    turns: int
    activation_bytes: tuple[int, ...]  # kept for backward at the peak, by rank; none known of torch's pieces


def profile_of(hosts: Running, folder: Path, *, model: str, seq_len: int) -> Profile:
    """`plait profile` on the hosts, once; later calls read what it wrote."""
    path = folder / "profile.json"
    if not path.exists():
        # Up to a whole batch in one block.
        block_sequences = "1,2,4,8" if hosts.bed.world_size == 2 else "1,2,8"
        sizes = ("--seq-len", str(seq_len), "--block-sequences", block_sequences, "--steps", "3", "--rounds", "2")
        hosts.run("cli", "profile", "--model", model, *sizes, "-o", str(path), log=folder / "profile.log")
    return load_document(Profile, path, "profile")


def chosen_plan(
    folder: Path,
    model: str,
    *,
    batch: int,
    seq_len: int,
    cluster: Path | None = None,
    memory_cap_bytes: int | None = None,
    freedom: Freedom = "cuts",
    constraints: Constraints | None = None,
) -> Plan:
    """The planner's fastest plan, from the profile in `folder` alone (`cluster`: instead of what the profile saw)."""
    return start_plan(
        model=model,
        cluster=None if cluster is None else str(cluster),
        profile_path=folder / "profile.json",
        global_batch=batch,
        seq_len=seq_len,
        precision="fp32",
        memory_cap=None if memory_cap_bytes is None else str(memory_cap_bytes),
        objective="step-time",
        freedom=freedom,
        time_limit_seconds=60.0,
        top_k=0,
        command="benchmarks/testbed",
        constraints=constraints,
    )


def step_seconds(plan: Plan) -> float:
    """Predicted, of one step."""
    assert plan.predicted is not None
    return plan.predicted.step_time_seconds


def take_turns(
    hosts: Running,
    folder: Path,
    plans: Mapping[str, Plan],
    *,
    advance: Callable[[int], None],
    num_turns: int = NUM_TURNS,
    shares: Mapping[str, Sequence[float]] | None = None,
    torch: Mapping[str, str] | None = None,
) -> dict[str, Measured]:
    """Run all plans in turns; `advance` is told how many turns are done.  What an earlier call did is kept.

    `shares`: of a core, by rank, while a plan runs; without, all ranks have the hosts' usual share.
    `torch`: plans that torch's own pieces run, each with its kind (TP, DP, PP).
    """
    forget_changed(folder, plans)
    files: dict[str, Path] = {}
    for number, (name, plan) in enumerate(sorted(plans.items())):
        files[name] = folder / f"plan-{number}.json"
        plan.save(files[name])
    job = Job(
        plans=files, out=folder / "turns.jsonl", num_turns=num_turns, shares=dict(shares or {}), torch=dict(torch or {})
    )
    job.save(folder / "job.json")

    def poll() -> None:
        if job.out.exists():
            advance(job.out.read_text().count("\n"))

    hosts.run("benchmarks.testbed.turns", str(folder / "job.json"), log=folder / "turns.log", poll=poll)
    poll()
    return read_turns(job.out)


def forget_changed(folder: Path, plans: Mapping[str, Plan]) -> None:
    """Leave out earlier turns of plans that have become others."""
    path = folder / "job.json"
    if not path.exists():
        return
    job = load_document(Job, path, "job")
    before = {name: load_document(Plan, file, "plan") for name, file in job.plans.items() if name in plans}
    changed = {
        name
        for name, plan in before.items()
        if (plan.pipelines, plan.replicas) != (plans[name].pipelines, plans[name].replicas)
    }
    if changed and job.out.exists():
        lines = job.out.read_text().splitlines(keepends=True)
        write_whole(job.out, "".join(line for line in lines if json.loads(line)["plan"] not in changed))


def read_turns(path: Path) -> dict[str, Measured]:
    """By plan."""
    turns: defaultdict[str, list[float]] = defaultdict(list)
    kept: dict[str, tuple[int, ...]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        turns[record["plan"]].append(statistics.median(record["seconds"]))
        if "activation_bytes" in record:
            kept[record["plan"]] = tuple(record["activation_bytes"])
    found = {}
    for name, values in turns.items():
        tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
        found[name] = Measured(statistics.median(values), tenths[0], tenths[-1], len(values), kept.get(name, ()))
    return found
