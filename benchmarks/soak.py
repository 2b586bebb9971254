"""Soak: seeded runs with faults at random moments; every one must finish, with the right losses and no orphan.

    python -m benchmarks.soak [--runs 40] [--first 0] [--seed 0] [--steps 16]

Each run trains the tiny model (fp32, gloo) on 4 to 6 ranks of this machine under one of the layouts below, with one to
three faults drawn from all kinds: a worker is killed, freezes, hangs, is cut off, at a drawn step and moment or by a
signal from outside at a drawn time; the disk is full; the supervisor itself is killed; lost devices come back.  A run
that ends early (full disk, supervisor killed) must be continued by --resume.  Checked for every run:

    it reaches the last step; each step is logged once, redone ones apart; no loss differs from that of the run without
    faults by more than 1e-5 (relative) while the global batch is whole; no process is left; the account adds up.

Prints one line per run and a summary; exit code 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from recovery.drill import LOSS_TOLERANCE, read_report
from recovery.watch import START_SECONDS
from specs.plan import Plan
from specs.presets import model_preset
from specs.runlog import EndRecord, IncidentRecord, StepRecord, read_log
from tests.layouts import ReplicaShape, StageShape, build
from tests.profiles import profile

RUN_SECONDS = START_SECONDS + 60.0  # no run may take longer; a hang in the first step is the longest
HANG_SECONDS = 4.0
SEQ_LEN = 64
KINDS = (
    "kill",
    "kill",
    "kill-moment",
    "kill-moment",
    "kill-moment",
    "outside",
    "outside",
    "outside-stop",
    "stop",
    "hang",
)
KINDS += ("partition", "slow", "full-disk", "supervisor")  # as often as they stand here


def layouts() -> dict[str, Plan]:
    """Plans of 4 to 6 ranks with replicas, stages, tensor parallelism, sharded optimizers."""
    model = model_preset("tiny")
    two, one, three = StageShape(2, {"attention": (1, 1)}), StageShape(1), StageShape(3)
    shapes = {
        "dp4": ([ReplicaShape([one], 1, 3)] * 4, 0),
        "dp4-zero": ([ReplicaShape([one], 1, 3)] * 4, 1),
        "tp2-dp2": ([ReplicaShape([two], 2, 6)] * 2, 0),
        "pp2-dp2": ([ReplicaShape([one, one], 1, 6)] * 2, 0),
        "pp2-tp2": ([ReplicaShape([two, two], 2, 12)], 0),
        "pp5": ([ReplicaShape([one] * 5, 1, 12)], 0),
        "tp3-dp2": ([ReplicaShape([three], 1, 6)] * 2, 0),
        "unlike": ([ReplicaShape([two], 2, 6), ReplicaShape([one, one], 1, 6)], 0),
        "pp2-dp3": ([ReplicaShape([one, one], 1, 4)] * 3, 0),
    }
    return {name: build(model, replicas, seq_len=SEQ_LEN, zero=zero) for name, (replicas, zero) in shapes.items()}


@dataclass
class Trial:
    """One run: its faults for the command, and those that come from outside at a time (seconds after step 2)."""

    name: str
    words: list[str]
    outside: list[tuple[float, str, int]]
    faults: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def draw(number: int, name: str, plan: Plan, steps: int, rng: random.Random) -> Trial:
    """Faults of one run.  At least one rank is never touched."""
    trial = Trial(f"{number:02d}-{name}", [], [])
    ranks = rng.sample(range(plan.world_size), min(3, plan.world_size - 1))
    for rank in ranks[: rng.randint(1, 3)]:
        step = rng.randint(2, steps - 2)
        kind = rng.choice(KINDS)
        match kind:
            case "kill-moment":
                moment = rng.choice(["forward", "sync", "update", "gather", "save", "recovery"])
                trial.words += ["--kill", f"{rank}@{step}:{moment}"]
                kind = f"kill at {moment}"
            case "outside" | "outside-stop" | "supervisor":
                trial.outside.append((rng.uniform(0.0, 2.0), kind, rank))
            case "slow":
                trial.words += ["--slow", f"{rank}@{step}:{rng.uniform(1.5, 3.0):.1f}"]
            case _:
                trial.words += [f"--{kind}", f"{rank}@{step}"]
        trial.faults.append(f"{kind} {rank}@{step}" if not kind.startswith(("outside", "super")) else f"{kind} {rank}")
        if kind not in ("slow", "full-disk", "supervisor") and rng.random() < 0.3:
            trial.words += ["--return", f"{rank}@{min(steps - 1, step + 3)}"]
            trial.faults.append(f"return {rank}")
    if not trial.words:  # the command wants a fault: one that does nothing to a run
        trial.words += ["--slow", f"{ranks[0]}@{steps}:1.01"]
    trial.outside.sort()
    return trial


def processes(run: Path) -> dict[int, int]:
    """Living workers of a run folder: rank -> process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"executor.member" not in words or os.fsencode(run) not in words:
                continue
            environment = dict(w.split(b"=", 1) for w in (entry / "environ").read_bytes().split(b"\0") if b"=" in w)
            found[int(environment[b"RANK"])] = int(entry.name)
        except (OSError, KeyError):
            continue
    return found


