"""From a plan and a contingency to the plan that runs on: which old rank plays which part, and who gets which share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specs.errors import BadInputError
from specs.plan import Contingency, Pipeline, Plan, Replica


def find_contingency(plan: Plan, lost: int) -> Contingency | None:
    """The plan's contingency for the loss of one rank; None when it has to be solved."""
    for contingency in plan.contingencies:
        if lost in contingency.equivalent or contingency.lost == (lost,):
            return contingency
    return None


def plan_after(plan: Plan, contingency: Contingency, lost: int | None = None) -> Plan:
    """The plan that runs on; its ranks are the old ones, so process i of it is old rank `processes(...)[i]`.

    `lost`: the rank that is really gone, one of `contingency.equivalent`; None: those that it was solved for.
    Raises `BadInputError` for a rank that the contingency does not stand for.
    """
    names: dict[int, int] = {}
    gone = contingency.lost
    sequences = list(contingency.sequences)
    if lost is not None and (lost,) != gone:
        if lost not in contingency.equivalent or len(gone) != 1:
            raise BadInputError(
                f"the contingency for rank {gone[0]} does not stand for rank {lost}. Solve that loss anew."
            )
        example, actual = _replica_of(plan, gone[0]), _replica_of(plan, lost)
        before = [rank for rank in plan.replicas[example].ranks if rank != gone[0]]
        now = [rank for rank in plan.replicas[actual].ranks if rank != lost]
        names = dict(zip(before, now, strict=True))
        sequences[example], sequences[actual] = sequences[actual], sequences[example]
        gone = (lost,)
    stand_ins = [
        replica.model_copy(update={"ranks": tuple(names.get(rank, rank) for rank in replica.ranks)})
        for replica in contingency.replicas
    ]
    return remade(
        plan,
        gone,
        sequences=sequences,
        pipelines=contingency.pipelines,
        replaced=contingency.replaced,
        stand_ins=stand_ins,
        global_batch=contingency.global_batch,
    ).with_results(predicted=contingency.predicted)


def processes(plan: Plan) -> tuple[int, ...]:
    """Ranks of the plan in the order of the executor's processes: process i is rank `processes(plan)[i]`."""
    return tuple(sorted(rank for replica in plan.replicas for rank in replica.ranks))


def _replica_of(plan: Plan, rank: int) -> int:
    return next(index for index, replica in enumerate(plan.replicas) if rank in replica.ranks)


def remade(
    plan: Plan,
    lost: Sequence[int],
    *,
    sequences: Sequence[int],
    pipelines: Sequence[Pipeline],
    replaced: Mapping[int, int],
    stand_ins: Sequence[Replica],
    global_batch: int,
) -> Plan:
    """The plan without its lost ranks.  `sequences` of every replica: those with 0 go, `stand_ins` take their place.

    `pipelines` are counted after the plan's own, of which some are `replaced`; those that no replica names are left
    out.
    """
    replicas: list[Replica] = []
    waiting = [*stand_ins]
    for replica, share in zip(plan.replicas, sequences, strict=True):
        if share:
            number = replaced.get(replica.pipeline, replica.pipeline)
            replicas.append(replica.model_copy(update={"pipeline": number, "sequences": share}))
        else:
            replicas += waiting
            waiting = []
    used = sorted({replica.pipeline for replica in replicas})
    every = (*plan.pipelines, *pipelines)
    return Plan(
        made=plan.made,
        model=plan.model,
        cluster=plan.cluster.model_copy(update={"missing": tuple(sorted({*plan.cluster.missing, *lost}))}),
        training=plan.training.model_copy(update={"global_batch": global_batch}),
        memory_cap_bytes=plan.memory_cap_bytes,
        pipelines=tuple(every[number] for number in used),
        replicas=tuple(r.model_copy(update={"pipeline": used.index(r.pipeline)}) for r in replicas),
    )
