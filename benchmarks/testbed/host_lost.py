"""Experiment 4: one of two hosts is lost in the middle of a run and comes back, under three policies.

Three replicas lie on two hosts of two ranks: one on rank 0, one in two stages over ranks 1 and 2 (one on each host),
one on rank 3.  So the loss of host 1 removes one replica and damages another.  The same trace for each policy: the
host's cable goes silent and its processes end after a given step; a given time later it is back.

    plan anew           the damaged replica goes on with the rank that is left, the host is taken in when it is back
    drop replicas       the damaged one is left out too, as is usual
    stop and restart    the run stops, waits for the host and resumes from the last checkpoint

Goodput is kept tokens per second of wall clock from the first command to the end.  Predicted: steps as planned for the
ranks of the time, everything else (start-up, parts of the interruption, saves) as measured.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from benchmarks.recovery import drop_replicas
from benchmarks.testbed.hosts import PORT, SUBNET, Bed, Running
from benchmarks.testbed.measure import profile_of
from benchmarks.testbed.pictures import draw_host_lost
from benchmarks.testbed.plans import MODEL
from benchmarks.testbed.progress import Progress
from benchmarks.testbed.quotas import held_back_arguments
from benchmarks.testbed.report import heading
from benchmarks.testbed.supervised import Job, PolicyName
from cost_models.sources import survivors_costs
from cost_models.step import price
from recovery.policy import Policy
from reports.account import account_of, attempts_of
from reports.failure_trace import STARTING, compare_records
from specs.base import load_document, write_whole
from specs.options import TrainOptions
from specs.plan import Plan
from specs.profile import Profile
from specs.runlog import CheckpointRecord, IncidentRecord, StepRecord, read_log
from specs.units import percent, rate, seconds
from tests.layouts import ReplicaShape, StageShape, build

BED = Bed(2, 2, bits_per_second=1e9)
SEQ_LEN, BATCH = 128, 12
NUM_STEPS, CHECKPOINT_EVERY = 90, 10
LOST_AFTER = 17  # steps; seven of them are after the last checkpoint
DOWN_SECONDS = 30.0
LOST = 1  # host
END_SECONDS = 300.0  # for any part of a run


@dataclass(frozen=True)
class Outcome:
    """One run.  Goodput in tokens/s; `interruption`: seconds from the loss to the next step on fewer ranks, if any."""

    policy: str
    wall_seconds: float
    kept_tokens: int
    redone_steps: int
    predicted_goodput: float
    interruption: float | None
    went_on_with: str

    @property
    def goodput(self) -> float:
        return self.kept_tokens / self.wall_seconds


def shapes() -> list[ReplicaShape]:
    """The three replicas; those of one rank have half the share of that of two."""
    one, two = [StageShape(1)], [StageShape(1), StageShape(1)]
    return [ReplicaShape(one, 1, BATCH // 4), ReplicaShape(two, 1, BATCH // 2), ReplicaShape(one, 1, BATCH // 4)]


def make_plan(profile: Profile) -> Plan:
    """Priced by the profile."""
    plan = build(MODEL, shapes(), seq_len=SEQ_LEN).model_copy(update={"cluster": profile.cluster})
    return plan.with_results(predicted=price(plan, survivors_costs(profile, plan.training, plan.cluster)))


def run(folder: Path, results: Path, progress: Progress, *, num_turns: int) -> str:
    """The table.  Runs that an earlier call has finished are not repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    MODEL.save(folder / "model.json")
    outcomes: list[Outcome] = []
    policies = get_args(PolicyName)
    with BED.up() as hosts:
        progress.say("host lost: profile of the two hosts")
        profile = profile_of(hosts, folder, model=str(folder / "model.json"), seq_len=SEQ_LEN)
        plan = make_plan(profile)
        plan.save(folder / "plan.json")
        with progress.count("host lost: runs", num_turns * len(policies)) as advance:
            for turn in range(num_turns):
                for policy in policies:
                    outcomes.append(one_run(hosts, folder, policy, turn))
                    advance(len(outcomes))
    return write(outcomes, results)


def one_run(hosts: Running, folder: Path, policy: PolicyName, turn: int) -> Outcome:
    """The trace under one policy."""
    place = folder / f"{policy.replace(' ', '-')}-{turn}"
    done = place / "outcome.json"
    if done.exists():
        return Outcome(**json.loads(done.read_text()))
    place.mkdir(exist_ok=True)
    attempt = sum(1 for _ in place.glob("run-*"))  # one that was broken off is no beginning: its clock ran on
    job = Job(
        plan=folder / "plan.json",
        profile=folder / "profile.json",
        out=place / f"run-{attempt}",
        policy=policy,
        num_steps=NUM_STEPS,
        checkpoint_every=CHECKPOINT_EVERY,
        num_hosts=BED.num_hosts,
        address=f"{SUBNET}.1",
        port=PORT,
        through=tuple(held_back_arguments(hosts.quotas)),
    )
    job.save(place / "job.json")

    def start(host: int) -> subprocess.Popen[bytes]:
        module, log = "benchmarks.testbed.supervised", place / f"host{host}.txt"
        return hosts.start(host, module, str(place / "job.json"), str(host), log=log)

    began = time.monotonic()
    commands = [start(host) for host in range(BED.num_hosts)]
    log = job.out / "log.jsonl"
    _until(lambda: num_steps(log) >= LOST_AFTER, commands[0], place)
    hosts.lose(LOST)
    commands[LOST].wait()
    back = time.monotonic() + DOWN_SECONDS
    stops = policy == "stop and restart"
    if stops:
        commands[0].wait(END_SECONDS)
    _until(lambda: time.monotonic() > back, None if stops else commands[0], place)
    hosts.return_host(LOST)
    commands[LOST] = start(LOST)
    if stops:
        commands[0] = start(0)
    for command in commands:
        if command.wait(END_SECONDS):
            raise RuntimeError(f"{policy}: {command.args} ended with {command.returncode}; see {place}")
    outcome = outcome_of(job, time.monotonic() - began)
    write_whole(done, json.dumps(asdict(outcome)))
    return outcome


