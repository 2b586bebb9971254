"""Plans of any shape for the parity tests: unlike stages, blocks, replicas, in a few words each."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from specs.layout import balanced_cuts, sequence_token_cuts
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec, Norm
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Replica, Stage, TrainingSpec, aligned_token_cuts
from tests.plans import cluster

SEQ_LEN = 8


def small_model(**changes: Any) -> ModelSpec:
    """Three unlike layers in which hardly a size divides: 6 heads over 3 groups, FFN 50, 37 and 41, vocabulary 61."""
    options = {"tied": False, "layernorm": False, "bias": False, "qk_norm": False, "positions": 0, **changes}
    norm = Norm(kind="layernorm") if options["layernorm"] else Norm()
    hidden = 24

    def attention(heads: int, groups: int, window: int | None = None) -> Attention:
        return Attention(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=groups,
            head_dim=4,
            norm=norm,
            qkv_bias=options["bias"],
            output_bias=options["bias"],
            qk_norm=options["qk_norm"],
            rope_theta=None if options["positions"] else 10000.0,
            window=window,
        )

    def mlp(ffn: int) -> Mlp:
        gated = not options["layernorm"]
        activation = "silu" if gated else "gelu_tanh"
        return Mlp(hidden=hidden, ffn=ffn, gated=gated, activation=activation, bias=options["bias"], norm=norm)

    return ModelSpec(
        name="small",
        embedding=Embedding(hidden=hidden, vocab=61, num_positions=options["positions"]),
        layers=(
            Layer(attention=attention(8, 8), feed_forward=mlp(50)),
            Layer(attention=attention(8, 4, window=3), feed_forward=mlp(37)),
            Layer(attention=attention(14, 7), feed_forward=mlp(41)),
        ),
        head=Head(hidden=hidden, vocab=61, tied=options["tied"], norm=norm),
    )


Blocks = tuple[int, ...]


@dataclass
class StageShape:
    """`blocks` by module name, else by kind, else one block of all ranks; likewise `cuts`."""

    num_ranks: int
    blocks: dict[str, Blocks] = field(default_factory=dict)
    cuts: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    num_modules: int | None = None


@dataclass
class ReplicaShape:
    stages: list[StageShape]
    micro_batch: int = 1
    sequences: int = 2
    schedule: str = "1f1b"
    num_virtual: int = 1
    actions: tuple[str, ...] | None = None
    context: int = 1


def _runs(names: list[str], shape: ReplicaShape) -> list[list[str]]:
    """The chain cut into virtual stages: as evenly as integers allow, or as the stages say."""
    places = len(shape.stages) * shape.num_virtual
    even = balanced_cuts(len(names), places)
    bounds = [0]
    for i in range(places):
        count = shape.stages[i].num_modules if shape.num_virtual == 1 else None
        bounds.append(bounds[-1] + count if count is not None else even[i + 1])
    return [names[start:stop] for start, stop in pairwise(bounds)]


def build(
    model: ModelSpec, replicas: list[ReplicaShape], *, recompute: str = "none", zero: int = 0, seq_len: int = SEQ_LEN
) -> Plan:
    """The plan; ranks are dealt out in order."""
    names = [name for name, _ in model.modules()]
    pipelines, placed, start = [], [], 0
    for index, shape in enumerate(replicas):
        runs = _runs(names, shape)
        stages = []
        for i, stage in enumerate(shape.stages):
            own = runs[i :: len(shape.stages)]
            modules = []
            for name in (name for run in own for name in run):
                kind = name.rsplit(".", 1)[-1]
                blocks = stage.blocks.get(name, stage.blocks.get(kind, (stage.num_ranks,)))
                cuts = stage.cuts.get(name, stage.cuts.get(kind))
                mode = "none" if recompute == "keep" and kind not in ("attention", "mlp") else recompute
                modules.append(
                    ModulePlacement(module=name, blocks=blocks, cuts=cuts, recompute=mode, zero=zero)  # type: ignore[arg-type]
                )
            virtual = tuple(map(len, own)) if shape.num_virtual > 1 else None
            bare = Stage(num_ranks=stage.num_ranks, modules=tuple(modules), virtual_stages=virtual)
            token_cuts = aligned_token_cuts(bare, model, shape.micro_batch, seq_len, shape.context)
            if token_cuts is None:
                token_cuts = sequence_token_cuts((stage.num_ranks,), shape.micro_batch, seq_len)
            stages.append(bare.model_copy(update={"token_cuts": token_cuts}))
        pipelines.append(
            Pipeline(
                micro_batch=shape.micro_batch,
                stages=tuple(stages),
                schedule=shape.schedule,  # type: ignore[arg-type]
                actions=shape.actions,
                context_parallel=shape.context,
            )
        )
        size = sum(stage.num_ranks for stage in shape.stages)
        placed.append(Replica(pipeline=index, ranks=tuple(range(start, start + size)), sequences=shape.sequences))
        start += size
    return Plan(
        made=Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z"),
        model=model,
        cluster=cluster(start, per_node=start, kind="cpu"),
        training=TrainingSpec(
            global_batch=sum(shape.sequences for shape in replicas), seq_len=seq_len, precision="fp32"
        ),
        pipelines=tuple(pipelines),
        replicas=tuple(placed),
    )
