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
from specs.evidence import Alternative as Alternative
from specs.evidence import Certificate as Certificate
from specs.evidence import LadderRung as LadderRung
from specs.evidence import Objective as Objective
from specs.evidence import RateChoice
from specs.layout import (
    Cuts,
    Interval,
    balanced_cuts,
    block_of,
    block_starts,
    interval_of,
    sequence_token_cuts,
    sharing_blocks,
)
from specs.model import SEQUENCE_KINDS, ModelSpec, Module, num_units
from specs.plan_checks import check_pipeline, check_replicas, check_sharded_weights
from specs.schedule import Actions, parse_actions, pipeline_actions
from specs.schedule import Schedule as Schedule

Recompute = Literal["keep", "none", "selective", "full"]
Zero = Literal[0, 1, 2, 3]
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
    as even as integers allow).  `recompute`: none keeps a module's own chunk of the input and gathers the block's again
    in backward, keep (attention and mlp) keeps the gathered one, selective and full compute again.  `zero` shards over
    the owners of each weight interval: 1 optimizer state, 2 gradients too, 3 weights too (vectors as with 2), which are
    then gathered around each use.
    """

    module: str
    blocks: tuple[PositiveInt, ...] = Field(min_length=1)
    cuts: tuple[Cuts, ...] | None = None
    recompute: Recompute = "none"
    zero: Zero = 0

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
    """The modules on `num_ranks` ranks.  `token_cuts` None: as even as whole tokens allow.

    `virtual_stages`: numbers of modules of the runs of the chain that the stage holds, in order; None: one run.
    """

    num_ranks: PositiveInt
    modules: tuple[ModulePlacement, ...] = Field(min_length=1)
    token_cuts: Cuts | None = None
    virtual_stages: tuple[PositiveInt, ...] | None = None

    @model_validator(mode="after")
    def _blocks_fill_the_stage(self) -> Self:
        if self.virtual_stages is not None and sum(self.virtual_stages) != len(self.modules):
            raise ValueError(
                f"virtual stages of {list(self.virtual_stages)} modules add up to {sum(self.virtual_stages)}, "
                f"the stage has {len(self.modules)}"
            )
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

    def sharing_blocks(self, placement: ModulePlacement, num_tokens: int, seq_len: int) -> tuple[tuple[int, ...], ...]:
        """An attention module's blocks, those together that hold parts of the same sequence."""
        return sharing_blocks(placement.blocks, self.chunk_cuts(num_tokens), seq_len)

    @property
    def num_virtual(self) -> int:
        return 1 if self.virtual_stages is None else len(self.virtual_stages)

    def runs(self) -> tuple[tuple[ModulePlacement, ...], ...]:
        """The modules of each virtual stage."""
        starts = block_starts(self.virtual_stages or (len(self.modules),))
        return tuple(self.modules[start:stop] for start, stop in pairwise(starts))


