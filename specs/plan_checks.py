"""What a plan must satisfy beyond the form of its fields, so that the executor can run it.

Every function raises `ValueError` with what is wrong and where.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from specs.layout import block_starts, check_cuts
from specs.model import SEQUENCE_KINDS, UNIT_NAMES, Attention, Module, NamedModule, num_units
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
    context = pipeline.context_parallel
    if context > 1 and seq_len % (2 * context):
        raise ValueError(
            f"{where}: context_parallel {context} cuts a sequence into {2 * context} equal slices, its {seq_len} "
            f"tokens leave a rest. Use a seq_len that is a multiple of {2 * context}, or another context_parallel"
        )
    for index, stage in enumerate(pipeline.stages):
        if stage.token_cuts is not None:
            check_cuts(stage.token_cuts, num_tokens, stage.num_ranks, f"{where}, stage {index}, token_cuts")
        elif num_tokens < stage.num_ranks:
            raise ValueError(f"{where}, stage {index}: {num_tokens} tokens cannot be cut over {stage.num_ranks} ranks")
        for placement in stage.modules:
            module = modules[placement.module]
            _check_units(placement, module, where)
            if placement.recompute == "keep" and module.kind not in ("attention", "mamba2", "mlp"):
                raise ValueError(
                    f"{where}, {placement.module}: recompute keep is for attention, mamba2 and mlp, whose gathered "
                    f"input it keeps; this is {module.kind}. Use none"
                )
            if context > 1 and isinstance(module, Attention):
                _check_shared_sequences(placement, module, stage, num_tokens, seq_len, context, where)
            elif module.kind in SEQUENCE_KINDS:
                _check_whole_sequences(placement, stage, num_tokens, seq_len, where)


def _check_units(placement: ModulePlacement, module: Module, where: str) -> None:
    units = num_units(module)
    for block, size in enumerate(placement.blocks):
        what = f"{where}, {placement.module} ({units} {UNIT_NAMES[module.kind]})"
        check_cuts(placement.block_cuts(block, module), units, size, what)


def _check_whole_sequences(placement: ModulePlacement, stage: Stage, num_tokens: int, seq_len: int, where: str) -> None:
    cuts = stage.chunk_cuts(num_tokens)
    for rank in block_starts(placement.blocks):
        if cuts[rank] % seq_len:
            raise ValueError(
                f"{where}, {placement.module}: blocks {list(placement.blocks)} do not hold whole sequences "
                f"(micro-batch {num_tokens // seq_len} sequences over {stage.num_ranks} ranks, a block ends "
                f"inside one). Use a micro-batch that is a multiple of {stage.num_ranks}/degree, token_cuts, or "
                "context_parallel"
            )


def _check_shared_sequences(
    placement: ModulePlacement,
    module: Module,
    stage: Stage,
    num_tokens: int,
    seq_len: int,
    context: int,
    where: str,
) -> None:
    """Blocks hold whole sequences, or whole pairs of slices of one; those that share one are cut alike."""
    cuts = stage.chunk_cuts(num_tokens)
    sharing: dict[int, int] = {}  # sequence -> the first block that holds a part of it
    for block, (first, last) in enumerate(pairwise(block_starts(placement.blocks))):
        start, stop = cuts[first], cuts[last]
        what = f"{where}, {placement.module}: block {block} of {list(placement.blocks)}"
        if (start * context) % seq_len or (stop * context) % seq_len:
            raise ValueError(
                f"{what} holds tokens {start} to {stop}, which are no whole pairs of slices ({seq_len // context} "
                f"tokens with seq_len {seq_len} and context_parallel {context}). Use other blocks, token_cuts, or "
                "context_parallel"
            )
        inside = start // seq_len == (stop - 1) // seq_len
        if not inside and (start % seq_len or stop % seq_len):
            raise ValueError(
                f"{what} holds tokens {start} to {stop}: parts of several sequences of {seq_len}. A block holds whole "
                "sequences or a part of one; use other blocks or token_cuts"
            )
        if inside and stop - start < seq_len:
            other = sharing.setdefault(start // seq_len, block)
            if placement.block_cuts(other, module) != placement.block_cuts(block, module):
                raise ValueError(
                    f"{what} shares a sequence with block {other}, which is cut differently; blocks exchange keys and "
                    "values rank by rank. Give both the same size and cuts"
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
        known = len(seen)
        seen.update(replica.ranks)
        if len(seen) < known + len(replica.ranks):
            every = Counter(rank for before in plan.replicas[: number + 1] for rank in before.ranks)
            rank = next(rank for rank in replica.ranks if every[rank] > 1)
            raise ValueError(f"rank {rank} has two places, the second in replica {number}; each rank has one")
    share = sum(replica.sequences for replica in plan.replicas)
    if share != plan.training.global_batch:
        raise ValueError(
            f"the replicas take {share} sequences per step, the global batch has {plan.training.global_batch}"
        )
    installed = plan.cluster.num_devices
    if min(seen) < 0 or max(seen) >= installed:
        first = min(rank for rank in seen if not 0 <= rank < installed)
        raise ValueError(f"rank {first} is outside the cluster's {installed} devices")
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
