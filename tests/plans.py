"""Small valid plans for tests: a tiny decoder on a cluster of equal nodes, cut the same way everywhere."""

from __future__ import annotations

from collections import Counter

from cost_models.buckets import holdings
from cost_models.memory import PlanMemory
from specs.cluster import ClusterSpec, Device, Link, NodeGroup
from specs.layout import balanced_cuts
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec
from specs.plan import MemoryTerms, ModulePlacement, Pipeline, Plan, Provenance, Replica, Stage, TrainingSpec


def tiny_model(*, num_layers: int = 4, hidden: int = 64, num_heads: int = 8, num_kv_heads: int = 4) -> ModelSpec:
    """A decoder of equal layers with a vocabulary of 256."""
    attention = Attention(hidden=hidden, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=hidden // num_heads)
    layer = Layer(attention=attention, feed_forward=Mlp(hidden=hidden, ffn=4 * hidden), repeat=num_layers)
    return ModelSpec(
        name="tiny",
        embedding=Embedding(hidden=hidden, vocab=256),
        layers=(layer,),
        head=Head(hidden=hidden, vocab=256),
    )


def cluster(num_devices: int, *, per_node: int = 8, kind: str = "gpu", memory_bytes: int = 80 * 2**30) -> ClusterSpec:
    """Equal nodes of `per_node` devices (fewer when the cluster is smaller)."""
    per_node = min(per_node, num_devices)
    assert num_devices % per_node == 0
    device = Device(
        name="test device",
        kind="cpu" if kind == "cpu" else "gpu",
        memory_bytes=memory_bytes,
        memory_bytes_per_second=2e12,
        peak_flop_per_second={"bf16": 5e14, "fp32": 5e13},
        source="made up for tests",
    )
    link = Link(name="test link", bytes_per_second=5e10, latency_seconds=1e-5, source="made up for tests")
    return ClusterSpec(
        name=f"test x {num_devices}",
        devices={device.name: device},
        nodes=(NodeGroup(count=num_devices // per_node, devices_per_node=per_node, device=device.name),),
        links={"scale_up": link, "scale_out": link},
    )


def plan(
    *,
    stages: int = 1,
    ranks: int = 1,
    replicas: int = 1,
    degree: int | None = None,
    micro_batch: int | None = None,
    micro_batches: int = 2,
    seq_len: int = 32,
    model: ModelSpec | None = None,
    on: ClusterSpec | None = None,
) -> Plan:
    """`replicas` x `stages` x `ranks` ranks, every module in blocks of `degree` (None: the whole stage).

    `micro_batch` None: as many sequences as a stage has blocks.  `on` None: a cluster with just these ranks.
    """
    model = model if model is not None else tiny_model()
    degree = degree if degree is not None else ranks
    assert ranks % degree == 0
    micro_batch = micro_batch if micro_batch is not None else ranks // degree
    names = [name for name, _ in model.modules()]
    cuts = balanced_cuts(len(names), stages)
    blocks = (degree,) * (ranks // degree)
    pipeline = Pipeline(
        micro_batch=micro_batch,
        stages=tuple(
            Stage(
                num_ranks=ranks,
                modules=tuple(ModulePlacement(module=name, blocks=blocks) for name in names[cuts[i] : cuts[i + 1]]),
            )
            for i in range(stages)
        ),
    )
    size, share = stages * ranks, micro_batch * micro_batches
    total = size * replicas
    return Plan(
        made=Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z"),
        model=model,
        cluster=on if on is not None else cluster(total, per_node=min(8, total)),
        training=TrainingSpec(global_batch=share * replicas, seq_len=seq_len),
        pipelines=(pipeline,),
        replicas=tuple(
            Replica(pipeline=0, ranks=tuple(range(i * size, (i + 1) * size)), sequences=share) for i in range(replicas)
        ),
    )


def rank_memory(plan: Plan, pipeline: int, stage: int, rank: int) -> MemoryTerms:
    """Predicted peak of the `rank`-th rank of a stage of `plan.pipelines[pipeline]`, nothing reserved."""
    replicas_of = Counter(replica.pipeline for replica in plan.replicas)
    return PlanMemory(plan, holdings(plan), replicas_of, reserved_bytes=0).stage(pipeline, stage)[rank]
