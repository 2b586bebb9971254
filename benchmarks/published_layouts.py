"""Our plan beside the layout that the publisher of a run used, both priced by one cost model.

    python benchmarks/published_layouts.py [--runs benchmarks/data/published_runs.csv] [--time-limit 20] [ID ...]

The publisher's layout is written as a plan: its degrees, stages and virtual stages (interleaved schedules),
replicas, micro-batch, recomputation and whether the optimizer, gradients and weights are sharded.  Zero-bubble
schedules are priced as 1F1B.  Weights that are sharded under a pipeline count as zero 1, since frameworks then keep
them gathered for all micro-batches.  Prices are for this project's executor, so that they are not the publisher's
times; `plait validate` holds predictions against those.

Exit code 1 when a publisher's layout that fits beats our plan by more than 0.1 %: the search missed it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from cost_models.published import Run, load_rows
from cost_models.run_shape import layers_of_stage
from cost_models.run_time import hardware_of
from cost_models.sources import device_costs
from cost_models.step import price
from planner.make import Problem, make_plan
from reports.plan import STEP_NAMES
from specs.cluster import ClusterSpec, NodeGroup
from specs.errors import BadInputError, PlaitError
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec, Norm
from specs.plan import ModulePlacement, Pipeline, Plan, Prediction, Provenance, Replica, Stage, TrainingSpec

RUNS = Path(__file__).parent / "data" / "published_runs.csv"
GIB = 2.0**30
MISSED = 1e-3  # a search may stop within its own gap

# Well-specified rows of several kinds of layout, and models from 1.5 to 1,000 billion weights.
ROWS = (
    "seqsel-22B-sel",
    "seqsel-175B-sel",
    "seqsel-530B-dp8-sel",
    "seqsel-1000B-sel",
    "zb-t4-6.2B-m64-1F1B",
    "zb-t4-28.3B-m128-1F1B",
    "bloom-final-176B",
    "dgxc-v24.11.1-Nemotron4-15B-H100-64g-bf16",
    "dgxc-v24.11.1-GPT3-175B-H100-512g-bf16",
    "dgxc-v24.11.1-Nemotron4-340B-H100-512g-bf16",
    "nemolauncher-GPT3-20B-64g",
    "nemolauncher-Llama2-13B-16g",
    "nemolauncher-Llama2-70B-64g",
    "nemolauncher-GPT3-175B-512g",
    "mlm-llama-Llama3-70B-64g",
    "mlmci-gpt3_7b_tp4_pp1_memory_speed-H100",
    "mlmci-gpt3_7b_tp1_pp4_memory_speed-H100",
    "titan-8b-8g-compile",
    "titan-async-Llama3-8B-64g-bf16-asyncTP",
)


def llama_405b(num_gpus: int, dp: int) -> Run:
    """The Llama 3 405B runs at 8,192 tokens: tp 8, cp 1, pp 16, batch of 16M tokens (2,048 sequences).
    [arXiv 2407.21783, table 4; the same degrees stand in P. Balaji's talk at SC'24, as noted in
    glennklockwood.com/garden/llama-3.1]

    The paper states no micro-batch (1 is what its memory allows) and no recomputation (it says that none is needed);
    it shards optimizer states and gradients.  It interleaves and takes a layer each off the first and the last rank,
    without the number of virtual stages: 8 is one layer for each.
    """
    return Run(
        id=f"llama-3-405b-{num_gpus}",
        source_group="arXiv 2407.21783",
        layers=126,
        hidden=16384,
        heads=128,
        kv_heads=8,
        ffn=53248,
        gated=True,
        vocab=128256,
        seq_len=8192,
        gpu="H100",
        num_gpus=num_gpus,
        gpus_per_node=8,
        network_bytes_per_second=50e9,
        tp=8,
        pp=16,
        dp=dp,
        cp=1,
        chunks=8,
        sequence_parallel=True,
        micro_batch=1,
        global_batch=2048,
        recompute="none",
        sharding="full",
        shard_size=dp,
        precision="bf16",
        fp32_gradients=True,
        schedule="interleaved",
        stack="megatron-core",
        out_of_memory=False,
    )


def model_of(run: Run) -> ModelSpec:
    """A decoder of the run's shape; without a gate it is built like GPT-3."""
    norm = Norm() if run.gated else Norm(kind="layernorm")
    bias = not run.gated
    attention = Attention(
        hidden=run.hidden,
        num_heads=run.heads,
        num_kv_heads=run.kv_heads,
        head_dim=run.hidden // run.heads,
        norm=norm,
        qkv_bias=bias,
        output_bias=bias,
        rope_theta=10000.0 if run.gated else None,
    )
    mlp = Mlp(
        hidden=run.hidden,
        ffn=run.ffn,
        gated=run.gated,
        activation="silu" if run.gated else "gelu_tanh",
        bias=bias,
        norm=norm,
    )
    return ModelSpec(
        name=run.id,
        embedding=Embedding(hidden=run.hidden, vocab=run.vocab, num_positions=0 if run.gated else run.seq_len),
        layers=(Layer(attention=attention, feed_forward=mlp, repeat=run.layers),),
        head=Head(hidden=run.hidden, vocab=run.vocab, norm=norm),
    )


