"""Costs from shipped device data: datasheet peaks times published efficiencies, everything marked estimated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from cost_models.activations import ACTIVATION_BYTES, activation_bytes
from cost_models.collectives import (
    curve_seconds,
    measured_curves,
    scale_out_seconds,
    scale_up_seconds,
    shipped_curves,
)
from cost_models.dispatch import exchange_bytes
from cost_models.flops import gathered_width, score_backward_ratio, score_flop
from cost_models.interface import ModuleCost
from cost_models.kernels import Work, backward_work, forward_work, matrix_seconds, repeated_work
from cost_models.share import Share
from cost_models.stacks import Stack, stack
from cost_models.working import working_bytes
from specs.cluster import ClusterSpec, CollectiveOp, Device, LinkLevel, Precision
from specs.errors import BadInputError
from specs.layout import Interval
from specs.model import Embedding, Head, Module, Moe
from specs.plan import Recompute, TrainingSpec
from specs.profile import StepOverhead

_DATA = Path(__file__).parent / "data" / "device_efficiency.json"


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What a device reaches of its datasheet peaks; rates are fractions, times seconds."""

    matrix_efficiency: dict[Precision, float]
    matrix_depth_overhead: float
    attention_forward_efficiency: float
    attention_backward_efficiency: float
    memory_efficiency: float
    kernel_seconds: float
    collective_curves: str | None
    scale_up_efficiency: float
    scale_out_efficiency: float
    source: str


@cache
def efficiencies() -> dict[str, Efficiency]:
    """Shipped data by device name."""
    return {name: Efficiency(**entry) for name, entry in json.loads(_DATA.read_text(encoding="utf-8")).items()}


class _Once(NamedTuple):
    """A module on one rank with nothing computed again: seconds of attention scores, of the passes with them, and of
    their communication.
    """

    share: Share
    score_forward: float
    forward: float
    backward: float
    forward_communication: float
    backward_communication: float


