"""A plan: which rank computes which part of which module, for whom, and what that is predicted to deliver.

    Plan -> replicas -> (a pipeline of) stages -> ranks;  per module: blocks, cuts, recompute, sharding

A stage of one replica owns D ranks.  A micro-batch's residual stream is one sequence-major list of tokens, cut
into D contiguous chunks; rank r always holds chunk r.  For every module the D ranks are composed into blocks of
neighbours; a block gathers its chunks, computes with weights cut among its ranks, and scatters the sums back.
Replicas may differ: each names a pipeline, its ranks and its share of the global batch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from typing_extensions import Self

from specs.base import Document, Spec
from specs.cluster import ClusterSpec, Precision
from specs.layout import (
    Cuts,
    Interval,
    balanced_cuts,
    block_of,
    block_starts,
    check_cuts,
    interval_of,
    sequence_token_cuts,
)
from specs.model import SEQUENCE_KINDS, UNIT_NAMES, ModelSpec, Module, NamedModule, num_units

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["1f1b", "gpipe"]
Objective = Literal["goodput", "step-time", "tokens-per-dollar", "memory"]
ContingencyPolicy = Literal["reduced", "resplit", "split", "drop", "spare"]


class TrainingSpec(Spec):
    """What is trained, independent of any layout."""

    global_batch: PositiveInt  # sequences per step
    seq_len: PositiveInt  # tokens per sequence
    precision: Precision = "bf16"  # of weights and activations; master weights and moments are fp32

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len


class ModulePlacement(Spec):
    """How one module lies on the ranks of its stage.

    `blocks` are the sizes of the blocks of neighbouring ranks, `cuts` the unit cut points of each block (None:
    as even as integers allow).  `zero` shards over the owners of each weight interval: 1 optimizer state.
    """

    module: str
    blocks: tuple[PositiveInt, ...] = Field(min_length=1)
    cuts: tuple[Cuts, ...] | None = None
    recompute: Recompute = "none"
    zero: Literal[0, 1] = 0

    @property
    def degree(self) -> int:
        """Largest block; the tensor-parallel degree when all blocks are equal."""
        return max(self.blocks)

    def units_of(self, rank: int, module: Module) -> Interval:
        """Units of `module` that the stage's rank holds."""
        block, position = block_of(self.blocks, rank)
        return interval_of(self.block_cuts(block, module), position)

    def block_cuts(self, block: int, module: Module) -> Cuts:
        """Unit cut points of one block."""
        if self.cuts is not None:
            return self.cuts[block]
        return balanced_cuts(num_units(module), self.blocks[block])


class Stage(Spec):
    """A run of modules on `num_ranks` ranks.  `token_cuts` None: as even as whole tokens allow."""

    num_ranks: PositiveInt
    modules: tuple[ModulePlacement, ...] = Field(min_length=1)
    token_cuts: Cuts | None = None

    @model_validator(mode="after")
    def _blocks_fill_the_stage(self) -> Self:
        for placement in self.modules:
            if sum(placement.blocks) != self.num_ranks:
                raise ValueError(
                    f"{placement.module}: blocks {list(placement.blocks)} add up to {sum(placement.blocks)}, "
                    f"the stage has {self.num_ranks} ranks"
                )
            if placement.cuts is not None and len(placement.cuts) != len(placement.blocks):
                raise ValueError(
                    f"{placement.module}: {len(placement.cuts)} cuts for {len(placement.blocks)} blocks; "
                    "give one per block"
                )
        return self

    def chunk_cuts(self, num_tokens: int) -> Cuts:
        """Token cut points over the stage's ranks for a micro-batch of `num_tokens`."""
        return self.token_cuts if self.token_cuts is not None else balanced_cuts(num_tokens, self.num_ranks)


