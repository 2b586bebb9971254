"""A layout in the words of engines that know one degree: TP x PP x DP (x EP), whole layers per stage.

A stage of D ranks in blocks of t holds D / t copies of every dense module, each with t / D of the micro-batch: what
Megatron-LM and torchtitan call tensor parallelism of t and data parallelism of replicas x D / t.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

from specs.errors import BadInputError
from specs.layout import balanced_cuts
from specs.model import SEQUENCE_KINDS, ModelSpec, Module, num_units
from specs.plan import ModulePlacement, Pipeline, Plan, Recompute, Replica, Schedule, Stage, Zero

# Whose ranks are neighbours: the stages of a replica, or the copies of a stage.
RankOrder = Literal["replica", "stage"]
Number = TypeVar("Number", bound=int)


@dataclass(frozen=True)
class Shape:
    """One degree for all dense modules, one for all experts, one recomputation for all layers.

    `micro_batch` in sequences of one copy; `data` copies of every dense module; `layers` of every virtual stage, in
    the order of the chain, which passes all stages `virtual` times.  The first `full_layers` of a virtual stage are
    recomputed in full, whatever `attention` and `feed_forward` say.
    """

    tensor: int
    expert: int  # ranks that share out the experts; 1 without experts
    data: int
    micro_batch: int
    num_micro_batches: int
    layers: tuple[int, ...]
    virtual: int
    schedule: Schedule
    zero: Zero
    order: RankOrder
    attention: Recompute
    feed_forward: Recompute
    full_layers: int = 0

    @property
    def pipeline(self) -> int:
        """Number of stages."""
        return len(self.layers) // self.virtual

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def global_batch(self) -> int:
        return self.data * self.micro_batch * self.num_micro_batches

    @property
    def ranks_per_stage(self) -> int:
        """Of one replica, as a plan writes it: the fewest in which dense blocks and expert blocks both end."""
        return max(self.tensor, self.expert)


def shape_of(plan: Plan) -> Shape:
    """The shape of a plan.  Raises `BadInputError` with the first thing in it that has no place in a shape."""
    pipeline = _only_pipeline(plan)
    if pipeline.context_parallel > 1:
        raise BadInputError(f"context parallelism ({pipeline.context_parallel}) is not exported yet")
    tensor, expert = _degrees(plan.model, pipeline)
    size = _one({stage.num_ranks for stage in pipeline.stages}, "numbers of ranks per stage")
    _check_even_cuts(plan, pipeline)
    copies, rest = divmod(pipeline.micro_batch * tensor, size)
    assert rest == 0, "attention blocks hold whole sequences"
    attention, feed_forward, full_layers = _recompute(plan.model, pipeline)
    return Shape(
        tensor=tensor,
        expert=expert,
        data=len(plan.replicas) * size // tensor,
        micro_batch=copies,
        num_micro_batches=plan.replicas[0].sequences // pipeline.micro_batch,
        layers=_whole_layers(pipeline),
        virtual=pipeline.num_virtual,
        schedule=pipeline.schedule,
        zero=_one({placement.zero for placement in pipeline.chain()}, "ZeRO levels"),
        order=_order(plan, pipeline, tensor),
        attention=attention,
        feed_forward=feed_forward,
        full_layers=full_layers,
    )


def loose_shape_of(plan: Plan) -> Shape | None:
    """The nearest shape: stages end at layers, ranks go stage by stage, nothing is recomputed.

    None where a plan is too unlike: several degrees, unlike replicas or stages.
    """
    pipeline = plan.pipelines[0]
    runs = _runs(pipeline)
    layers = [sum(p.module.endswith("attention") for p in run) for run in runs]
    if min(layers) < 1 or sum(layers) != plan.model.num_layers:
        layers = [stop - start for start, stop in pairwise(balanced_cuts(plan.model.num_layers, len(runs)))]
    try:
        pipeline = _only_pipeline(plan)
        tensor, expert = _degrees(plan.model, pipeline)
        size = _one({stage.num_ranks for stage in pipeline.stages}, "numbers of ranks per stage")
    except BadInputError:
        return None
    return Shape(
        tensor=tensor,
        expert=expert,
        data=len(plan.replicas) * size // tensor,
        micro_batch=pipeline.micro_batch * tensor // size,
        num_micro_batches=plan.replicas[0].sequences // pipeline.micro_batch,
        layers=tuple(layers),
        virtual=pipeline.num_virtual,
        schedule=pipeline.schedule,
        zero=max(placement.zero for placement in pipeline.chain()),
        order="stage",
        attention="none",
        feed_forward="none",
    )


def plan_of(shape: Shape, plan: Plan) -> Plan:
    """The plan of a shape, for the model, cluster and training of `plan`; without its results."""
    size = shape.ranks_per_stage
    chain = iter(plan.model.modules())
    runs = []
    start = 0
    for count, layers in zip(_chain_counts(plan.model, shape.layers), shape.layers, strict=True):
        runs.append([_placement(shape, *next(chain), first_layer=start) for _ in range(count)])
        start += layers
    stages = []
    for index in range(shape.pipeline):
        own = runs[index :: shape.pipeline]
        stages.append(
            Stage(
                num_ranks=size,
                modules=tuple(placement for run in own for placement in run),
                virtual_stages=tuple(map(len, own)) if shape.virtual > 1 else None,
            )
        )
    micro_batch = shape.micro_batch * size // shape.tensor
    return Plan(
        made=plan.made,
        model=plan.model,
        cluster=plan.cluster,
        training=plan.training,
        memory_cap_bytes=plan.memory_cap_bytes,
        pipelines=(Pipeline(micro_batch=micro_batch, stages=tuple(stages), schedule=shape.schedule),),
        replicas=tuple(
            Replica(pipeline=0, ranks=row, sequences=micro_batch * shape.num_micro_batches)
            for row in _ranks(plan, size, shape.pipeline, shape.order)
        ),
    )


def _placement(shape: Shape, name: str, module: Module, *, first_layer: int) -> ModulePlacement:
    """`first_layer`: of the virtual stage."""
    degree = shape.expert if module.kind == "moe" else shape.tensor
    mode = shape.attention if module.kind in SEQUENCE_KINDS else shape.feed_forward
    if module.kind in ("embedding", "head"):
        mode = "none"
    elif int(name.split(".")[1]) < first_layer + shape.full_layers:
        mode = "full"
    return ModulePlacement(
        module=name, blocks=(degree,) * (shape.ranks_per_stage // degree), recompute=mode, zero=shape.zero
    )


def recompute(shape: Shape) -> str:
    """In words: `no recompute`, `full recompute of the first 7 layers of a stage`."""
    if shape.full_layers:
        return f"full recompute of the first {shape.full_layers} layers of a stage"
    parts = [(shape.attention, "attention"), (shape.feed_forward, "feed-forward parts")]
    told = [f"{mode} of {what}" for mode, what in parts if mode != "none"]
    return f"recompute {' and '.join(told)}" if told else "no recompute"


def memory_limit(plan: Plan) -> int:
    """What a rank may fill: the cap, or the smallest device's memory; bytes."""
    cluster = plan.cluster
    smallest = min(cluster.devices[group.device].memory_bytes for group in cluster.nodes)
    return smallest if plan.memory_cap_bytes is None else min(plan.memory_cap_bytes, smallest)


