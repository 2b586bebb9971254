"""How a cluster fails: rates by class, what each failure takes away and for how long, saving and restarting.

Every value carries its source.  Rates are per installed device, so that one model serves clusters of any size.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from typing_extensions import Self

from specs.base import Document, Spec

FailureDomain = Literal["device", "node", "network", "software"]
# What cannot be used until repaired: nothing (a restart on the same devices cures it), one device, or all of its host.
BlastRadius = Literal["none", "device", "node"]


class FailureClass(Spec):
    """Interruptions of one kind, a Poisson process per device.

    `repair_hours` is the mean time until the lost devices are back (0 exactly when the blast radius is "none").
    `memory_copy_survives` is the probability that a checkpoint kept in the memory of other hosts outlives it.
    `count` and `device_days` are the observation behind the rate, `rate_interval` its 95 % interval.
    """

    name: str
    domain: FailureDomain
    failures_per_device_day: NonNegativeFloat
    blast_radius: BlastRadius
    detect_seconds: NonNegativeFloat
    repair_hours: NonNegativeFloat = 0.0
    memory_copy_survives: float = Field(default=1.0, ge=0.0, le=1.0)
    count: NonNegativeInt | None = None
    device_days: PositiveFloat | None = None
    rate_interval: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    source: str

    @model_validator(mode="after")
    def _repair_fits_radius(self) -> Self:
        if (self.blast_radius == "none") != (self.repair_hours == 0.0):
            raise ValueError(
                f"{self.name}: blast radius {self.blast_radius!r} with repair_hours {self.repair_hours:g}; "
                "a repair time belongs to a radius of device or node, and only to those"
            )
        return self


class Checkpointing(Spec):
    """What saving and loading cost.  Bytes are those that one rank writes: its share of the distinct state.

    Training stalls while the state is copied to host memory (`stall_*`); the copy is durable when storage has it
    (`write_*`, the slower of the ranks' own rate and the storage's).  Loading reads at `read_*`.
    """

    stall_bytes_per_second: PositiveFloat  # per rank
    stall_fixed_seconds: NonNegativeFloat = 0.0
    write_bytes_per_second: PositiveFloat  # per rank
    storage_write_bytes_per_second: PositiveFloat  # of the storage, all ranks together
    read_bytes_per_second: PositiveFloat  # per rank
    storage_read_bytes_per_second: PositiveFloat
    memory_copy_bytes_per_second: PositiveFloat  # per rank, to the memory of another host
    longest_interval_seconds: PositiveFloat = 86400.0  # nobody goes longer without saving
    source: str


class Restarting(Spec):
    """Seconds from a detected failure to the first step, loading apart: fixed + per_rank * ranks."""

    fixed_seconds: NonNegativeFloat
    per_rank_seconds: NonNegativeFloat
    spare_swap_seconds: NonNegativeFloat = 0.0  # more, when a spare takes the place of a lost node
    source: str


class SlowDevices(Spec):
    """Devices that work, but slower: a share that always does, and episodes that come and go."""

    node_fraction: float = Field(ge=0.0, le=1.0)  # nodes that are slow all the time
    slowdown: float = Field(ge=1.0)  # their step time over nominal
    step_time_spread: NonNegativeFloat  # standard deviation of a rank's step time over its mean, nominal devices
    link_time_spread: NonNegativeFloat  # standard deviation over mean of a collective between hosts, over its groups
    episodes_per_device_day: NonNegativeFloat
    episode_slowdown: float = Field(ge=1.0)
    episode_minutes: NonNegativeFloat
    source: str


class FailureModel(Document):
    """All of it for one cluster.  `estimated`: taken from other clusters, not fitted to this one."""

    name: str
    classes: tuple[FailureClass, ...]
    checkpointing: Checkpointing
    restarting: Restarting
    slow: SlowDevices
    devices_per_host: PositiveInt = 8  # what a failed node takes; a scale-up domain may hold several hosts
    repair_time: Literal["exponential", "fixed"] = "exponential"
    repair_slots: PositiveInt | None = None  # repairs that proceed at once; None: nothing waits
    estimated: bool

    @property
    def failures_per_device_day(self) -> float:
        return sum(item.failures_per_device_day for item in self.classes)

    def scaled(self, factor: float) -> FailureModel:
        """The same cluster failing `factor` times as often."""
        classes = tuple(
            item.model_copy(
                update={
                    "failures_per_device_day": item.failures_per_device_day * factor,
                    "count": None,
                    "device_days": None,
                    "rate_interval": None,
                }
            )
            for item in self.classes
        )
        return self.model_copy(update={"classes": classes})
