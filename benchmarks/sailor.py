"""Predict 15 measured runs of OPT-350M from another project's public profile of single layers.

    python benchmarks/sailor.py FOLDER

FOLDER holds `profile_opt350m_gh96.json` and `runs_opt350m_gh96.json` of github.com/eth-easl/sailor, which are not part
of this project.  Time: the profile's layers in an exact simulation of 1F1B, blocking transfers over the links that its
authors fitted, gradient sum and update.  Memory: the formulas for Megatron-LM of that time.

Two numbers are not in the profile: host time per layer and pass, and memory outside tensors.  Both are fitted on the
two runs of a single node; errors are printed for all runs and for the thirteen others.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from cost_models.frameworks import framework
from cost_models.pipeline import simulate
from cost_models.published import Run
from cost_models.run_memory import layer_activation_bytes

STACK = framework("megatron-2022")
HIDDEN, HEADS, SEQ_LEN, VOCAB, NUM_LAYERS = 1024, 16, 2048, 50272, 24
GRADIENT_BYTES = 4.0  # DeepSpeed sums in fp32


@dataclass(frozen=True)
class Fitted:
    """What the profile leaves out."""

    host_seconds: float  # per layer and pass, forward or backward
    reserved_bytes: float


def usable(profile: dict[str, dict[str, dict[str, list[float]]]], tp: int) -> dict[int, list[list[float]]]:
    """Layer times by micro-batch.  A micro-batch that took longer than the next larger one is an artefact of its
    measurement; it is replaced by the straight line through the next two.
    """
    table = {
        int(size): [by_degree[str(tp)][str(layer)] for layer in range(NUM_LAYERS + 2)]
        for size, by_degree in profile.items()
        if str(tp) in by_degree
    }
    sizes = sorted(table)
    total = {size: sum(forward + backward for forward, backward, _ in table[size]) for size in sizes}
    for size, larger, largest in reversed(list(zip(sizes, sizes[1:], sizes[2:], strict=False))):
        if total[size] >= total[larger]:
            part = (size - larger) / (largest - larger)
            table[size] = [
                [max(0.0, a + part * (b - a)) for a, b in zip(near, far, strict=True)]
                for near, far in zip(table[larger], table[largest], strict=True)
            ]
    return table


def bandwidth(coefficients: tuple[float, float, float], num_bytes: float) -> float:
    """Bytes per second by the authors' polynomial in log2 of the megabytes."""
    x = math.log2(max(num_bytes / 2**20, 1.0))
    return 1e9 * (coefficients[0] * x * x + coefficients[1] * x + coefficients[2])


def network_seconds(num_bytes: float) -> float:
    """One of four GPUs of a node sending to another node, the other three doing the same."""
    return 4.0 * num_bytes / bandwidth((-0.654, 11.43, 45.25), 4.0 * num_bytes)


def stage_parameters(layers: tuple[int, int], tp: int) -> float:
    first, last = layers
    count = min(last, NUM_LAYERS) - max(first, 1) + 1
    tables = VOCAB * HIDDEN * ((first == 0) or (last == NUM_LAYERS + 1))
    return (count * 12 * HIDDEN**2 + tables) / tp


def step_seconds(run: dict[str, object], table: dict[int, list[list[float]]], fitted: Fitted) -> float:
    size, tp, dp, stages = (run[key] for key in ("micro_batch", "tp", "dp", "stage_layers"))
    assert isinstance(size, int)
    assert isinstance(tp, int)
    assert isinstance(dp, int)
    assert isinstance(stages, list)
    layers = table[size]
    num_micro_batches = int(run["global_batch"]) // (size * dp)  # type: ignore[call-overload]
    transfer = 0.0
    if len(stages) > 1:
        transfer = network_seconds(2.0 * size * SEQ_LEN * HIDDEN) + STACK.transfer_sync_seconds
    times = []
    for index, (first, last) in enumerate(stages):
        edges = (index > 0) + (index < len(stages) - 1)
        host = (last - first + 1) * fitted.host_seconds + edges * transfer
        times.append([sum(layers[layer][i] for layer in range(first, last + 1)) + host for i in range(2)])
    timing = simulate(
        "1f1b", [f for f, _ in times], [b for _, b in times], [0.0] * (len(stages) - 1), num_micro_batches
    )
    gradients = max(GRADIENT_BYTES * stage_parameters((a, b), tp) for a, b in stages)
    synced = 2.0 * (dp - 1) / dp * network_seconds(gradients) if dp > 1 else 0.0
    update = max(sum(layers[layer][2] for layer in range(a, b + 1)) for a, b in stages)
    return timing.makespan_seconds + synced + update