class Pipeline(Spec):
    """The stages of one kind of replica; `micro_batch` in sequences."""

    micro_batch: PositiveInt
    stages: tuple[Stage, ...] = Field(min_length=1)
    schedule: Schedule = "1f1b"

    @property
    def num_ranks(self) -> int:
        return sum(stage.num_ranks for stage in self.stages)

    def stage_starts(self) -> tuple[int, ...]:
        """Position of each stage's first rank in the replica's rank list, plus the total."""
        return block_starts([stage.num_ranks for stage in self.stages])


class Replica(Spec):
    """One copy of the model: `ranks` in stage order, `sequences` of the global batch per step."""

    pipeline: NonNegativeInt
    ranks: tuple[int, ...]
    sequences: PositiveInt


class StepTerms(Spec):
    """Seconds of one step, each a mean over ranks; they add up to the step time.

    forward, backward: compute.  tp_communication: gathers and scatters that nothing hides.  pipeline_idle: waiting
    for other stages and sending to them.  gradient_sync, optimizer, data: after and before the passes.  other: host.
    """

    forward: NonNegativeFloat = 0.0
    backward: NonNegativeFloat = 0.0
    tp_communication: NonNegativeFloat = 0.0
    pipeline_idle: NonNegativeFloat = 0.0
    gradient_sync: NonNegativeFloat = 0.0
    optimizer: NonNegativeFloat = 0.0
    data: NonNegativeFloat = 0.0
    other: NonNegativeFloat = 0.0

    def total(self) -> float:
        return float(sum(self.model_dump().values()))


class MemoryTerms(Spec):
    """Bytes on one rank at its peak."""

    weights: NonNegativeInt = 0
    gradients: NonNegativeInt = 0
    optimizer: NonNegativeInt = 0  # master weights and moments
    activations: NonNegativeInt = 0  # kept for backward, all micro-batches in flight
    working: NonNegativeInt = 0  # temporary tensors of the module being computed, gathered inputs, logits
    communication: NonNegativeInt = 0  # buffers of collectives and buckets
    reserved: NonNegativeInt = 0  # context, allocator slack

    def total(self) -> int:
        return int(sum(self.model_dump().values()))


class Prediction(Spec):
    """What the cost models say a plan delivers.  `estimated`: at least one number was not measured."""

    step_time_seconds: PositiveFloat
    step_terms: StepTerms
    tokens_per_second: PositiveFloat
    peak_memory_bytes: PositiveInt
    peak_memory_rank: NonNegativeInt
    peak_memory_terms: MemoryTerms
    stage_memory_bytes: tuple[PositiveInt, ...]  # fullest rank of each stage of the first pipeline
    goodput_tokens_per_second: PositiveFloat
    renewal_factor: PositiveFloat  # checkpoints, lost work, restarts
    degraded_factor: PositiveFloat  # running with fewer devices until repair
    checkpoint_interval_seconds: PositiveFloat
    estimated: bool
    notes: tuple[str, ...] = ()


class Certificate(Spec):
    """What the solver proved.  `gap` = (objective - bound) / objective, both in seconds of step time per unit (bytes for
    the objective memory).  `freedom` is the ladder's last rung that was searched, `constraints` are the user's.
    """

    engine: str
    objective: Objective
    status: Literal["optimal", "feasible", "given"]
    objective_value: float
    bound: float
    gap: NonNegativeFloat
    seconds: NonNegativeFloat
    labels: NonNegativeInt = 0
    nodes: NonNegativeInt = 0  # of branch and bound
    evaluated: NonNegativeInt = 0
    freedom: str = ""
    constraints: tuple[str, ...] = ()
    pruned: dict[str, int] = Field(default_factory=dict)


class LadderRung(Spec):
    """Best plan of one freedom; every rung allows all that the one before allows, priced by one model."""

    freedom: str
    step_time_seconds: PositiveFloat | None  # None: nothing of this kind fits
    gain_over_previous: float | None  # fraction of step time saved
    layout: str
    reason: str = ""


class Alternative(Spec):
    """A plan that was not taken, and why."""

    layout: str
    step_time_seconds: PositiveFloat | None
    peak_memory_bytes: PositiveInt | None
    reason: str