def _only_pipeline(plan: Plan) -> Pipeline:
    if len({(replica.pipeline, replica.sequences) for replica in plan.replicas}) > 1:
        raise BadInputError("the plan's replicas differ in pipeline or share of the batch, equal ones are needed")
    return plan.pipelines[plan.replicas[0].pipeline]


def _runs(pipeline: Pipeline) -> list[tuple[ModulePlacement, ...]]:
    """Placements of every virtual stage, in the order of the chain."""
    own = [stage.runs() for stage in pipeline.stages]
    return [runs[turn] for turn in range(pipeline.num_virtual) for runs in own]


def _degrees(model: ModelSpec, pipeline: Pipeline) -> tuple[int, int]:
    """Of all dense modules, and of all experts (1 without)."""
    kinds = dict(model.modules())
    dense: dict[str, set[int]] = {}
    experts: set[int] = set()
    for placement in pipeline.chain():
        kind = kinds[placement.module].kind
        (experts if kind == "moe" else dense.setdefault(kind, set())).update(placement.blocks)
    degrees = set[int]().union(*dense.values())
    if len(degrees) > 1:
        told = ", ".join(f"{kind} {_listed(sorted(found))}" for kind, found in dense.items())
        raise BadInputError(f"the plan mixes tensor-parallel degrees ({told}), one is needed")
    if len(experts) > 1:
        raise BadInputError(f"the plan mixes degrees of experts ({_listed(sorted(experts))}), one is needed")
    tensor, expert = degrees.pop(), (experts.pop() if experts else 1)
    if max(tensor, expert) % min(tensor, expert):
        raise BadInputError(f"experts in blocks of {expert} beside dense modules in blocks of {tensor} do not nest")
    return tensor, expert


def _listed(values: Iterable[int]) -> str:
    return " and ".join(map(str, values))


def _one(found: set[Number], what: str) -> Number:
    if len(found) > 1:
        raise BadInputError(f"the plan has several {what} ({_listed(sorted(found))}), one is needed")
    return next(iter(found))


