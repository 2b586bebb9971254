"""The testbed's model, and plans to run side by side: every way to divide the ranks, attention and MLPs apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from specs.cluster import ClusterSpec
from specs.layout import balanced_cuts
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Recompute, Replica, Stage, TrainingSpec

SEQ_LEN, BATCH = 128, 8  # with the model below steps of about 100 ms: many turns in minutes, kernels still of ms


def model_of(name: str, *, heads: int = 8, kv_heads: int = 2, ffns: tuple[int, ...], vocab: int = 256) -> ModelSpec:
    """A decoder of width 256 with one MLP of each of these widths."""
    hidden = 256
    attention = Attention(hidden=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=32)
    return ModelSpec(
        name=name,
        embedding=Embedding(hidden=hidden, vocab=vocab),
        layers=tuple(Layer(attention=attention, feed_forward=Mlp(hidden=hidden, ffn=ffn)) for ffn in ffns),
        head=Head(hidden=hidden, vocab=vocab),
        max_positions=1024,
    )


MODEL = model_of("testbed", ffns=(384, 1536))


@dataclass(frozen=True)
class Shape:
    """Stages x replicas x ranks per stage; degrees of attention (embedding and head alike) and of MLPs."""

    stages: int
    replicas: int
    ranks: int
    attention: int
    mlp: int
    micro_batch: int
    recompute: Recompute = "none"
    zero: int = 0

    @property
    def name(self) -> str:
        """`pp2 dp1 tp2/1 mb2`, what differs from the plainest plan at the end."""
        degrees = str(self.attention) if self.attention == self.mlp else f"{self.attention}/{self.mlp}"
        more = (f" {self.recompute}" if self.recompute != "none" else "") + (f" zero{self.zero}" if self.zero else "")
        return f"pp{self.stages} dp{self.replicas} tp{degrees} of {self.ranks} mb{self.micro_batch}{more}"


def divisors(number: int) -> list[int]:
    """All of them, from 1 on."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def shapes(num_ranks: int, batch: int) -> Iterator[Shape]:
    """Every division of the ranks and every pair of degrees, each at one or two micro-batches; a few more of some."""
    for stages, replicas in product(divisors(num_ranks), repeat=2):
        if num_ranks % (stages * replicas):
            continue
        ranks = num_ranks // (stages * replicas)
        for attention, mlp in product(divisors(ranks), repeat=2):
            # A block holds whole sequences: the narrowest one sets the smallest micro-batch.
            smallest = ranks // min(attention, mlp)
            sizes = [smallest] if num_ranks > 2 else [smallest, 2 * smallest]
            for micro_batch in sizes:
                if batch // replicas % micro_batch == 0 and batch // replicas // micro_batch >= stages:
                    yield Shape(stages, replicas, ranks, attention, mlp, micro_batch)
    yield Shape(1, num_ranks, 1, 1, 1, 1, zero=1)
    yield Shape(1, num_ranks, 1, 1, 1, 1, recompute="full")
    yield Shape(num_ranks, 1, 1, 1, 1, 1, recompute="full")
    if num_ranks == 2:
        yield Shape(1, 1, num_ranks, num_ranks, num_ranks, 1, recompute="full")
        yield Shape(1, 1, num_ranks, num_ranks, num_ranks, 1, recompute="selective")
        yield Shape(1, 2, 1, 1, 1, 2, zero=1)
        yield Shape(1, 1, 2, 1, 1, 2, zero=1)
        yield Shape(1, 1, 2, 2, 2, 4)


def plan_of(shape: Shape, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> Plan:
    """The shape as a plan: stages with like numbers of modules, ranks in order."""
    names = [name for name, _ in model.modules()]
    cuts = balanced_cuts(len(names), shape.stages)

    def placement(name: str) -> ModulePlacement:
        degree = shape.mlp if name.endswith("mlp") else shape.attention
        recompute: Recompute = "none" if name in ("embedding", "head") else shape.recompute
        blocks = (degree,) * (shape.ranks // degree)
        return ModulePlacement(module=name, blocks=blocks, recompute=recompute, zero=shape.zero)  # type: ignore[arg-type]

    stages = tuple(
        Stage(num_ranks=shape.ranks, modules=tuple(placement(name) for name in names[cuts[i] : cuts[i + 1]]))
        for i in range(shape.stages)
    )
    size, batch = shape.ranks * shape.stages, training.global_batch
    return Plan(
        made=Provenance(created_by="benchmarks/testbed", created_at="2026-01-01T00:00:00Z"),
        model=model,
        cluster=cluster,
        training=training,
        pipelines=(Pipeline(micro_batch=shape.micro_batch, stages=stages),),
        replicas=tuple(
            Replica(pipeline=0, ranks=tuple(range(i * size, (i + 1) * size)), sequences=batch // shape.replicas)
            for i in range(shape.replicas)
        ),
    )