class Contingency(Spec):
    """How training goes on without some ranks (`specs.contingency.plan_after` makes a whole plan of it).

    reduced: damaged stages go on with fewer ranks.  resplit: the survivors are dealt over stages anew.  split: they
    form several smaller replicas.  drop: the damaged replica is left out.  spare: idle ranks step in.
    `lost` are the ranks that it was solved for; each of `equivalent`, lost alone, leads to the same layout under
    other names.  `pipelines` are counted after the plan's own, some of which are `replaced` (more recompute);
    `replicas` stand in the damaged ones' places.  `sequences` of every replica of the plan: 0 where it was damaged.
    """

    lost: tuple[NonNegativeInt, ...] = Field(min_length=1)
    equivalent: tuple[NonNegativeInt, ...] = ()
    policy: ContingencyPolicy
    layout: str
    pipelines: tuple[Pipeline, ...] = ()
    replicas: tuple[Replica, ...] = ()
    replaced: dict[int, NonNegativeInt] = Field(default_factory=dict)
    sequences: tuple[NonNegativeInt, ...]
    global_batch: PositiveInt  # less than the plan's only where no shares add up to that
    predicted: Prediction
    alternatives: tuple[Alternative, ...] = ()


class Provenance(Spec):
    """Who made a document, when, from which inputs (sha256 each) and with which versions."""

    created_by: str
    created_at: str
    command: str = ""
    inputs: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)


