"""Predicted against measured on this machine: profile it, price a dozen unlike plans, train each, print the errors.

    python benchmarks/own_machine.py --nproc 2 --out build/own-2 [--rounds 2] [--steps 12]

Plans are trained in rounds, so that a disturbance of the machine does not fall on one plan alone.  Measured step time
is the median over the steps that are not warm-up; the spread is from the 10th to the 90th percentile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scipy.stats import spearmanr

from cost_models.sources import measured_costs
from cost_models.step import price
from specs.base import load_document
from specs.cluster import ClusterSpec
from specs.layout import balanced_cuts
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Recompute, Replica, Stage, TrainingSpec
from specs.presets import model_preset
from specs.profile import Profile
from specs.runlog import MemoryRecord, StepRecord, read_log

MODEL = "demo"
SEQ_LEN = 256


def layouts(nproc: int) -> Iterator[tuple[str, dict[str, object]]]:
    """Names and shapes of the plans: degrees, stages, replicas, micro-batches, recomputation, optimizer sharding."""
    whole, half = nproc, max(1, nproc // 2)
    yield "tp", {"ranks": whole, "attention": whole, "mlp": whole}
    yield "tp, micro-batch 4", {"ranks": whole, "attention": whole, "mlp": whole, "micro_batch": 4}
    yield "attention whole, mlp alone", {"ranks": whole, "attention": whole, "mlp": 1}
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
    batch: int = 16,
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


def plait(*arguments: str) -> None:
    """One command of plait, quiet unless it fails."""
    done = subprocess.run([sys.executable, "-m", "cli", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"plait {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "profile.json"
    if not path.exists():
        sizes = "1,2,4" if options.nproc == 2 else "1,2,4,8"
        plait(
            *("profile", "--model", MODEL, "--seq-len", str(SEQ_LEN), "--nproc", str(options.nproc)),
            *("--block-sequences", sizes, "--rounds", "3", "--out", str(path)),
        )
    profile = load_document(Profile, path, "profile")
    rows = []
    plans = {}
    for name, shape in layouts(options.nproc):
        plan = plan_of(profile.cluster, **shape)  # type: ignore[arg-type]
        predicted = price(plan, measured_costs(profile, plan.training, profile.cluster))
        plans[name] = plan.with_results(predicted=predicted)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    memory: dict[str, MemoryRecord] = {}
    for number in range(options.rounds):
        for index, (name, plan) in enumerate(plans.items()):
            file, run = options.out / f"plan-{index}.json", options.out / f"run-{index}-{number}"
            plan.save(file)
            if not (run / "log.jsonl").exists():
                plait("train", str(file), "--steps", str(options.steps), "--out", str(run), "--checkpoint-every", "0")
            for record in read_log(next(run.glob("*.jsonl"))):
                if isinstance(record, StepRecord) and not record.warm_up:
                    seconds[name].append(record.seconds)
                if isinstance(record, MemoryRecord):
                    memory[name] = record
    for name, plan in plans.items():
        assert plan.predicted is not None
        measured = statistics.median(seconds[name])
        deciles = statistics.quantiles(seconds[name], n=10)
        terms, kept = plan.predicted.peak_memory_terms, memory[name]
        fullest = max(kept.peak_bytes, key=lambda rank: kept.static_bytes[rank] + kept.activation_bytes[rank])
        rows.append(
            {
                "plan": name,
                "predicted_seconds": plan.predicted.step_time_seconds,
                "measured_seconds": measured,
                "p10": deciles[0],
                "p90": deciles[-1],
                "error": plan.predicted.step_time_seconds / measured - 1,
                "activation_error": terms.activations / max(1, kept.activation_bytes[fullest]) - 1,
                "static_error": (terms.weights + terms.gradients + terms.optimizer) / kept.static_bytes[fullest] - 1,
            }
        )
    (options.out / "result.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{'plan':32} {'predicted':>10} {'measured':>10} {'10 .. 90 %':>19} {'error':>8} {'activ.':>8} {'static':>8}")
    for row in rows:
        print(
            f"{row['plan']:32} {row['predicted_seconds']:9.3f}s {row['measured_seconds']:9.3f}s "
            f"{row['p10']:8.3f} .. {row['p90']:6.3f} {row['error']:+8.1%} {row['activation_error']:+8.1%} "
            f"{row['static_error']:+8.1%}"
        )
    errors = sorted(abs(row["error"]) for row in rows)
    rank = spearmanr([r["predicted_seconds"] for r in rows], [r["measured_seconds"] for r in rows]).statistic
    print(f"{len(rows)} plans on {options.nproc} ranks: median error {statistics.median(errors):.1%}, ", end="")
    print(f"worst {errors[-1]:.1%}, rank correlation {rank:.3f}")


if __name__ == "__main__":
    main()
