"""A cluster: device types, nodes (scale-up domains) and the links by level."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from typing_extensions import Self

from specs.base import Document, Spec

# Larger than any cluster there is; a mistyped count must not fill memory with ranks.
MAX_DEVICES = 1_048_576

Precision = Literal["fp32", "bf16", "fp8"]
# Level of a group of ranks: all in one scale-up domain (node, NVLink domain), or spread over several.
LinkLevel = Literal["scale_up", "scale_out"]
CollectiveOp = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point"]


class Device(Spec):
    """One accelerator type.  Peaks are dense datasheet rates; what is reached is the cost model's business."""

    name: str
    kind: Literal["gpu", "cpu"] = "gpu"
    memory_bytes: PositiveInt
    memory_bytes_per_second: PositiveFloat
    peak_flop_per_second: dict[Precision, PositiveFloat]
    dollars_per_hour: PositiveFloat | None = None
    source: str


class Link(Spec):
    """A link level, per device and direction."""

    name: str
    bytes_per_second: PositiveFloat
    latency_seconds: NonNegativeFloat
    source: str


class CollectiveCurve(Spec):
    """Measured times of one collective on one group size; `payload_bytes` of the whole (gathered) tensor, ascending.

    `ranks_per_domain`: members that share a scale-up domain, all of them at level `scale_up`.
    """

    op: CollectiveOp
    level: LinkLevel
    num_ranks: int = Field(ge=2)
    ranks_per_domain: PositiveInt
    payload_bytes: tuple[PositiveInt, ...] = Field(min_length=1)
    seconds: tuple[PositiveFloat, ...]
    source: str

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.seconds) != len(self.payload_bytes):
            raise ValueError(f"{len(self.payload_bytes)} payloads and {len(self.seconds)} times; each needs the other")
        if list(self.payload_bytes) != sorted(set(self.payload_bytes)):
            raise ValueError("payload_bytes must ascend")
        inside = self.ranks_per_domain >= self.num_ranks
        if inside != (self.level == "scale_up"):
            raise ValueError(f"level {self.level} with {self.ranks_per_domain} of {self.num_ranks} ranks in a domain")
        return self


class NodeGroup(Spec):
    """`count` equal nodes; ranks are numbered node by node, group by group."""

    count: PositiveInt = Field(le=MAX_DEVICES)
    devices_per_node: PositiveInt = Field(le=MAX_DEVICES)
    device: str


class ClusterSpec(Document):
    """Nodes in rank order.  `missing` ranks are not used; `slow` maps a rank to its speed (1.0 is nominal).

    `collectives`: measured curves, which estimates take in place of shipped ones.
    """

    name: str
    devices: dict[str, Device] = Field(min_length=1)
    nodes: tuple[NodeGroup, ...] = Field(min_length=1)
    links: dict[LinkLevel, Link]
    collectives: tuple[CollectiveCurve, ...] = ()
    missing: tuple[int, ...] = ()
    slow: dict[int, PositiveFloat] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_devices > MAX_DEVICES:
            raise ValueError(f"{self.num_devices:,} devices are more than {MAX_DEVICES:,}")
        for group in self.nodes:
            if group.device not in self.devices:
                known = ", ".join(sorted(self.devices))
                raise ValueError(f"nodes name the device {group.device!r}, `devices` has: {known}")
        if "scale_up" not in self.links:
            raise ValueError("links need the level scale_up")
        if self.num_nodes > 1 and "scale_out" not in self.links:
            raise ValueError(f"{self.num_nodes} nodes need a link of level scale_out")
        for rank in (*self.missing, *self.slow):
            if not 0 <= rank < self.num_devices:
                raise ValueError(f"rank {rank} is outside the cluster's {self.num_devices} devices")
        return self

    @property
    def num_nodes(self) -> int:
        return sum(group.count for group in self.nodes)

    @property
    def num_devices(self) -> int:
        """Devices that are installed, missing ones included."""
        return sum(group.count * group.devices_per_node for group in self.nodes)

    @property
    def num_usable(self) -> int:
        """Devices that are there."""
        return self.num_devices - len(set(self.missing))

    def ranks(self) -> tuple[int, ...]:
        """Ranks that can be used."""
        gone = set(self.missing)
        every = range(self.num_devices)
        return tuple(rank for rank in every if rank not in gone) if gone else tuple(every)

    def node_starts(self) -> tuple[int, ...]:
        """First rank of every node, plus the total."""
        starts = [0]
        for group in self.nodes:
            for _ in range(group.count):
                starts.append(starts[-1] + group.devices_per_node)
        return tuple(starts)

    def node_ranks(self) -> tuple[range, ...]:
        """Ranks of every node that has a device which is not missing."""
        starts, gone = self.node_starts(), set(self.missing)
        nodes = (range(start, stop) for start, stop in pairwise(starts))
        return tuple(ranks for ranks in nodes if not gone.issuperset(ranks))

    def device_of(self, rank: int) -> Device:
        """Device type of a rank."""
        for group in self.nodes:
            size = group.count * group.devices_per_node
            if rank < size:
                return self.devices[group.device]
            rank -= size
        raise ValueError(f"rank outside the cluster's {self.num_devices} devices")
