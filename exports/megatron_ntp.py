"""Replicas that go on with fewer ranks, as Megatron-LM's nonuniform tensor parallelism states them.

    healthy replicas of tp_base ranks, reduced ones of tp_base - tp_spares; which slots of a replica are not active

Fields: megatron/core/distributed/nonuniform_tp.py of Megatron-LM's branch dev (pull request 4585) and its guide.  It
has one reduced size, equal shares of the batch, and (in the helper that takes this configuration) one pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from exports.megatron import MEGATRON, check
from exports.shape import Shape, shape_of
from specs.errors import BadInputError
from specs.plan import Plan, Replica


@dataclass(frozen=True)
class Reduced:
    """`shape` of the healthy whole; `inactive` slots by replica; the plan as if nothing were lost."""

    nominal: Plan
    shape: Shape
    spares: int
    inactive: dict[int, tuple[int, ...]]

    def configuration(self) -> str:
        """The Python expression for the training script."""
        slots = ", ".join(f"({replica}, 0, 0): {list(lost)}" for replica, lost in self.inactive.items())
        return (
            f"NonuniformTPConfig(tp_base={self.shape.tensor}, tp_spares={self.spares}, "
            f"num_reduced_tp_dp_ranks={len(self.inactive)}, non_active_ranks_per_dp={{{slots}}})"
        )


def is_damaged(plan: Plan) -> bool:
    """Whether some replicas have fewer ranks than others."""
    return len({len(replica.ranks) for replica in plan.replicas}) > 1


def reduced_of(plan: Plan) -> Reduced:
    """Raises `BadInputError` with the first thing that the configuration cannot state."""
    size = max(len(replica.ranks) for replica in plan.replicas)
    healthy = next(replica for replica in plan.replicas if len(replica.ranks) == size)
    if any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
        raise BadInputError("nonuniform tensor parallelism is configured for one pipeline stage, the plan has several")
    if len({replica.sequences for replica in plan.replicas}) > 1:
        raise BadInputError("replicas take unlike shares of the batch, Megatron-LM gives all the same")
    nominal = plan.model_copy(
        update={
            "cluster": plan.cluster.model_copy(update={"missing": ()}),
            "pipelines": (plan.pipelines[healthy.pipeline],),
            "replicas": tuple(
                Replica(pipeline=0, ranks=tuple(range(start, start + size)), sequences=healthy.sequences)
                for start in range(0, size * len(plan.replicas), size)
            ),
        }
    )
    shape = shape_of(nominal)
    if shape.tensor != size:
        raise BadInputError(f"a replica of {size} ranks has blocks of {shape.tensor}, one block is needed")
    inactive = {}
    for index, replica in enumerate(plan.replicas):
        slots = tuple(rank - index * size for rank in replica.ranks)
        if not all(0 <= slot < size for slot in slots):
            raise BadInputError(f"replica {index} is not on the ranks {index * size} to {(index + 1) * size - 1}")
        if len(slots) < size:
            inactive[index] = tuple(slot for slot in range(size) if slot not in slots)
            blocks = {p.blocks for p in plan.pipelines[replica.pipeline].chain()}
            if blocks != {(len(slots),)}:
                raise BadInputError(
                    f"replica {index} composes its {len(slots)} ranks by module, nonuniform tensor parallelism has one "
                    "degree for all"
                )
    spares = {len(lost) for lost in inactive.values()}
    if len(spares) > 1:
        raise BadInputError("replicas lost unlike numbers of ranks, one reduced size is needed")
    missing = spares.pop()
    check(replace(shape, tensor=size - missing), plan.model)
    return Reduced(nominal, shape, missing, inactive)


def write(found: Reduced) -> str:
    """Arguments of the healthy whole, and the configuration of the reduced replicas as a comment for the script."""
    lines = [
        "# Nonuniform tensor parallelism: a script of your own, see megatron/core/distributed/nonuniform_tp.py (dev):",
        f"#   {found.configuration()}",
    ]
    return MEGATRON.write(found.nominal, found.shape) + "\n".join(lines) + "\n"