def memory_bytes(run: dict[str, object], fitted: Fitted) -> float:
    size, tp, stages = (run[key] for key in ("micro_batch", "tp", "stage_layers"))
    assert isinstance(size, int)
    assert isinstance(tp, int)
    assert isinstance(stages, list)
    shape = Run(
        id="", source_group="", layers=NUM_LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=HEADS, ffn=4 * HIDDEN,
        gated=False, vocab=VOCAB, seq_len=SEQ_LEN, gpu="H200", num_gpus=4, gpus_per_node=4,
        network_bytes_per_second=None, tp=tp, pp=len(stages), dp=1, cp=1, chunks=1, sequence_parallel=False,
        micro_batch=size, global_batch=size, recompute="none", sharding="none", shard_size=1, precision="bf16",
        fp32_gradients=False, schedule="1F1B", stack="megatron-2022", out_of_memory=False,
    )  # fmt: skip
    kept = layer_activation_bytes(shape, STACK, "none")
    num_micro_batches = int(run["global_batch"]) // (size * int(run["dp"]))  # type: ignore[call-overload]
    peaks = []
    for index, (first, last) in enumerate(stages):
        count = min(last, NUM_LAYERS) - max(first, 1) + 1
        held = min(len(stages) - index, num_micro_batches)
        head = STACK.logit_bytes * size * SEQ_LEN * VOCAB / tp if last > NUM_LAYERS else 0.0
        states = (2.0 + GRADIENT_BYTES + 12.0) * stage_parameters((first, last), tp)
        peaks.append(states + (count * held * kept + head) * (1.0 + STACK.slack) + fitted.reserved_bytes)
    return max(peaks)


def fit(runs: list[dict[str, object]], table: dict[int, list[list[float]]]) -> Fitted:
    """Both numbers from the runs of one node, by bisection and by a mean."""
    single = [run for run in runs if run["nodes"] == 1]
    low, high = 0.0, 2e-3
    for _ in range(40):
        middle = (low + high) / 2
        errors = [
            step_seconds(r, table, Fitted(middle, 0)) / float(r["measured_step_time_seconds"]) - 1 for r in single
        ]  # type: ignore[arg-type]
        low, high = (middle, high) if statistics.mean(errors) < 0 else (low, middle)
    rest = [float(r["measured_peak_memory_bytes"]) - memory_bytes(r, Fitted(0, 0)) for r in single]  # type: ignore[arg-type]
    return Fitted(low, statistics.mean(rest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    runs = json.loads((options.folder / "runs_opt350m_gh96.json").read_text())["runs"]
    profile = json.loads((options.folder / "profile_opt350m_gh96.json").read_text())
    table = usable(profile, 4)
    fitted = fit(runs, table)
    print(f"fitted: {fitted.host_seconds * 1e3:.3f} ms host per layer and pass, {fitted.reserved_bytes / 1e9:.2f} GB")
    print(f"{'run':28} {'measured':>9} {'predicted':>9} {'error':>8} {'memory':>9} {'predicted':>9} {'error':>8}")
    errors: list[tuple[float, float, bool]] = []
    for run in runs:
        seconds, peak = step_seconds(run, table, fitted), memory_bytes(run, fitted)
        time_error = seconds / run["measured_step_time_seconds"] - 1
        memory_error = peak / run["measured_peak_memory_bytes"] - 1
        errors.append((time_error, memory_error, run["nodes"] == 1))
        print(
            f"{run['id']:28} {run['measured_step_time_seconds']:8.3f}s {seconds:8.3f}s {time_error:+8.1%} "
            f"{run['measured_peak_memory_bytes'] / 1e9:7.2f}GB {peak / 1e9:7.2f}GB {memory_error:+8.1%}"
        )
    for title, chosen in (("all runs", errors), ("runs not fitted on", [e for e in errors if not e[2]])):
        mean_time = statistics.mean(abs(e[0]) for e in chosen)
        mean_memory = statistics.mean(abs(e[1]) for e in chosen)
        print(f"{title}: {len(chosen)}, mean error of step time {mean_time:.1%}, of memory {mean_memory:.1%}")


if __name__ == "__main__":
    main()
