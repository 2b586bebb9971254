"""Predicted against measured on this machine: profile it, price a dozen unlike plans, run them in turns, tell errors.

    python -m benchmarks.own_machine --nproc 2        minutes; what build/own-2 (--out) holds already is not done again
    sudo python -m benchmarks.own_machine --nproc 4   the same on fewer cores than ranks

With more ranks than cores every rank gets an equal quota of its core (benchmarks/testbed/quotas.py; needs root and
cgroups), so that a rank that waits lends nothing to the others, as on devices of their own.

All plans run in one set of processes, turn by turn in changing order (benchmarks/testbed/turns.py), so that a
disturbance of the machine falls on no plan alone; a step counts with the time of its slowest rank.  Measured is the
median over all timed steps; the spread runs from the 10th to the 90th percentile, and `turns` is how far the medians
of the turns lie apart, largest over smallest.  Activations are those that autograd keeps on the fullest rank.
The result is also written to benchmarks/results/own_machine_N.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from benchmarks.testbed.quotas import held_back_arguments, quotas, share_of_core
from benchmarks.testbed.turns import Job
from cost_models.buckets import holdings
from cost_models.memory import PlanMemory
from cost_models.sources import measured_costs
from cost_models.step import price
from executor.launch import run_workers
from profiles.options import ProfileOptions
from specs.base import load_document, write_whole
from specs.cluster import ClusterSpec
from specs.layout import balanced_cuts
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Recompute, Replica, Stage, TrainingSpec
from specs.presets import model_preset
from specs.profile import Profile

MODEL = "demo"
SEQ_LEN, BATCH = 256, 8
RESULTS = Path(__file__).parent / "results"


def layouts(nproc: int) -> Iterator[tuple[str, dict[str, object]]]:
    """Names and shapes of the plans: degrees, stages, replicas, micro-batches, recomputation, optimizer sharding."""
    whole, half = nproc, max(1, nproc // 2)
    yield "tp", {"ranks": whole, "attention": whole, "mlp": whole}
    yield "tp, micro-batch 4", {"ranks": whole, "attention": whole, "mlp": whole, "micro_batch": 4}
    yield "attention whole, mlp alone", {"ranks": whole, "attention": whole, "mlp": 1, "micro_batch": half}
    yield "attention alone, mlp whole", {"ranks": whole, "attention": 1, "mlp": whole, "micro_batch": whole}
    yield "blocks of one", {"ranks": whole, "attention": 1, "mlp": 1, "micro_batch": whole}
    yield "replicas", {"replicas": whole}
    yield "replicas, micro-batch 2", {"replicas": whole, "micro_batch": 2}
    yield "replicas, sharded optimizer", {"replicas": whole, "micro_batch": 2, "zero": 1}
    yield "replicas, full recompute", {"replicas": whole, "micro_batch": 2, "recompute": "full"}
    yield "pipeline", {"stages": whole}
    yield "pipeline, gpipe", {"stages": whole, "schedule": "gpipe"}
    yield "pipeline, full recompute", {"stages": whole, "recompute": "full"}
    if nproc > 2:
        yield "tp in replicas", {"ranks": half, "attention": half, "mlp": half, "replicas": nproc // half}
        yield "pipeline of tp", {"ranks": half, "attention": half, "mlp": half, "stages": nproc // half}
        yield "replicas of pipelines", {"stages": half, "replicas": nproc // half}
    else:
        yield "tp, selective recompute", {"ranks": whole, "attention": whole, "mlp": whole, "recompute": "selective"}


def plan_of(
    cluster: ClusterSpec,
    *,
    ranks: int = 1,
    stages: int = 1,
    replicas: int = 1,
    attention: int = 1,
    mlp: int = 1,
    micro_batch: int = 1,
    zero: int = 0,
    recompute: Recompute = "none",
    schedule: str = "1f1b",
    batch: int = BATCH,
) -> Plan:
    """A plan of the benchmark's model; embedding and head as wide as attention."""
    model = model_preset(MODEL)
    names = [name for name, _ in model.modules()]
    cuts = balanced_cuts(len(names), stages)

    def placement(name: str) -> ModulePlacement:
        degree = mlp if name.endswith("mlp") else attention
        keeps = recompute if name not in ("embedding", "head") else "none"
        return ModulePlacement(module=name, blocks=(degree,) * (ranks // degree), recompute=keeps, zero=zero)  # type: ignore[arg-type]

    pipeline = Pipeline(
        micro_batch=micro_batch,
        schedule=schedule,  # type: ignore[arg-type]
        stages=tuple(
            Stage(num_ranks=ranks, modules=tuple(placement(name) for name in names[cuts[i] : cuts[i + 1]]))
            for i in range(stages)
        ),
    )
    size = ranks * stages
    return Plan(
        made=Provenance(created_by="benchmarks/own_machine.py", created_at="2026-01-01T00:00:00Z"),
        model=model,
        cluster=cluster,
        training=TrainingSpec(global_batch=batch, seq_len=SEQ_LEN, precision="fp32"),
        pipelines=(pipeline,),
        replicas=tuple(
            Replica(pipeline=0, ranks=tuple(range(i * size, (i + 1) * size)), sequences=batch // replicas)
            for i in range(replicas)
        ),
    )


def run_held(arguments: list[str], nproc: int, *, after_crash: str) -> None:
    """Run `python -m arguments...` on that many ranks, with quotas where the cores do not suffice."""
    share = share_of_core(nproc)
    if share == 1.0:
        run_workers(arguments, nproc, after_crash=after_crash)
        return
    with quotas(f"plait-{os.getpid()}", dict.fromkeys(range(nproc), share)) as groups:
        run_workers([*held_back_arguments(groups), *arguments], nproc, after_crash=after_crash)


def profile_of(
    nproc: int, path: Path, *, model: str, seq_len: int, num_rounds: int, num_steps: int, command: str
) -> Profile:
    """The machine's profile with that many ranks, under the same quotas as the runs; measured once."""
    if not path.exists():
        options = ProfileOptions(
            out=path.resolve(),
            model=model_preset(model),
            seq_len=seq_len,
            block_sequences=(1, 2, 4),
            degrees=tuple(degree for degree in range(1, nproc + 1) if nproc % degree == 0),
            precision="fp32",
            backend="gloo",
            num_rounds=num_rounds,
            num_steps=num_steps,
            command=command,
            created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        file = path.with_name("profile-options.json")
        options.save(file)
        run_held(["profiles.measure", str(file)], nproc, after_crash="Nothing was written.")
    return load_document(Profile, path, "profile")


def fullest_activations(plan: Plan) -> int | None:
    """Predicted bytes kept for backward on the rank that keeps most; None with full recompute, where the hooks also see
    some of what backward brings back.
    """
    if any(p.recompute == "full" for stage in plan.pipelines[0].stages for p in stage.modules):
        return None
    replicas = Counter(replica.pipeline for replica in plan.replicas)
    memory = PlanMemory(plan, holdings(plan), replicas, reserved_bytes=0)
    return max(terms.activations for stage in range(len(plan.pipelines[0].stages)) for terms in memory.stage(0, stage))


def measure(plans: dict[str, Plan], folder: Path, *, turns: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """The lines of every plan, one a turn; turns that are done already are not done again."""
    files = {}
    for number, (name, plan) in enumerate(plans.items()):
        files[name] = folder / f"plan-{number}.json"
        plan.save(files[name])
    job = Job(plans=files, out=folder / "turns.jsonl", num_turns=turns, num_warm_up_steps=1, num_steps=steps)
    job.save(folder / "job.json")
    nproc = next(iter(plans.values())).world_size
    run_held(["benchmarks.testbed.turns", str(folder / "job.json")], nproc, after_crash="Start it again to go on.")
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    for text in job.out.read_text().splitlines():
        line = json.loads(text)
        lines[line["plan"]].append(line)
    return lines


def row_of(name: str, plan: Plan, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """One plan's prediction, measurement and errors."""
    assert plan.predicted is not None
    seconds = [second for line in lines for second in line["seconds"]]
    by_turn = [statistics.median(line["seconds"]) for line in lines]
    measured, deciles = statistics.median(seconds), statistics.quantiles(seconds, n=10)
    kept = max(next(line["activation_bytes"] for line in lines if "activation_bytes" in line))
    activations = fullest_activations(plan)
    return {
        "plan": name,
        "predicted_seconds": plan.predicted.step_time_seconds,
        "measured_seconds": measured,
        "p10": deciles[0],
        "p90": deciles[-1],
        "turns": max(by_turn) / min(by_turn),
        "error": plan.predicted.step_time_seconds / measured - 1,
        "activation_error": None if activations is None else activations / kept - 1,
        "terms": plan.predicted.step_terms.model_dump(),
    }


def summary_of(rows: list[dict[str, Any]], nproc: int) -> dict[str, Any]:
    errors = sorted(abs(row["error"]) for row in rows)
    rank = spearmanr([r["predicted_seconds"] for r in rows], [r["measured_seconds"] for r in rows]).statistic
    return {
        "ranks": nproc,
        "share_of_core": share_of_core(nproc),
        "plans": len(rows),
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "rank_correlation": float(rank),
        "worst_activation_error": max(abs(r["activation_error"]) for r in rows if r["activation_error"] is not None),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_at_end": os.getloadavg()[0],
        "made": time.strftime("%Y-%m-%d"),
    }


def show(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    print(f"{'plan':32} {'predicted':>10} {'measured':>10} {'10 .. 90 %':>17} {'turns':>6} {'error':>8} {'activ.':>8}")
    for row in rows:
        print(
            f"{row['plan']:32} {row['predicted_seconds']:9.3f}s {row['measured_seconds']:9.3f}s "
            f"{row['p10']:7.3f} .. {row['p90']:6.3f} {row['turns']:6.2f} {row['error']:+8.1%} "
            f"{'' if row['activation_error'] is None else format(row['activation_error'], '+.1%'):>8}"
        )
    print(
        f"{summary['plans']} plans on {summary['ranks']} ranks: median error {summary['median_error']:.1%}, worst "
        f"{summary['worst_error']:.1%}, rank correlation {summary['rank_correlation']:.3f}, activations within "
        f"{summary['worst_activation_error']:.1%}; load {summary['load_at_end']:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    folder = options.out or Path("build") / f"own-{options.nproc}"
    folder.mkdir(parents=True, exist_ok=True)
    profile = profile_of(
        options.nproc,
        folder / "profile.json",
        model=MODEL,
        seq_len=SEQ_LEN,
        num_rounds=3 if options.nproc == 2 else 2,
        num_steps=8 if options.nproc == 2 else 4,
        command="benchmarks/own_machine.py",
    )
    plans = {}
    for name, shape in layouts(options.nproc):
        plan = plan_of(profile.cluster, **shape)  # type: ignore[arg-type]
        plans[name] = plan.with_results(predicted=price(plan, measured_costs(profile, plan.training, profile.cluster)))
    lines = measure(plans, folder.resolve(), turns=options.turns, steps=options.steps)
    rows = [row_of(name, plan, lines[name]) for name, plan in plans.items()]
    summary = summary_of(rows, options.nproc)
    result = json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n"
    write_whole(RESULTS / f"own_machine_{options.nproc}.json", result)
    show(rows, summary)


if __name__ == "__main__":
    main()