class DeviceCosts:
    """A `CostModel` over datasheets and published curves, for one cluster, precision and software stack."""

    def __init__(self, cluster: ClusterSpec, training: TrainingSpec, stack_name: str) -> None:
        """Raises `BadInputError` for a device without shipped data or without the precision, or for unlike devices
        whose speeds the cluster does not say.
        """
        self._device: Device = cluster.devices[_reference(cluster)]
        known = efficiencies()
        if self._device.name not in known:
            raise BadInputError(
                f"no shipped data for the device {self._device.name!r} (there is for {', '.join(known)}). "
                "Profile the cluster (plait profile) and pass --profile."
            )
        self._efficiency = known[self._device.name]
        self._precision = training.precision
        for table in (self._efficiency.matrix_efficiency, self._device.peak_flop_per_second):
            if self._precision not in table:
                raise BadInputError(
                    f"{self._device.name} has no shipped data for {self._precision} "
                    f"(it has {', '.join(sorted(table))}). Choose another --precision, or profile the cluster."
                )
        self._links = cluster.links
        own = measured_curves(cluster, "scale_up")
        shipped = shipped_curves(self._efficiency.collective_curves)
        self._curves = {key: curve for key, curve in shipped.items() if key[0] not in {op for op, _ in own}} | dict(own)
        members = {curve.ranks_per_domain for curve in cluster.collectives if curve.level == "scale_out"}
        self._between = {n: measured_curves(cluster, "scale_out", n) for n in members}
        self._domain = max(group.devices_per_node for group in cluster.nodes)
        self._stack: Stack = stack(stack_name)
        self.module = lru_cache(maxsize=65536)(self._module)
        self._once = lru_cache(maxsize=65536)(self._without_recompute)

    @property
    def overhead(self) -> StepOverhead:
        return self._stack.overhead

    @property
    def reserved_bytes(self) -> int:
        return self._stack.reserved_bytes

    @property
    def estimated(self) -> bool:
        return True

    @property
    def jitter(self) -> float:
        return self._stack.jitter

    def _module(
        self,
        module: Module,
        *,
        degree: int,
        block_tokens: int,
        seq_len: int,
        recompute: Recompute,
        level: LinkLevel,
        units: Interval | None = None,
    ) -> ModuleCost:
        """Recomputation repeats the forward pass or its attention scores."""
        once = self._once(module, degree, block_tokens, seq_len, level, units)
        backward, backward_communication = once.backward, once.backward_communication
        if recompute == "full":
            backward += once.forward
            backward_communication += once.forward_communication
        elif recompute == "keep":
            backward_communication -= self._second_gather(module, degree, block_tokens, level)
        elif recompute == "selective":
            size = ACTIVATION_BYTES[self._precision]
            backward += once.score_forward + self._seconds(repeated_work(module, once.share, size))
        return ModuleCost(
            forward_seconds=once.forward,
            backward_seconds=backward,
            forward_communication_seconds=once.forward_communication,
            backward_communication_seconds=backward_communication,
            activation_bytes=activation_bytes(module, once.share, self._precision, recompute),
            working_bytes=working_bytes(module, once.share, self._precision, recompute),
            estimated=True,
        )

    def _without_recompute(
        self, module: Module, degree: int, block_tokens: int, seq_len: int, level: LinkLevel, units: Interval | None
    ) -> _Once:
        """Roofline by kernel."""
        share = Share.of(module, degree, block_tokens, seq_len, units)
        size = ACTIVATION_BYTES[self._precision]
        scores = score_flop(module, block_tokens, seq_len, share.units)
        rate = self._device.peak_flop_per_second[self._attention_precision]
        score_forward = scores / (rate * self._efficiency.attention_forward_efficiency)
        score_backward = score_backward_ratio(module) * scores / (rate * self._efficiency.attention_backward_efficiency)
        forward = self._seconds(forward_work(module, share, size)) + score_forward
        backward = self._seconds(backward_work(module, share, size)) + score_backward
        return _Once(share, score_forward, forward, backward, *self._communication(module, degree, block_tokens, level))

    @property
    def _attention_precision(self) -> Precision:
        """Attention is computed in bf16 when matrices are in fp8."""
        return "bf16" if self._precision == "fp8" else self._precision

    def _seconds(self, work: Work) -> float:
        """Matrix products, and element-wise kernels at the memory's rate; a sum, for kernels follow each other."""
        efficiency, precision = self._efficiency, self._precision
        rate = self._device.peak_flop_per_second[precision] * efficiency.matrix_efficiency[precision]
        memory = self._device.memory_bytes_per_second * efficiency.memory_efficiency
        products = sum(
            matrix_seconds(product, rate, efficiency.matrix_depth_overhead, efficiency.kernel_seconds)
            for product in work.products
        )
        return products + work.traffic_bytes / memory + work.num_kernels * efficiency.kernel_seconds

    def _communication(self, module: Module, degree: int, block_tokens: int, level: LinkLevel) -> tuple[float, float]:
        """Exposed seconds in (forward, backward): gather and scatter, and in backward the input's second gather.

        Latent attention gathers low-rank vectors, and in backward the whole gradient of its output.
        """
        if degree == 1:
            return 0.0, 0.0

        def seconds(op: CollectiveOp, width: int) -> float:
            payload = block_tokens * width * ACTIVATION_BYTES[self._precision]
            return self.collective(
                op, num_ranks=degree, payload_bytes=payload, level=level, ranks_per_domain=self._domain
            )

        exposed = 1.0 - self._stack.tensor_overlap
        if isinstance(module, Moe):
            forward, backward = exchange_bytes(module, degree, block_tokens, ACTIVATION_BYTES[self._precision])
            once = [
                sum(
                    self.collective(
                        "all_to_all", num_ranks=degree, payload_bytes=size, level=level, ranks_per_domain=self._domain
                    )
                    for size in sizes
                )
                for sizes in (forward, backward)
            ]
            return exposed * once[0], exposed * once[1]
        gather, scatter = seconds("all_gather", module.hidden), seconds("reduce_scatter", module.hidden)
        if isinstance(module, Embedding):
            return exposed * scatter, exposed * gather
        if isinstance(module, Head):
            return exposed * (gather + scatter), 0.0
        width = gathered_width(module)
        if width != module.hidden:
            low = seconds("all_gather", width)
            return exposed * (low + scatter), exposed * (gather + low + seconds("reduce_scatter", width))
        return exposed * (gather + scatter), exposed * (2.0 * gather + scatter)

    def _second_gather(self, module: Module, degree: int, block_tokens: int, level: LinkLevel) -> float:
        """Exposed seconds of gathering the input again in backward."""
        payload = block_tokens * module.hidden * ACTIVATION_BYTES[self._precision]
        seconds = self.collective(
            "all_gather", num_ranks=degree, payload_bytes=payload, level=level, ranks_per_domain=self._domain
        )
        return (1.0 - self._stack.tensor_overlap) * seconds

    def collective(
        self, op: CollectiveOp, *, num_ranks: int, payload_bytes: int, level: LinkLevel, ranks_per_domain: int = 1
    ) -> float:
        """From the cluster's own curve or a published one; between domains hierarchical, from link rates."""
        if num_ranks <= 1 or payload_bytes <= 0:
            return 0.0
        efficiency = self._efficiency
        up = self._links["scale_up"]
        if level == "scale_up":
            return scale_up_seconds(self._curves, up, efficiency.scale_up_efficiency, op, num_ranks, payload_bytes)
        between = self._between.get(min(ranks_per_domain, num_ranks), {})
        measured = curve_seconds(between, op, num_ranks, payload_bytes)
        if measured is not None:
            return measured
        return scale_out_seconds(
            self._curves,
            up,
            efficiency.scale_up_efficiency,
            self._links["scale_out"],
            efficiency.scale_out_efficiency,
            op,
            num_ranks,
            payload_bytes,
            ranks_per_domain,
        )

    def optimizer(self, num_elements: int) -> float:
        """# bytes moved per element / memory rate: read and write weight master, two moments, read gradient twice
        #   (once for the norm)
        """
        memory = self._device.memory_bytes_per_second * self._efficiency.memory_efficiency
        return num_elements * self._stack.optimizer_bytes_per_element / memory

    def exposed_gradient_sync(self, seconds: float, backward_seconds: float, *, sharded: bool = False) -> float:
        """What the stack's overlap with one backward pass leaves."""
        return self._stack.exposed(seconds, backward_seconds, sharded=sharded)


def _reference(cluster: ClusterSpec) -> str:
    """The kind of device that the ranks' speeds are relative to: the only one with ranks at full speed.  Missing ranks
    count, for they were there when the speeds were found.
    """
    kinds = sorted({group.device for group in cluster.nodes})
    if len(kinds) == 1:
        return kinds[0]
    first, full = 0, set()
    for group in cluster.nodes:
        stop = first + group.count * group.devices_per_node
        if any(cluster.slow.get(rank, 1.0) >= 1.0 for rank in range(first, stop)):
            full.add(group.device)
        first = stop
    if len(full) != 1:
        raise BadInputError(
            f"cluster {cluster.name} has unlike devices ({', '.join(kinds)}), and `slow` does not say how fast they "
            f"are beside each other: ranks of {len(full)} kinds stand at full speed, there must be one. Give every "
            "rank of the slower kinds its speed, or profile the cluster (plait profile) and pass --profile."
        )
    return full.pop()
