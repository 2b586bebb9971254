"""What going on with fewer ranks buys: one trace of three losses under three policies, on this machine.

    python -m benchmarks.recovery [--steps 60] [--seq-len 128] [--keep FOLDER]

Four gloo ranks train the demo model in two replicas of two (attention whole on each rank, the rest cut two ways).
Each rank has an equal quota of one core (testbed/quotas.py; needs root and Linux), so that a survivor does not become
faster when its neighbour dies.  Ranks 3, 0 and 2 are killed one after the other and come back a fifth of the run later;
then the same under two other policies.  Printed:

    after the loss of 1 of 4     median step and tokens/s, against the healthy run, predicted beside measured
    from kill to next step       seconds by part, each interruption
    the same trace               wall clock, goodput, steps done again: plan anew; drop the replica; stop and restart

The policy that plans anew is also set beside its prediction for this trace, as `plait compare` does.  About six
minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.own_machine import profile_of
from benchmarks.testbed.quotas import held_back_arguments, quotas, share_of_core
from cost_models.sources import survivors_costs
from cost_models.step import price
from executor.launch import WorkerError
from executor.start import prepare_run
from recovery.policy import Policy, Way, WayOn, ranks_of
from recovery.start import make_workers
from recovery.supervisor import Supervisor
from reports.account import account_of, attempts_of
from reports.failure_trace import compare_failures, render
from reports.incidents import render as render_incidents
from specs.base import load_document
from specs.contingency import remade
from specs.errors import NoPlanFitsError
from specs.faults import Fault
from specs.plan import Plan
from specs.presets import model_preset
from specs.profile import Profile
from specs.runlog import IncidentRecord, StepRecord, read_log
from specs.units import seconds as format_seconds
from tests.layouts import ReplicaShape, StageShape, build

NUM_RANKS = 4
LOST = (3, 0, 2)  # in this order
BATCH = 12  # sequences: a multiple of what two and three ranks share evenly


@dataclass(frozen=True)
class Outcome:
    """One policy's run of the trace."""

    name: str
    run: Path
    wall_seconds: float
    kept_tokens: int
    redone_steps: int


