"""What a source of costs must answer.  The planner and `cost_models.step.price` ask only this.

Two sources exist: measured (a profile) and device data (datasheet and published curves, marked estimated).
All times are seconds on one rank for one micro-batch unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specs.cluster import CollectiveOp, LinkLevel
from specs.layout import Interval
from specs.model import Module
from specs.plan import Recompute
from specs.profile import StepOverhead


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """Cost of one module on one rank for one micro-batch.

    `backward_seconds` and `backward_communication_seconds` include what recomputation repeats.
    `activation_bytes` stay from forward to backward; `working_bytes` is the extra peak while the module computes
    (gathered input, logits, recomputed tensors).  Communication is exposed time: what computing hides is not in it.
    """

    forward_seconds: float
    backward_seconds: float
    forward_communication_seconds: float
    backward_communication_seconds: float
    activation_bytes: int
    working_bytes: int
    estimated: bool

    @property
    def seconds(self) -> float:
        """Forward and backward with their communication."""
        return (
            self.forward_seconds
            + self.backward_seconds
            + self.forward_communication_seconds
            + self.backward_communication_seconds
        )


class CostModel(Protocol):
    """A source of costs.  Methods raise `BadInputError` for what was neither measured nor can be estimated.

    It never changes its answers, so that they are kept.
    """

    def __hash__(self) -> int: ...

    @property
    def overhead(self) -> StepOverhead:
        """Host time of a step outside modules."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Memory per rank that is never available to tensors (context, communicator buffers, allocator slack)."""
        ...

    @property
    def estimated(self) -> bool:
        """Whether any number comes from other machines than the one at hand."""
        ...

    @property
    def jitter(self) -> float:
        """Standard deviation over mean of one module's time on one rank, independent between ranks; 0 if unknown."""
        ...

    def module(
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
        """A module in a block of `degree` ranks that gathers `block_tokens` tokens.

        `level` is where the block's ranks lie (all in one scale-up domain or not).  `units` is the rank's own
        interval of units; None means the largest of an even cut, the one others wait for.
        """
        ...

    def collective(
        self, op: CollectiveOp, *, num_ranks: int, payload_bytes: int, level: LinkLevel, ranks_per_domain: int = 1
    ) -> float:
        """A collective alone; `payload_bytes` of the whole (gathered) tensor.  One rank or no bytes: 0.

        `ranks_per_domain`: members of a group of level `scale_out` that share a scale-up domain; they use their
        network links side by side.
        """
        ...

    def optimizer(self, num_elements: int) -> float:
        """Clipping, AdamW and write-back of that many elements on one rank."""
        ...

    def exposed_gradient_sync(self, seconds: float, backward_seconds: float, *, sharded: bool = False) -> float:
        """What remains of `seconds` of gradient collectives beside a last backward pass of `backward_seconds`.

        `sharded`: they are reduce-scatters and all-gathers of a sharded optimizer, which not every stack overlaps.
        """
        ...