def _last_step(run: Path) -> int:
    try:
        lines = (run / "log.jsonl").read_text().splitlines()
    except OSError:
        return 0
    return max((json.loads(line)["step"] for line in lines if line.startswith('{"kind":"step"')), default=0)


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "cli", *map(str, words)]


def _run(command: list[str], run: Path, outside: list[tuple[float, str, int]]) -> tuple[int | None, str]:
    """Exit code (None: it took too long) and what was printed; faults from outside are made meanwhile."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors)
        begin, since = time.monotonic(), None
        waiting = list(outside)
        while process.poll() is None and time.monotonic() - begin < RUN_SECONDS:
            if since is None and _last_step(run) >= 2:
                since = time.monotonic()
            if waiting and since is not None and time.monotonic() - since > waiting[0][0]:
                _, kind, rank = waiting.pop(0)
                target = process.pid if kind == "supervisor" else processes(run).get(rank)
                if target is not None:
                    os.kill(target, signal.SIGSTOP if kind == "outside-stop" else signal.SIGKILL)
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()
            process.wait()
            return None, ""
        errors.seek(0)
        return process.returncode, errors.read()


def check(trial: Trial, run: Path, clean: Path, steps: int) -> tuple[list[IncidentRecord], float | None]:
    """Adds to the trial's problems; gives its incidents and the worst difference of a loss."""
    records = read_log(run / "log.jsonl")
    report = read_report(run, against=clean)
    seen: dict[int, StepRecord] = {}
    reached = 0
    for record in records:
        if isinstance(record, StepRecord):
            if record.step <= reached:
                trial.problems.append(f"step {record.step} is logged twice")
            reached = record.step
            seen[record.step] = record
        elif record.kind in ("incident", "start"):
            reached = min(reached, record.step)  # type: ignore[union-attr]
    if sorted(seen) != list(range(1, steps + 1)):
        lacking = sorted(set(range(1, steps + 1)) - set(seen))
        # The step that was under way when the supervisor was killed may be taken but not logged.
        if not (any("supervisor" in fault for fault in trial.faults) and len(lacking) <= 2):
            trial.problems.append(f"steps {lacking} are not logged")
    if report.worst is not None and report.worst > LOSS_TOLERANCE:
        trial.problems.append(f"a loss differs by {report.worst:.1e}")
    end = records[-1]
    if not isinstance(end, EndRecord):
        trial.problems.append("the log has no end")
    elif abs(sum(end.seconds.values()) - end.wall_seconds) > 0.05 * end.wall_seconds:
        trial.problems.append(f"{sum(end.seconds.values()):.1f} of {end.wall_seconds:.1f} s are accounted for")
    return list(report.incidents), report.worst


