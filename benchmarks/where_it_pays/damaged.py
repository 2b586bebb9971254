"""Domains that lost a GPU: attention's blocks for what is left, and replicas that go on with fewer ranks.

All prices are those of whole plans, by the search's own cost model and shipped device data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.where_it_pays.cases import GIB, MADE, preset
from benchmarks.where_it_pays.shapes import decoder
from cost_models.sources import device_costs
from cost_models.step import price
from planner.constraints import Constraints
from planner.contingency import Replanner
from planner.make import Problem, make_plan
from specs.cluster import ClusterSpec, NodeGroup
from specs.errors import NoPlanFitsError
from specs.layout import sequence_token_cuts
from specs.model import ModelSpec
from specs.plan import ContingencyPolicy, ModulePlacement, Pipeline, Plan, Replica, Stage, TrainingSpec
from specs.presets import cluster_preset, machines

# a domain that lost one of eight


def damaged(cluster: str = "h100x8", lost: int = 7) -> ClusterSpec:
    return cluster_preset(cluster).model_copy(update={"missing": (lost,), "name": f"{cluster} without rank {lost}"})


def short_llama() -> ModelSpec:
    """Llama-3-70B's layers, eight of them, so that one domain holds them."""
    return decoder(
        "8 layers of llama-3-70b",
        hidden=8192,
        layers=8,
        heads=64,
        kv_heads=8,
        head_dim=128,
        ffn=28672,
        vocab=128256,
    )


def domain_plan(
    cluster: ClusterSpec, attention: tuple[int, ...], rest: tuple[int, ...], training: TrainingSpec
) -> Plan:
    """One stage on all usable ranks, one micro-batch of the whole batch; sequences stay whole in attention's blocks."""
    model, ranks = short_llama(), cluster.ranks()
    placements = tuple(
        ModulePlacement(module=name, blocks=attention if module.kind == "attention" else rest, zero=1, recompute=again)
        for name, module in model.modules()
        for again in ("full" if name.startswith("layer.") else "none",)
    )
    cuts = sequence_token_cuts(attention, training.global_batch, training.seq_len) if len(attention) > 1 else None
    return Plan(
        made=MADE,
        model=model,
        cluster=cluster,
        training=training,
        pipelines=(
            Pipeline(
                micro_batch=training.global_batch,
                stages=(Stage(num_ranks=len(ranks), modules=placements, token_cuts=cuts),),
            ),
        ),
        replicas=(Replica(pipeline=0, ranks=ranks, sequences=training.global_batch),),
    )


DOMAIN_SEQUENCES = 56  # divides by 8 and by 7, so that no layout suffers from the batch


def damaged_layouts(seq_len: int = 4096) -> Iterator[tuple[str, float]]:
    """(layout, step seconds) of the same sequences on 8 and on 7 ranks.  Raises `ValueError` where one does not fit."""
    training = TrainingSpec(global_batch=DOMAIN_SEQUENCES, seq_len=seq_len)
    healthy, short = cluster_preset("h100x8"), damaged()
    for name, cluster, attention, rest in (
        ("8 ranks, degree 8 for everything", healthy, (8,), (8,)),
        ("8 ranks, attention alone on each, the rest 8", healthy, (1,) * 8, (8,)),
        ("7 ranks, degree 7 for everything", short, (7,), (7,)),
        ("7 ranks, attention 4 + 3, the rest 7", short, (4, 3), (7,)),
        ("7 ranks, attention 2 + 2 + 3, the rest 7", short, (2, 2, 3), (7,)),
        ("7 ranks, attention alone on each, the rest 7", short, (1,) * 7, (7,)),
    ):
        found = price(domain_plan(cluster, attention, rest, training), device_costs(cluster, training))
        (device,) = cluster.devices.values()
        if found.peak_memory_bytes > device.memory_bytes:
            raise ValueError(f"{name} needs {found.peak_memory_bytes / GIB:.1f} GiB")
        yield name, found.step_time_seconds


