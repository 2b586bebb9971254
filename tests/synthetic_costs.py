"""A made-up cost model for oracle tests: every number is a simple function, drawn once from a seed."""

from __future__ import annotations

import random

from cost_models.flops import largest_units
from cost_models.interface import ModuleCost
from specs.cluster import ClusterSpec, CollectiveOp, Device, Link, LinkLevel, NodeGroup
from specs.errors import BadInputError
from specs.layout import Interval
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec, Module
from specs.plan import Recompute
from specs.profile import StepOverhead


class SyntheticCosts:
    """Seconds per unit of work, a communication price per gathered token, activations in proportion."""

    def __init__(
        self,
        seed: int,
        *,
        once: float = 1e-6,
        jitter: float = 0.0,
        known: frozenset[tuple[str, int, str]] | None = None,
    ) -> None:
        """`known`: the (kind, degree, recompute) that have been measured; None for all."""
        generator = random.Random(seed)
        self._compute = {kind: generator.uniform(0.5, 2.0) for kind in ("embedding", "attention", "mlp", "head")}
        self._backward = generator.uniform(1.5, 2.5)
        self._communicate = generator.uniform(0.0, 0.4)
        self._kept = generator.uniform(0.5, 3.0)
        self._point_to_point = generator.choice([0.0, 1.0])
        self._compute["moe"] = generator.uniform(0.5, 2.0)
        self._once = once
        self._jitter = jitter
        self.known = known

    overhead = StepOverhead(
        data_seconds_per_sequence=0.01,
        other_seconds_per_step=0.1,
        other_seconds_per_action=0.001,
        split_backward_overhead=0.1,
    )
    reserved_bytes = 100
    estimated = True

    @property
    def jitter(self) -> float:
        return self._jitter

    def module(
        self,
        module: Module,
        *,
        degree: int,
        block_tokens: int,
        seq_len: int,  # noqa: ARG002 (the protocol has it)
        recompute: Recompute,
        level: LinkLevel,
        units: Interval | None = None,
    ) -> ModuleCost:
        if self.known is not None and (module.kind, degree, recompute) not in self.known:
            raise BadInputError("not measured")
        own = largest_units(module, degree) if units is None else units
        work = self._compute[module.kind] * block_tokens * own.size / 64.0
        talk = self._communicate * block_tokens * (degree - 1) / degree * (3.0 if level == "scale_out" else 1.0)
        repeated = {"keep": 0.0, "none": 0.0, "selective": 0.3, "full": 1.0}[recompute]
        kept = {"keep": 1.4, "none": 1.0, "selective": 0.6, "full": 0.1}[recompute]
        collectives = {"keep": 0.6, "full": 2.0}.get(recompute, 1.0)
        return ModuleCost(
            forward_seconds=work,
            backward_seconds=work * (self._backward + repeated),
            forward_communication_seconds=talk,
            backward_communication_seconds=talk * collectives,
            activation_bytes=round(self._kept * block_tokens * own.size * kept),
            working_bytes=round(block_tokens * (1.0 + repeated)),
            estimated=True,
        )

    def collective(
        self,
        op: CollectiveOp,
        *,
        num_ranks: int,
        payload_bytes: int,
        level: LinkLevel,
        ranks_per_domain: int = 1,  # noqa: ARG002
    ) -> float:
        if num_ranks <= 1:
            return 0.0
        if op == "point_to_point":
            return self._point_to_point * payload_bytes / 512.0 * (2.0 if level == "scale_out" else 1.0)
        passes = 2.0 if op == "all_reduce" else 1.0
        return self._once * passes * payload_bytes * (num_ranks - 1) / num_ranks

    def optimizer(self, num_elements: int) -> float:
        return self._once * num_elements

    def exposed_gradient_sync(
        self,
        seconds: float,
        backward_seconds: float,  # noqa: ARG002
        *,
        sharded: bool = False,  # noqa: ARG002
    ) -> float:
        return seconds


def tiny_model(seed: int, *, num_layers: int = 1) -> ModelSpec:
    """Layers that need not be alike, with sizes that do not always divide."""
    generator = random.Random(seed)
    heads = generator.choice([2, 3, 4])
    layers = []
    for _ in range(num_layers):
        attention = Attention(hidden=4, num_heads=heads, num_kv_heads=1 if heads == 3 else 2, head_dim=2)
        mlp = Mlp(hidden=4, ffn=generator.choice([6, 8, 12]))
        lacks = generator.choice(["nothing", "nothing", "attention", "feed_forward"])
        layers.append(
            Layer(
                attention=None if lacks == "attention" else attention,
                feed_forward=None if lacks == "feed_forward" else mlp,
            )
        )
    return ModelSpec(
        name="tiny",
        embedding=Embedding(hidden=4, vocab=16),
        layers=tuple(layers),
        head=Head(hidden=4, vocab=16),
    )


def some_options(seed: int, degrees: tuple[int, ...]) -> frozenset[tuple[str, int, str]]:
    """One recompute mode for each kind and degree, in a third of the draws two for one of them, so that all plans can
    be counted out.  Alone a rank gathers nothing to keep.
    """
    generator = random.Random(seed)
    modes = {
        "embedding": ["none"],
        "attention": ["keep", "none", "selective", "full"],
        "mlp": ["keep", "none", "full"],
        "head": ["none"],
    }
    twice = generator.choice(["attention", "mlp", "", "", "", ""]), generator.choice(degrees)
    return frozenset(
        (kind, degree, mode)
        for kind, of_kind in modes.items()
        for degree in degrees
        for mode in generator.sample(
            [mode for mode in of_kind if mode != "keep" or degree > 1], k=2 if (kind, degree) == twice else 1
        )
    )


def cluster(nodes: int, per_node: int, memory_bytes: int = 10**9) -> ClusterSpec:
    device = Device(
        name="d",
        memory_bytes=memory_bytes,
        memory_bytes_per_second=1e12,
        peak_flop_per_second={"bf16": 1e15},
        source="test",
    )
    link = Link(name="l", bytes_per_second=1e9, latency_seconds=0.0, source="test")
    return ClusterSpec(
        name=f"d{nodes}x{per_node}",
        devices={"d": device},
        nodes=(NodeGroup(count=nodes, devices_per_node=per_node, device="d"),),
        links={"scale_up": link, "scale_out": link},
    )