def soak(numbers: range, seed: int, steps: int, folder: Path) -> int:
    """Number of runs that failed."""
    plans = layouts()
    names = list(plans)
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(2000)))
    common = ["--data", corpus, "--steps", steps, "--checkpoint-every", 4, "--hang-seconds", HANG_SECONDS]
    causes: Counter[str] = Counter()
    took: list[float] = []
    failed = 0
    for number in numbers:
        rng = random.Random(f"{seed}/{number}")
        name = names[number % len(names)] if number < len(names) else rng.choice(names)
        plan_path, profile_path = folder / f"{name}.json", folder / f"{name}-profile.json"
        clean = folder / f"{name}-clean"
        if not clean.exists():
            plans[name].save(plan_path)
            model, cluster = plans[name].model, plans[name].cluster
            degrees, tokens = (1, 2, 3, 4, 6), (16, 32, 64, 128, 256, 512)
            profile(model, cluster, degrees=degrees, tokens=tokens, seq_len=SEQ_LEN).save(profile_path)
            code, text = _run(_command("train", plan_path, "--out", clean, *common), clean, [])
            assert code == 0, text
        trial = draw(number, name, plans[name], steps, rng)
        run = folder / trial.name
        begin = time.monotonic()
        words = ["chaos", plan_path, "--out", run, "--profile", profile_path, *common, *trial.words]
        code, text = _run(_command(*words), run, trial.outside)
        resumed = 0
        while code not in (0, None) and resumed < 3:
            if "Traceback" in text:
                trial.problems.append("a traceback")
                print(text[-1500:], file=sys.stderr)
            _wait_for_end(run)
            resumed += 1
            code, text = _run(_command("train", plan_path, "--out", run, "--resume"), run, [])
        if code != 0:
            trial.problems.append("it did not end in time" if code is None else f"exit code {code}: {text[-300:]}")
        _wait_for_end(run)
        if left := processes(run):
            trial.problems.append(f"processes are left: {left}")
            for process in left.values():
                os.kill(process, signal.SIGKILL)
        incidents, worst = check(trial, run, clean, steps) if (run / "log.jsonl").exists() else ([], None)
        causes.update(f"{i.policy} from {i.source}" for i in incidents)
        took += [sum(s for part, s in i.seconds.items() if part != "first_step") for i in incidents]
        failed += bool(trial.problems)
        difference = "-" if worst is None else f"{worst:.0e}"
        print(
            f"{trial.name:12} {time.monotonic() - begin:5.1f} s  {len(incidents)} interruptions, {resumed} resumes, "
            f"losses {difference}  [{'; '.join(trial.faults)}]  {'; '.join(trial.problems) or 'ok'}",
            flush=True,
        )
        if not trial.problems:
            shutil.rmtree(run, ignore_errors=True)
    print(f"{len(numbers) - failed} of {len(numbers)} runs ok; interruptions: {dict(causes)}")
    if took:
        print(f"seconds per interruption: median {statistics.median(took):.1f}, largest {max(took):.1f}")
    return failed


def _wait_for_end(run: Path) -> None:
    """Workers without a supervisor save and end by themselves; at the latest after a minute."""
    deadline = time.monotonic() + 70.0
    while processes(run) and time.monotonic() < deadline:
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="Number of the first run; each has its own faults.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--keep", type=Path, help="Keep run folders here.")
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.runs)
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        sys.exit(bool(soak(numbers, arguments.seed, arguments.steps, arguments.keep.resolve())))
    with tempfile.TemporaryDirectory(prefix="plait-soak-") as folder:
        sys.exit(bool(soak(numbers, arguments.seed, arguments.steps, Path(folder).resolve())))


if __name__ == "__main__":
    main()