class Pipeline(Spec):
    """The stages of one kind of replica; `micro_batch` in sequences.

    With virtual stages the chain goes around all stages once for each of them.  `actions`: of a given schedule, what
    each stage does in one step, such as "F0 F1 B0 B1".  `context_parallel`: so many neighbouring attention blocks may
    share a sequence, which is cut into as many pairs of an early and a late slice (`specs.slices`).
    """

    micro_batch: PositiveInt
    stages: tuple[Stage, ...] = Field(min_length=1)
    context_parallel: PositiveInt = 1
    schedule: Schedule = "1f1b"
    actions: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _schedule_is_complete(self) -> Self:
        if len({stage.num_virtual for stage in self.stages}) > 1:
            numbers = [stage.num_virtual for stage in self.stages]
            raise ValueError(f"stages have {numbers} virtual stages; give all of them as many")
        if self.num_virtual > 1 and self.schedule not in ("interleaved", "given"):
            raise ValueError(f"schedule {self.schedule} runs one virtual stage per stage; use interleaved")
        if self.schedule == "interleaved" and self.num_virtual == 1:
            raise ValueError("schedule interleaved needs stages with two or more virtual_stages; use 1f1b")
        if self.num_virtual > 1 and len(self.stages) == 1:
            raise ValueError("virtual stages need two or more stages to go around; leave virtual_stages out")
        if (self.actions is not None) != (self.schedule == "given"):
            raise ValueError("actions and schedule given belong together: give both or neither")
        if self.actions is not None and len(self.actions) != len(self.stages):
            raise ValueError(f"there are actions for {len(self.actions)} stages, the pipeline has {len(self.stages)}")
        return self

    @property
    def num_ranks(self) -> int:
        return sum(stage.num_ranks for stage in self.stages)

    @property
    def num_virtual(self) -> int:
        """Virtual stages of each stage."""
        return self.stages[0].num_virtual

    def stage_actions(self, num_micro_batches: int) -> tuple[Actions, ...]:
        """What each stage does in one step."""
        if self.actions is not None:
            return tuple(parse_actions(text) for text in self.actions)
        return pipeline_actions(
            self.schedule,
            num_stages=len(self.stages),
            num_micro_batches=num_micro_batches,
            num_virtual=self.num_virtual,
        )

    def chain(self) -> tuple[ModulePlacement, ...]:
        """All modules in the order in which a micro-batch passes them."""
        runs = [stage.runs() for stage in self.stages]
        return tuple(placement for turn in range(self.num_virtual) for own in runs for placement in own[turn])

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
        return float(sum(seconds for _, seconds in self))


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
        return int(sum(size for _, size in self))


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
    rate_choices: tuple[RateChoice, ...] = ()
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
            check_pipeline(pipeline, chain, self.training.seq_len, f"pipeline {number}")
        check_replicas(self)
        check_sharded_weights(self)
        return self

    @property
    def world_size(self) -> int:
        return sum(len(replica.ranks) for replica in self.replicas)

    def num_micro_batches(self, replica: Replica) -> int:
        """Micro-batches of a replica in one step."""
        return replica.sequences // self.pipelines[replica.pipeline].micro_batch

    def with_results(
        self,
        *,
        predicted: Prediction | None = None,
        certificate: Certificate | None = None,
        ladder: tuple[LadderRung, ...] | None = None,
        alternatives: tuple[Alternative, ...] | None = None,
        rate_choices: tuple[RateChoice, ...] | None = None,
        contingencies: tuple[Contingency, ...] | None = None,
    ) -> Plan:
        """The same layout with what was found out about it."""
        update: dict[str, object] = {
            "predicted": predicted,
            "certificate": certificate,
            "ladder": ladder,
            "alternatives": alternatives,
            "rate_choices": rate_choices,
            "contingencies": contingencies,
        }
        return self.model_copy(update={key: value for key, value in update.items() if value is not None})


def aligned_token_cuts(
    stage: Stage, model: ModelSpec, micro_batch: int, seq_len: int, context_parallel: int = 1
) -> Cuts | None:
    """Token cuts under which every attention block of a stage holds whole sequences, or whole pairs of their slices
    with context parallelism; None when none exist.

    With equal blocks that divide the micro-batch the even cut does; else the first composition's cut is tried.
    """
    modules = dict(model.modules())
    compositions = {p.blocks for p in stage.modules if modules[p.module].kind in SEQUENCE_KINDS}
    even = balanced_cuts(micro_batch * seq_len, stage.num_ranks)
    unit = seq_len // context_parallel
    candidates: list[Cuts | None] = [even]
    candidates += [sequence_token_cuts(blocks, micro_batch * context_parallel, unit) for blocks in sorted(compositions)]
    for cuts in candidates:
        if (
            cuts is not None
            and all(start < stop for start, stop in pairwise(cuts))
            and all(cuts[rank] % unit == 0 for blocks in compositions for rank in block_starts(blocks))
        ):
            return cuts
    return None
