"""Peak memory of Megatron-LM's own continuous-integration runs against the memory model of published runs.

    python benchmarks/goldens.py

Dense GPT rows in bf16 of benchmarks/data/megatron_ci_goldens.csv.  What is logged is the last rank's peak of torch's
allocator, so the last stage is predicted.  The attention backend is taken from the arguments, else fused, except in
the long-term-support image, whose Transformer Engine ran these unfused.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from cost_models.frameworks import framework
from cost_models.published import Run
from cost_models.run_memory import stage_memory_bytes

TABLE = Path(__file__).parent / "data" / "megatron_ci_goldens.csv"
GPT2_VOCAB = 50257


def dense_rows() -> Iterator[dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            whole = all(row[name] for name in ("layers", "heads", "n_gpus", "mem_max_GB", "global_batch"))
            plain = not row["n_experts"] and row["fsdp"] == "0" and not row["fp8"] and row["precision"] == "bf16"
            ranks = int(row["tp"]) * int(row["pp"]) * int(row["cp"])
            if whole and plain and row["recipe"].startswith("gpt") and float(row["n_gpus"]) >= ranks:
                yield row


def run_of(row: Mapping[str, str]) -> Run:
    """The row as a run; Megatron-LM pads the vocabulary to a multiple of 128 tp."""
    tp, pp, cp, gpus = int(row["tp"]), int(row["pp"]), int(row["cp"]), int(float(row["n_gpus"]))
    layers, hidden, heads = (int(float(row[name])) for name in ("layers", "hidden", "heads"))
    vocab = int(float(row["vocab"] or GPT2_VOCAB))
    per_chunk = int(float(row["layers_per_vstage"] or 0))
    return Run(
        id=row["case"],
        source_group="megatron-ci",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(float(row["kv_groups"] or heads)),
        ffn=int(float(row["ffn"] or 4 * hidden)),
        gated=row["swiglu"] == "1",
        vocab=-(-vocab // (128 * tp)) * 128 * tp,
        seq_len=int(float(row["seq_len"])),
        gpu="A100-80G",
        num_gpus=gpus,
        gpus_per_node=8,
        network_bytes_per_second=None,
        tp=tp,
        pp=pp,
        dp=gpus // (tp * pp * cp),
        cp=cp,
        chunks=layers // (pp * per_chunk) if per_chunk else 1,
        sequence_parallel=row["sequence_parallel"] == "1",
        micro_batch=int(row["micro_batch"]),
        global_batch=int(float(row["global_batch"])),
        recompute="full" if row["recompute"] == "full" else "selective" if row["recompute"] == "selective" else "none",
        sharding="optimizer" if row["dist_optimizer"] == "1" else "none",
        shard_size=1,
        precision="bf16",
        fp32_gradients=False,
        schedule="",
        stack="megatron-core",
        out_of_memory=False,
    )


def is_fused(row: Mapping[str, str]) -> bool:
    arguments = row["extra_args"]
    return "flash" in arguments or ("unfused" not in arguments and row["env"] != "lts")


def main() -> None:
    groups: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in dense_rows():
        run = run_of(row)
        stack = dataclasses.replace(
            framework("megatron-core"), flash_attention=is_fused(row), ties_embedding=row["untied"] != "1"
        )
        error = stage_memory_bytes(run, stack, run.pp - 1) / (float(row["mem_max_GB"]) * 1e9) - 1
        groups["all"].append((error, run.id))
        groups[f"{row['gpu'][:5]} {row['env']}"].append((error, run.id))
    for name, errors in groups.items():
        sizes = [abs(error) for error, _ in errors]
        print(
            f"{name:12} {len(errors):4d} rows, median error {statistics.median(sizes):.1%}, "
            f"mean {statistics.mean(sizes):.1%}, under by more than 10 %: {sum(e < -0.1 for e, _ in errors)}"
        )
    for error, case in sorted(groups["all"])[:8]:
        print(f"   {error:+.1%}  {case}")


if __name__ == "__main__":
    main()
