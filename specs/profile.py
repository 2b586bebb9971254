"""A profile: what one cluster's devices and links really did, when, and how that was measured.

Times are wall-clock seconds.  Bytes of a collective are those of the whole (gathered) tensor.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from specs.base import Document, Spec
from specs.cluster import ClusterSpec, CollectiveOp, LinkLevel, Precision
from specs.model import Module
from specs.plan import Provenance


class Timing(Spec):
    """Repetitions over all ranks: mean, standard deviation over repetitions, extremes, and the spread of rank means.

    `rank_spread` = (slowest rank's mean - fastest rank's mean) / mean.  `skew_seconds` = mean over repetitions of
    (slowest rank - mean of the ranks): what ranks wait when they meet after it; None in profiles from before it was
    measured.
    """

    mean_seconds: PositiveFloat
    std_seconds: NonNegativeFloat
    min_seconds: NonNegativeFloat
    max_seconds: NonNegativeFloat
    rank_spread: NonNegativeFloat
    skew_seconds: NonNegativeFloat | None = None
    repetitions: PositiveInt


class ModuleTiming(Spec):
    """One module kind and shape at one degree, timed in situ: all ranks run their blocks at the same time.

    `block_tokens` is the length of the gathered token list that a block computes on.  `forward` and `backward`
    include their collectives; `*_communication` is the part spent inside them (waiting for slower peers too).
    """

    module: Module
    degree: PositiveInt
    block_tokens: PositiveInt
    seq_len: PositiveInt
    precision: Precision
    world_size: PositiveInt
    forward: Timing
    backward: Timing
    forward_communication: NonNegativeFloat
    backward_communication: NonNegativeFloat
    flop_counted: NonNegativeFloat  # forward, one rank, by torch's counter
    flop_formula: NonNegativeFloat  # forward, one rank, by the cost model
    activation_bytes: NonNegativeInt  # kept from forward to backward on one rank, saved-tensor hooks
    weight_bytes: PositiveInt  # on one rank


class CollectiveTiming(Spec):
    """One collective on one group size, link level and payload."""

    op: CollectiveOp
    num_ranks: PositiveInt
    level: LinkLevel
    payload_bytes: PositiveInt
    timing: Timing


class OptimizerTiming(Spec):
    """One AdamW step with clipping and weight write-back over that many elements on every rank at once."""

    num_elements: PositiveInt
    timing: Timing


class StepOverhead(Spec):
    """Host time of a step that no module, collective or optimizer explains."""

    data_seconds_per_sequence: NonNegativeFloat  # loading, per sequence that a rank reads
    other_seconds_per_step: NonNegativeFloat
    other_seconds_per_action: NonNegativeFloat  # per forward or backward of a micro-batch on a stage
    # What a schedule that splits backward passes adds to the computing of those of attention and MLPs, as a part of it.
    split_backward_overhead: NonNegativeFloat

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, given: object) -> object:
        if isinstance(given, dict) and "split_backward_overhead" not in given:
            raise ValueError("split_backward_overhead is missing, as in profiles of earlier versions; measure it again")
        return given


class OverlapTiming(Spec):
    """Steps of one replica per rank and one micro-batch, with the gradients' collectives after backward and beside it.

    `sync_seconds` are those collectives alone, `backward_seconds` the pass that they may hide behind.
    """

    sharded: bool
    sync_seconds: NonNegativeFloat
    backward_seconds: PositiveFloat
    apart: Timing
    overlapped: Timing


class Profile(Document):
    """Everything measured on one cluster."""

    made: Provenance
    method: str
    cluster: ClusterSpec
    backend: Literal["gloo", "nccl"]
    world_size: PositiveInt
    modules: tuple[ModuleTiming, ...] = Field(min_length=1)
    collectives: tuple[CollectiveTiming, ...] = ()
    optimizer: tuple[OptimizerTiming, ...] = Field(min_length=1)
    overhead: StepOverhead
    overlaps: tuple[OverlapTiming, ...] = ()  # none: one rank, or a profile from before they were measured
    reserved_bytes: NonNegativeInt | None = None  # a GPU's beside tensors; None: not measured
