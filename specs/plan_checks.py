"""What a plan must satisfy beyond the form of its fields, so that the executor can run it.

Every function raises `ValueError` with what is wrong and where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specs.layout import block_starts, check_cuts
from specs.model import SEQUENCE_KINDS, UNIT_NAMES, Module, NamedModule, num_units
from specs.schedule import check_actions

if TYPE_CHECKING:
    from specs.plan import ModulePlacement, Pipeline, Plan, Stage


def check_pipeline(pipeline: Pipeline, chain: tuple[NamedModule, ...], seq_len: int, where: str) -> None:
    """Every module once and in order, no empty shard, whole sequences for attention."""
    names = [placement.module for placement in pipeline.chain()]
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


def _check_given_schedule(pipeline: Pipeline, num_micro_batches: int, where: str) -> None:
    """Every other schedule is right by construction."""
    if pipeline.actions is None:
        return
    try:
        actions = pipeline.stage_actions(num_micro_batches)
        check_actions(actions, num_micro_batches=num_micro_batches, num_virtual=pipeline.num_virtual)
    except ValueError as error:
        raise ValueError(f"{where}, actions of {num_micro_batches} micro-batches: {error}") from None


def check_replicas(plan: Plan) -> None:
    """Every rank once and within the cluster, shares that add up to the batch, schedules that can run."""
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
        _check_given_schedule(pipeline, replica.sequences // pipeline.micro_batch, f"pipeline {replica.pipeline}")
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


def check_sharded_weights(plan: Plan) -> None:
    """Weights are gathered from copies that use them at the same moment: level 3 needs equal replicas."""
    used = [plan.pipelines[number] for number in dict.fromkeys(replica.pipeline for replica in plan.replicas)]
    sharded = [p.module for pipeline in used for stage in pipeline.stages for p in stage.modules if p.zero == 3]
    if not sharded:
        return
    advice = "Use zero 2 there"
    kinds = {(replica.pipeline, replica.sequences) for replica in plan.replicas}
    shares = {(plan.pipelines[number], sequences) for number, sequences in kinds}
    if len(shares) > 1:
        raise ValueError(
            f"{sharded[0]}: zero 3 gathers weights from all replicas at once, which needs equal pipelines and equal "
            f"shares of the batch; the replicas have {len(shares)} kinds of (pipeline, sequences). {advice}"
        )
    if plan.model.head.tied:
        for number, stage in enumerate(used[0].stages):
            names = {placement.module for placement in stage.modules}
            if len(names & {"embedding", "head"}) == 1 and names & {"embedding", "head"} & set(sharded):
                raise ValueError(
                    f"stage {number}: zero 3 for the tied weights of embedding and head, which lie on two stages and "
                    f"are used at two moments. {advice} for these two modules"
                )