def _check_even_cuts(plan: Plan, pipeline: Pipeline) -> None:
    kinds = dict(plan.model.modules())
    tokens = pipeline.micro_batch * plan.training.seq_len
    for index, stage in enumerate(pipeline.stages):
        if stage.token_cuts not in (None, balanced_cuts(tokens, stage.num_ranks)):
            raise BadInputError(f"the tokens of stage {index} are cut unevenly, equal shares are needed")
        for placement in stage.modules:
            units = num_units(kinds[placement.module])
            if placement.cuts is not None and any(
                cuts != balanced_cuts(units, block)
                for cuts, block in zip(placement.cuts, placement.blocks, strict=True)
            ):
                raise BadInputError(f"{placement.module} is cut unevenly, equal shares are needed")


def _chain_counts(model: ModelSpec, layers: Iterable[int]) -> list[int]:
    """Modules per stage for whole layers per stage; the embedding is in the first, the head in the last."""
    sizes: list[int] = []
    for layer in model.layers:
        parts = (layer.attention, layer.mamba, layer.feed_forward)
        sizes += [sum(part is not None for part in parts)] * layer.repeat
    counts, start = [], 0
    for number in layers:
        counts.append(sum(sizes[start : start + number]))
        start += number
    counts[0] += 1
    counts[-1] += 1
    return counts


def _whole_layers(pipeline: Pipeline) -> tuple[int, ...]:
    runs = _runs(pipeline)
    layers = [len({p.module.split(".")[1] for p in run if p.module.startswith("layer.")}) for run in runs]
    for before, after in pairwise(runs):
        last, first = before[-1].module.split("."), after[0].module.split(".")
        if last[:2] == first[:2] or first[0] == "head" or last[0] == "embedding":
            raise BadInputError(
                f"the plan begins a stage at {after[0].module}; stages of whole layers are needed, the embedding with "
                "the first and the head with the last"
            )
    return tuple(layers)


def _recompute(model: ModelSpec, pipeline: Pipeline) -> tuple[Recompute, Recompute, int]:
    """Of attention, of the feed-forward part, and how many first layers of every virtual stage are redone in full."""
    kinds = dict(model.modules())
    if any(placement.recompute != "none" for placement in pipeline.chain() if placement.module == "head"):
        raise BadInputError("the plan recomputes the head, which is not done elsewhere")
    kept = sum(placement.recompute == "keep" for placement in pipeline.chain())
    if kept:
        raise BadInputError(
            f"the plan keeps gathered inputs of {kept} modules for backward (recompute keep), for which others have no "
            "switch; plan with --forbid '*.recompute=keep'"
        )
    stages: list[list[set[Recompute]]] = []  # of every virtual stage, layer by layer
    of_kind: dict[str, set[Recompute]] = {"attention": set(), "feed-forward parts": set()}
    for run in _runs(pipeline):
        layers: dict[str, set[Recompute]] = {}
        for placement in run:
            if placement.module.startswith("layer."):
                layers.setdefault(placement.module.split(".")[1], set()).add(placement.recompute)
                what = "attention" if kinds[placement.module].kind in SEQUENCE_KINDS else "feed-forward parts"
                of_kind[what].add(placement.recompute)
        stages.append(list(layers.values()))
    if all(len(found) <= 1 for found in of_kind.values()):
        attention, feed_forward = ([*found, "none"][0] for found in of_kind.values())
        return attention, feed_forward, 0
    first = max(sum(layer == {"full"} for layer in layers) for layers in stages)
    expected = [[{"full"}] * min(first, len(layers)) + [{"none"}] * (len(layers) - first) for layers in stages]
    if stages != expected:
        told = "; ".join(f"{what} {', '.join(sorted(found))}" for what, found in of_kind.items())
        raise BadInputError(f"the plan recomputes some layers and not others ({told}), one way is needed")
    return "none", "none", first


def _ranks(plan: Plan, size: int, num_stages: int, order: RankOrder) -> list[tuple[int, ...]]:
    """Ranks of every replica of stages of `size`, in stage order."""
    usable = plan.cluster.ranks()
    num_replicas = len(usable) // (size * num_stages)
    rows = []
    for replica in range(num_replicas):
        if order == "replica":
            places = range(replica * size * num_stages, (replica + 1) * size * num_stages)
            rows.append(tuple(usable[place] for place in places))
        else:
            starts = [(stage * num_replicas + replica) * size for stage in range(num_stages)]
            rows.append(tuple(usable[start + rank] for start in starts for rank in range(size)))
    return rows


def _order(plan: Plan, pipeline: Pipeline, tensor: int) -> RankOrder:
    """Stage order where both are the same.  Replica order needs that a replica has one copy of its modules."""
    found = [replica.ranks for replica in plan.replicas]
    size, num_stages = pipeline.stages[0].num_ranks, len(pipeline.stages)
    if found == _ranks(plan, size, num_stages, "stage"):
        return "stage"
    if found == _ranks(plan, size, num_stages, "replica") and size == tensor:
        return "replica"
    raise BadInputError(
        f"the plan puts the stages of a replica side by side, each with {size // tensor} copies; elsewhere all copies "
        "of a stage are side by side"
    )