def num_steps(log: Path) -> int:
    """Of a run that is going on."""
    if not log.exists():
        return 0
    return max((record.step for record in read_log(log) if isinstance(record, StepRecord)), default=0)


def _until(done: Callable[[], bool], command: subprocess.Popen[bytes] | None, place: Path) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not done():
        if command is not None and command.poll() is not None:
            raise RuntimeError(f"{command.args} ended with {command.returncode} before its time; see {place}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{place}: not there in {END_SECONDS:.0f} s")
        time.sleep(0.1)


def outcome_of(job: Job, wall: float) -> Outcome:
    """What the log of a finished run says, and what was predicted for this trace."""
    plan = load_document(Plan, job.out / "plan.json", "plan")
    options = load_document(TrainOptions, job.out / "options.json", "options")
    records = read_log(job.out / "log.jsonl")
    account = account_of(attempts_of(records))
    incidents = [record for record in records if isinstance(record, IncidentRecord)]
    lost = next((incident for incident in incidents if incident.lost), None)
    if lost is None:
        # No interruption is in the log of a run that stops: the trace's own time down stands for it.
        assert plan.predicted is not None
        steps = (NUM_STEPS + LOST_AFTER % CHECKPOINT_EVERY) * plan.predicted.step_time_seconds
        saves = sum(record.seconds for record in records if isinstance(record, CheckpointRecord))
        rest = sum(account.seconds.get(bucket, 0.0) for bucket in (*STARTING, "evaluation"))
        predicted = account.kept_tokens / (steps + saves + rest + DOWN_SECONDS)
    else:

        def without(ranks: frozenset[int]) -> Plan:
            if job.policy == "drop replicas":
                left = drop_replicas(plan, ranks).plan
                profile = load_document(Profile, job.profile, "profile")
                return left.with_results(predicted=price(left, survivors_costs(profile, left.training, left.cluster)))
            return Policy(plan, options).way_on(ranks).plan

        compared = compare_records(plan, records, without)
        assert compared is not None
        predicted = compared.predicted_goodput
    return Outcome(
        policy=job.policy,
        wall_seconds=wall,
        kept_tokens=account.kept_tokens,
        redone_steps=account.num_wasted_steps,
        predicted_goodput=predicted,
        interruption=None if lost is None else sum(lost.seconds.values()),
        went_on_with="nothing, until the host was back" if lost is None else f"{lost.policy}: {lost.layout}",
    )


def write(outcomes: Sequence[Outcome], results: Path) -> str:
    """One row a policy, medians over the turns; every run as JSON."""
    title = "A host of two is lost and comes back"
    header = ("policy", "went on with", "loss to next step", "steps redone", "wall clock")
    header += ("goodput (lowest .. highest)", "predicted", "error")
    rows = []
    for policy in get_args(PolicyName):
        runs = [outcome for outcome in outcomes if outcome.policy == policy]
        goodput = statistics.median(each.goodput for each in runs)
        predicted = statistics.median(each.predicted_goodput for each in runs)
        stops = [each.interruption for each in runs if each.interruption is not None]
        ends = f"{min(each.goodput for each in runs):,.0f} .. {max(each.goodput for each in runs):,.0f}"
        rows.append(
            (
                policy,
                runs[0].went_on_with.replace("|", "/"),
                seconds(statistics.median(stops)) if stops else "-",
                f"{statistics.median(each.redone_steps for each in runs):.0f}",
                seconds(statistics.median(each.wall_seconds for each in runs)),
                f"{rate(goodput, 'tokens')} ({ends})",
                rate(predicted, "tokens"),
                percent(predicted / goodput - 1.0, signed=True),
            )
        )
    text = heading(title) + (
        f"\n{NUM_STEPS} steps; host {LOST} is lost after step {LOST_AFTER} and back {DOWN_SECONDS:.0f} s later; a "
        f"checkpoint every {CHECKPOINT_EVERY} steps; runs of each policy: {len(outcomes) // len(rows)}.\n\n"
    )
    text += "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)) + "\n"
    write_whole(results / "testbed-host-lost.md", text)
    by_policy = [[each for each in outcomes if each.policy == policy] for policy in get_args(PolicyName)]
    draw_host_lost(
        get_args(PolicyName),
        [[each.goodput for each in runs] for runs in by_policy],
        [statistics.median(each.predicted_goodput for each in runs) for runs in by_policy],
        results / "testbed-host-lost.png",
    )
    write_whole(results / "testbed-host-lost.json", json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    return text