class Plan(Document):
    """A complete plan; `plait train` needs nothing else but data."""

    made: Provenance
    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    memory_cap_bytes: PositiveInt | None = None  # per rank, when lower than the device's memory
    pipelines: tuple[Pipeline, ...] = Field(min_length=1)
    replicas: tuple[Replica, ...] = Field(min_length=1)
    predicted: Prediction | None = None
    certificate: Certificate | None = None
    ladder: tuple[LadderRung, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    contingencies: tuple[Contingency, ...] = ()

    @model_validator(mode="after")
    def _is_executable(self) -> Self:
        chain = self.model.modules()
        limit = self.model.max_positions
        if limit is not None and self.training.seq_len > limit:
            raise ValueError(
                f"seq_len {self.training.seq_len} is longer than the {limit} positions that model {self.model.name} "
                f"states. Use at most {limit}, or a model file with a larger max_positions"
            )
        for number, pipeline in enumerate(self.pipelines):
            _check_pipeline(pipeline, chain, self.training.seq_len, f"pipeline {number}")
        _check_replicas(self)
        return self

    @property
    def world_size(self) -> int:
        return sum(len(replica.ranks) for replica in self.replicas)

    def with_results(
        self,
        *,
        predicted: Prediction | None = None,
        certificate: Certificate | None = None,
        ladder: tuple[LadderRung, ...] | None = None,
        alternatives: tuple[Alternative, ...] | None = None,
        contingencies: tuple[Contingency, ...] | None = None,
    ) -> Plan:
        """The same layout with what was found out about it."""
        update: dict[str, object] = {
            "predicted": predicted,
            "certificate": certificate,
            "ladder": ladder,
            "alternatives": alternatives,
            "contingencies": contingencies,
        }
        return self.model_copy(update={key: value for key, value in update.items() if value is not None})


def _check_pipeline(pipeline: Pipeline, chain: tuple[NamedModule, ...], seq_len: int, where: str) -> None:
    """Every module once and in order, no empty shard, whole sequences for attention."""
    placed = [placement for stage in pipeline.stages for placement in stage.modules]
    names = [placement.module for placement in placed]
    expected = [name for name, _ in chain]
    if names != expected:
        for position, name in enumerate(expected):
            if position >= len(names) or names[position] != name:
                found = names[position] if position < len(names) else "the end"
                raise ValueError(
                    f"{where}: position {position} holds {found}, the model needs {name} there; "
                    "every module must be placed once, in order"
                )
        raise ValueError(f"{where}: {names[len(expected)]} is not in the model")
    modules = dict(chain)
    num_tokens = pipeline.micro_batch * seq_len
    for index, stage in enumerate(pipeline.stages):
        if stage.token_cuts is not None:
            check_cuts(stage.token_cuts, num_tokens, stage.num_ranks, f"{where}, stage {index}, token_cuts")
        elif num_tokens < stage.num_ranks:
            raise ValueError(f"{where}, stage {index}: {num_tokens} tokens cannot be cut over {stage.num_ranks} ranks")
        for placement in stage.modules:
            _check_placement(placement, modules[placement.module], stage, num_tokens, seq_len, where)


def _check_placement(
    placement: ModulePlacement, module: Module, stage: Stage, num_tokens: int, seq_len: int, where: str
) -> None:
    units = num_units(module)
    for block, size in enumerate(placement.blocks):
        what = f"{where}, {placement.module} ({units} {UNIT_NAMES[module.kind]})"
        check_cuts(placement.block_cuts(block, module), units, size, what)
    if module.kind in SEQUENCE_KINDS:
        cuts = stage.chunk_cuts(num_tokens)
        for rank in block_starts(placement.blocks):
            if cuts[rank] % seq_len:
                raise ValueError(
                    f"{where}, {placement.module}: blocks {list(placement.blocks)} do not hold whole sequences "
                    f"(micro-batch {num_tokens // seq_len} sequences over {stage.num_ranks} ranks, a block ends "
                    f"inside one). Use a micro-batch that is a multiple of {stage.num_ranks}/degree, or token_cuts"
                )


def _check_replicas(plan: Plan) -> None:
    seen: set[int] = set()
    for number, replica in enumerate(plan.replicas):
        if replica.pipeline >= len(plan.pipelines):
            raise ValueError(f"replica {number} names pipeline {replica.pipeline}, there are {len(plan.pipelines)}")
        pipeline = plan.pipelines[replica.pipeline]
        if len(replica.ranks) != pipeline.num_ranks:
            raise ValueError(
                f"replica {number} has {len(replica.ranks)} ranks, its pipeline needs {pipeline.num_ranks}"
            )
        if replica.sequences % pipeline.micro_batch:
            raise ValueError(
                f"replica {number} takes {replica.sequences} sequences per step, not a multiple of its micro-batch "
                f"{pipeline.micro_batch}"
            )
        for rank in replica.ranks:
            if rank in seen:
                raise ValueError(f"rank {rank} has two places, the second in replica {number}; each rank has one")
            seen.add(rank)
    share = sum(replica.sequences for replica in plan.replicas)
    if share != plan.training.global_batch:
        raise ValueError(
            f"the replicas take {share} sequences per step, the global batch has {plan.training.global_batch}"
        )
    outside = [rank for rank in seen if not 0 <= rank < plan.cluster.num_devices]
    if outside:
        raise ValueError(f"rank {min(outside)} is outside the cluster's {plan.cluster.num_devices} devices")
    missing = seen.intersection(plan.cluster.missing)
    if missing:
        raise ValueError(f"rank {min(missing)} is missing in the cluster. Plan again for the devices that are left")


def aligned_token_cuts(stage: Stage, model: ModelSpec, micro_batch: int, seq_len: int) -> Cuts | None:
    """Token cuts under which every attention block of a stage holds whole sequences; None when none exist.

    With equal blocks that divide the micro-batch the even cut does; else the first composition's cut is tried.
    """
    modules = dict(model.modules())
    compositions = {p.blocks for p in stage.modules if modules[p.module].kind in SEQUENCE_KINDS}
    even = balanced_cuts(micro_batch * seq_len, stage.num_ranks)
    candidates: list[Cuts | None] = [even]
    candidates += [sequence_token_cuts(blocks, micro_batch, seq_len) for blocks in sorted(compositions)]
    for cuts in candidates:
        if (
            cuts is not None
            and all(start < stop for start, stop in pairwise(cuts))
            and all(cuts[rank] % seq_len == 0 for blocks in compositions for rank in block_starts(blocks))
        ):
            return cuts
    return None