def show_damaged() -> None:
    print(
        f"damaged-domain: 8 layers of llama-3-70b, {DOMAIN_SEQUENCES} sequences of 4096 tokens in one domain of H100; "
        "8 / 7 = 1.143"
    )
    rows = list(damaged_layouts())
    uniform, best = rows[0][1], rows[1][1]
    for name, seconds in rows:
        print(f"  {name:45} {seconds:7.3f} s  {seconds / uniform:.3f} x degree 8  {seconds / best:.3f} x the best on 8")
    print(flush=True)


# replicas in domains of 8 to 72, one GPU lost


@dataclass(frozen=True)
class Replicas:
    """A job on four NVLink domains of GB200, of `size` GPUs each; pins and stages None: as the search chooses.

    The published setting (arXiv 2504.06095) is a replica's block of one whole domain, which `degree` pins.
    """

    model: str
    size: int
    degree: int | None = None
    num_domains: int = 4
    sequences: int = 64
    seq_len: int = 8192

    def problem(self) -> Problem:
        model, machine = preset(self.model)(), machines()["gb200"]
        cluster = ClusterSpec(
            name=f"{self.num_domains} domains of {self.size} GB200",
            devices={machine.device.name: machine.device},
            nodes=(NodeGroup(count=self.num_domains, devices_per_node=self.size, device=machine.device.name),),
            links={"scale_up": machine.scale_up, "scale_out": machine.scale_out},
        )
        return Problem(
            model=model,
            cluster=cluster,
            training=TrainingSpec(global_batch=self.sequences, seq_len=self.seq_len),
            provenance=MADE,
            constraints=Constraints()
            if self.degree is None
            else Constraints(pins=(f"layer.*.tp={self.degree}",), stages=f"0-{model.num_layers - 1}"),
        )


REPLICAS = (
    Replicas("llama-3-70b", 8, 8),
    Replicas("llama-3-405b", 32, 32),
    Replicas("llama-3-405b", 72, 72),
    Replicas("llama-3-405b", 32),
)
# What goes on without a rank, by the ways that may be taken.
WAYS: dict[str, tuple[ContingencyPolicy, ...]] = {
    "the replica is left out": ("drop",),
    "its block goes on with one rank fewer": ("reduced",),
    "whatever is best": ("reduced", "resplit", "split", "drop"),
}


@dataclass(frozen=True)
class AfterLoss:
    """Step seconds of the whole batch, by way; None where a way does not fit.  `layouts` in words."""

    whole: float
    layout: str
    seconds: dict[str, float | None]
    layouts: dict[str, str]


def after_loss(replicas: Replicas, time_limit_seconds: float) -> AfterLoss:
    """The plan of the whole cluster, and what its last rank's loss costs."""
    problem = replicas.problem()
    plan = make_plan(
        problem, device_costs, objective="step-time", freedom="modules", time_limit_seconds=time_limit_seconds, top_k=0
    )
    assert plan.predicted is not None
    replanner = Replanner(plan, device_costs(problem.cluster, problem.training))
    seconds: dict[str, float | None] = {}
    layouts = {}
    for name, policies in WAYS.items():
        try:
            found = replanner.solve(problem.cluster.ranks()[-1:], policies=policies)
        except NoPlanFitsError:
            seconds[name], layouts[name] = None, "does not fit"
            continue
        sequences = problem.training.global_batch
        seconds[name] = found.predicted.step_time_seconds * sequences / found.global_batch
        layouts[name] = found.layout
    return AfterLoss(plan.predicted.step_time_seconds, plan.ladder[-1].layout, seconds, layouts)


def show_replicas(time_limit_seconds: float) -> None:
    for replicas in REPLICAS:
        found = after_loss(replicas, time_limit_seconds)
        ranks = replicas.num_domains * replicas.size
        chosen = "as the search chooses" if replicas.degree is None else f"degree {replicas.degree}"
        print(
            f"reduced-replicas: {replicas.model}, {replicas.num_domains} domains of {replicas.size} GB200, {chosen}, "
            f"{replicas.sequences} sequences of {replicas.seq_len}; {ranks} / {ranks - 1} = {ranks / (ranks - 1):.3f}\n"
            f"  whole {found.whole:.3f} s: {found.layout}"
        )
        for name, seconds in found.seconds.items():
            text = "" if seconds is None else f"{seconds:.3f} s, {seconds / found.whole:.3f} x: "
            print(f"  {name}: {text}{found.layouts[name]}", flush=True)
        print()