def make_plan(profile: Profile, seq_len: int) -> Plan:
    """Two replicas of two ranks on the profiled machine, priced."""
    shape = ReplicaShape([StageShape(2, {"attention": (1, 1)})], 2, BATCH // 2)
    plan = build(model_preset("demo"), [shape, shape], seq_len=seq_len).model_copy(update={"cluster": profile.cluster})
    return plan.with_results(predicted=price(plan, survivors_costs(profile, plan.training, plan.cluster)))


def drop_replicas(plan: Plan, lost: frozenset[int]) -> Way:
    """What is usual: replicas that lost a rank pause, the others take their share of the batch."""
    whole = [index for index, replica in enumerate(plan.replicas) if not lost.intersection(replica.ranks)]
    if len(whole) == len(plan.replicas):
        return Way(plan, "as planned", "")
    if not whole:
        raise NoPlanFitsError("every replica has lost a rank.")
    batch = plan.training.global_batch
    sequences = [batch // len(whole) if index in whole else 0 for index in range(len(plan.replicas))]
    left = remade(plan, sorted(lost), sequences=sequences, pipelines=(), replaced={}, stand_ins=(), global_batch=batch)
    return Way(left, "drop", f"{len(whole)} replicas")


def trace(steps: int) -> tuple[list[Fault], dict[int, int]]:
    """Kills at even distances, and when each rank is back."""
    at = {rank: steps * (2 * i + 1) // (2 * len(LOST)) for i, rank in enumerate(LOST)}
    faults = [Fault(kind="kill", rank=rank, step=step, moment="forward") for rank, step in at.items()]
    return faults, {rank: step + steps // 5 - 1 for rank, step in at.items()}


def train(name: str, folder: Path, plan_path: Path, profile: Path, steps: int, *, drop: bool, stop: bool) -> Outcome:
    """The trace under one policy; stop and restart resumes from the last checkpoint, as a job script would."""
    run = folder / name.replace(" ", "-")
    given: dict[str, object] = {
        "num_steps": steps,
        "checkpoint_every": 10,
        "profile": profile,
        "on_loss": "stop" if stop else "shrink",
    }
    faults, returns = trace(steps)
    began, resume = time.time(), False
    shares = dict.fromkeys(range(NUM_RANKS), share_of_core(NUM_RANKS))
    with quotas(f"plait-{os.getpid()}", shares) as groups:
        while True:
            plan, options = prepare_run(plan_path, run, {} if resume else given, resume=resume, writes=True)
            way_on: WayOn = Policy(plan, options).way_on
            if drop:
                way_on = lambda lost, _slow, plan=plan: drop_replicas(plan, lost)  # type: ignore[misc]  # noqa: E731
            try:
                workers = make_workers(plan, options, through=held_back_arguments(groups))
                Supervisor(plan, options, way_on, workers, started=time.time(), faults=faults, returns=returns).run()
                break
            except WorkerError:
                faults, resume = faults[1:], True
    account = account_of(attempts_of(read_log(run / "log.jsonl")))
    return Outcome(name, run, time.time() - began, account.kept_tokens, account.num_wasted_steps)


def throughput(run: Path, plan: Plan, profile: Profile) -> Table:
    """Steps on three ranks against steps on four, pairwise by interruption, and what was predicted."""
    table = Table(title="After the loss of 1 of 4 ranks", title_justify="left", box=None, pad_edge=False)
    for heading in ("lost", "went on with", "step on 4", "step on 3", "throughput kept", "of 3/4", "predicted"):
        table.add_column(heading, justify="right")
    records = read_log(run / "log.jsonl")
    segments: list[tuple[IncidentRecord | None, list[float]]] = [(None, [])]
    for record in records:
        if isinstance(record, IncidentRecord):
            segments.append((record, []))
        elif isinstance(record, StepRecord) and not record.warm_up:
            segments[-1][1].append(record.seconds)
    for (_, healthy), (incident, few) in itertools.pairwise(segments):
        if incident is None or not incident.lost or not healthy or not few:
            continue
        on = load_document(Plan, run / "generations" / f"plan-{incident.generation:04d}.json", "plan")
        costs = survivors_costs(profile, on.training, on.cluster)
        assert plan.predicted is not None
        predicted = plan.predicted.step_time_seconds / price(on, costs).step_time_seconds
        before, after = statistics.median(healthy), statistics.median(few)
        share = len(ranks_of(on)) / plan.world_size
        table.add_row(
            ", ".join(map(str, incident.lost)),
            incident.policy,
            format_seconds(before),
            format_seconds(after),
            f"{before / after:.3f}",
            f"{before / after / share:.3f}",
            f"{predicted:.3f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--keep", type=Path, help="Keep run folders here.")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    with contextlib.ExitStack() as stack:
        if arguments.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-recovery-")))
        else:
            folder = arguments.keep.resolve()
            folder.mkdir(parents=True, exist_ok=True)
        profile_path, plan_path = folder / "profile.json", folder / "plan.json"
        profile = profile_of(
            NUM_RANKS,
            profile_path,
            model="demo",
            seq_len=arguments.seq_len,
            num_rounds=2,
            num_steps=3,
            command="benchmarks/recovery.py",
        )
        plan = make_plan(profile, arguments.seq_len)
        plan.save(plan_path)
        policies = {"plan anew": (False, False), "drop the replica": (True, False), "stop and restart": (False, True)}
        outcomes = [
            train(name, folder, plan_path, profile_path, arguments.steps, drop=drop, stop=stop)
            for name, (drop, stop) in policies.items()
        ]
        run = outcomes[0].run
        console.print(throughput(run, plan, profile))
        console.print(render_incidents(r for r in read_log(run / "log.jsonl") if isinstance(r, IncidentRecord)))
        table = Table(title="The same trace under each policy", title_justify="left", box=None, pad_edge=False)
        for heading in ("policy", "wall clock", "tokens/s", "steps done again"):
            table.add_column(heading, justify="right" if heading != "policy" else "left")
        for outcome in outcomes:
            rate = outcome.kept_tokens / outcome.wall_seconds
            wall = format_seconds(outcome.wall_seconds)
            table.add_row(outcome.name, wall, f"{rate:,.0f}", str(outcome.redone_steps))
        console.print(table)
        compared = compare_failures(run, lambda plan, options, lost: Policy(plan, options).way_on(lost).plan)
        assert compared is not None
        console.print(render(compared))


if __name__ == "__main__":
    main()