def cluster_of(run: Run) -> ClusterSpec:
    """The run's nodes, as the shipped machine with that device has them."""
    machine = hardware_of(run.gpu)
    per_node = min(run.gpus_per_node, run.num_gpus)
    # A lower power limit changes rates, which costs for plans know by device only: the usual device stands for it.
    name = {"H100-500W": "H100"}.get(machine.device.name, machine.device.name)
    device = machine.device.model_copy(update={"name": name})
    network = machine.scale_out
    if run.network_bytes_per_second is not None:
        network = network.model_copy(update={"bytes_per_second": run.network_bytes_per_second})
    return ClusterSpec(
        name=f"{name} x {run.num_gpus}",
        devices={name: device},
        nodes=(NodeGroup(count=run.num_gpus // per_node, devices_per_node=per_node, device=name),),
        links={"scale_up": machine.scale_up, "scale_out": network},
    )


def plan_of(run: Run, problem: Problem) -> Plan:
    """The publisher's layout.  Ranks in Megatron-LM's order: tensor, then data, then pipeline parallel.

    Raises `BadInputError` for context parallelism and for micro-batches that do not divide the batch.
    """
    if run.cp > 1:
        raise BadInputError(f"{run.id} has context parallelism ({run.cp}), which plans do not have.")
    if run.global_batch % (run.dp * run.micro_batch):
        raise BadInputError(
            f"{run.id}: batch {run.global_batch} is not a multiple of {run.dp} replicas x {run.micro_batch}."
        )
    zero = {"none": 0, "optimizer": 1, "full": 3 if run.pp == 1 else 1}[run.sharding]
    recompute = run.recompute or "none"
    names = [name for name, _ in problem.model.modules()]
    runs, first = [], 0
    layers_of_run = layers_of_stage(dataclasses.replace(run, pp=run.pp * run.chunks))
    for index, layers in enumerate(layers_of_run):
        last = first + 2 * layers + (index == 0) + (index == len(layers_of_run) - 1)
        placements = tuple(
            ModulePlacement(
                module=name,
                blocks=(run.tp,),
                recompute=recompute if name.startswith("layer.") else "none",
                zero=zero,
            )
            for name in names[first:last]
        )
        runs.append(placements)
        first = last
    stages = [
        Stage(
            num_ranks=run.tp,
            modules=tuple(placement for own in runs[index :: run.pp] for placement in own),
            virtual_stages=tuple(map(len, runs[index :: run.pp])) if run.chunks > 1 else None,
        )
        for index in range(run.pp)
    ]
    replicas = tuple(
        Replica(
            pipeline=0,
            ranks=tuple((p * run.dp + d) * run.tp + t for p in range(run.pp) for t in range(run.tp)),
            sequences=run.global_batch // run.dp,
        )
        for d in range(run.dp)
    )
    return Plan(
        made=problem.provenance,
        model=problem.model,
        cluster=problem.cluster,
        training=problem.training,
        pipelines=(
            Pipeline(
                micro_batch=run.micro_batch,
                stages=tuple(stages),
                schedule="interleaved" if run.chunks > 1 else "1f1b",
            ),
        ),
        replicas=replicas,
    )


def problem_of(run: Run) -> Problem:
    return Problem(
        model=model_of(run),
        cluster=cluster_of(run),
        training=TrainingSpec(global_batch=run.global_batch, seq_len=run.seq_len, precision=run.precision),
        provenance=Provenance(created_by="benchmarks/published_layouts.py", created_at="-"),
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both layouts of one row; `excess_bytes` of the publisher's over the device's memory, 0 where it fits."""

    run: Run
    theirs: Prediction
    ours: Plan
    excess_bytes: int
    search_seconds: float

    @property
    def our_prediction(self) -> Prediction:
        assert self.ours.predicted is not None
        return self.ours.predicted

    @property
    def saved(self) -> float:
        """Part of the publisher's step time that our plan saves; negative: ours is slower."""
        return 1.0 - self.our_prediction.step_time_seconds / self.theirs.step_time_seconds

    @property
    def missed(self) -> bool:
        """Whether the search should have found the publisher's layout and did not."""
        return self.excess_bytes == 0 and self.saved < -MISSED


def compare(run: Run, time_limit_seconds: float) -> Comparison:
    """Raises `NoPlanFitsError` and `BadInputError`, as planning does."""
    problem = problem_of(run)
    costs = device_costs(problem.cluster, problem.training)
    theirs = price(plan_of(run, problem), costs)
    begin = time.perf_counter()
    ours = make_plan(problem, device_costs, objective="step-time", time_limit_seconds=time_limit_seconds, top_k=0)
    (device,) = problem.cluster.devices.values()
    return Comparison(
        run=run,
        theirs=theirs,
        ours=ours,
        excess_bytes=max(0, theirs.peak_memory_bytes - device.memory_bytes),
        search_seconds=time.perf_counter() - begin,
    )


def explain(found: Comparison) -> str:
    """The two terms that differ most, as parts of the publisher's step time."""
    theirs, ours = found.theirs.step_terms.model_dump(), found.our_prediction.step_terms.model_dump()
    whole = found.theirs.step_time_seconds
    change = {name: (ours[name] - theirs[name]) / whole for name in theirs}
    largest = sorted(change, key=lambda name: -abs(change[name]))[:2]
    return ", ".join(f"{STEP_NAMES[name]} {100 * change[name]:+.1f} %" for name in largest)


def describe(run: Run) -> str:
    parts = [f"pp {run.pp} x tp {run.tp} x dp {run.dp}", f"mb {run.micro_batch}"]
    parts += [f"interleaved {run.chunks}"] if run.chunks > 1 else []
    parts += [run.recompute] if run.recompute not in (None, "none") else []
    parts += ["zero 3" if run.sharding == "full" and run.pp == 1 else "zero 1"] if run.sharding != "none" else []
    return ", ".join(parts)


def missing_of(run: Run) -> str:
    """What the publisher's layout has and its plan does not."""
    return " (gradients sharded: left out)" if run.sharding == "full" and run.pp > 1 else ""


def show(found: Comparison) -> None:
    run, ours = found.run, found.our_prediction
    memory = found.theirs.peak_memory_bytes / GIB
    fits = (
        f"{memory:.1f} GiB" if not found.excess_bytes else f"{memory:.1f} GiB: {found.excess_bytes / GIB:.1f} too much"
    )
    certificate = found.ours.certificate
    assert certificate is not None
    print(f"{run.id}  ({run.num_gpus} x {run.gpu}, batch {run.global_batch} x {run.seq_len}, {run.precision})")
    print(f"  theirs {found.theirs.step_time_seconds:9.3f} s  {fits:28}  {describe(run)}{missing_of(run)}")
    print(
        f"  ours   {ours.step_time_seconds:9.3f} s  {ours.peak_memory_bytes / GIB:5.1f} GiB"
        f"{'':19}  {found.ours.ladder[-1].layout}"
    )
    print(
        f"  saved {100 * found.saved:.2f} % of the step: {explain(found)}; gap {100 * certificate.gap:.2f} %, "
        f"{found.search_seconds:.1f} s{'  MISSED BY THE SEARCH' if found.missed else ''}\n",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", help="rows; default: a chosen set and Llama 3 405B")
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--time-limit", type=float, default=20.0)
    given = parser.parse_args()
    known = {row.id: row.run for row in load_rows(given.runs) if row.run is not None}
    known |= {run.id: run for run in (llama_405b(8192, 64), llama_405b(16384, 128))}
    wanted = given.ids or [*ROWS, "llama-3-405b-8192", "llama-3-405b-16384"]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"no such run, or one that is not modelled: {', '.join(unknown)}")
    missed = []
    for name in wanted:
        try:
            found = compare(known[name], given.time_limit)
        except PlaitError as error:
            print(f"{name}\n  no plan: {error}\n", flush=True)
            continue
        show(found)
        missed += [name] if found.missed else []
    print(f"{len(wanted)} runs; missed by the search: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
