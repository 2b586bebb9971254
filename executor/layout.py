"""A plan seen from one rank: its replica, stage, chunk of tokens, blocks, and who else holds its weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from specs.errors import BadInputError
from specs.layout import Cuts, Interval, block_of, block_starts, interval_of
from specs.model import Attention, Module
from specs.plan import ModulePlacement, Pipeline, Plan, Replica, Stage
from specs.tensors import TensorSpec, local_rows, parameter_name, tensors_of


@dataclass(frozen=True)
class ModuleLayout:
    """One module on one rank.  `block_ranks` are process ranks; token counts are those of their chunks.

    `context_ranks`: the ranks at the same place in the blocks that share this one's sequence, `context_counts` tokens
    of those blocks; one of each unless attention's blocks share sequences.  `context`: the pipeline's degree.
    """

    name: str
    module: Module
    placement: ModulePlacement
    units: Interval
    unit_cuts: Cuts  # of the whole block
    block_ranks: tuple[int, ...]
    position: int
    token_counts: tuple[int, ...]
    block_tokens: Interval  # of the micro-batch's token list
    context: int = 1
    context_ranks: tuple[int, ...] = ()
    context_position: int = 0
    context_counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Holding:
    """Elements of one global tensor (row-major) that a process holds because of one module."""

    process: int
    elements: Interval


class Channel(NamedTuple):
    """Chunks go from the processes of one stage to those of another: activations (F) or gradients (B)."""

    kind: Literal["F", "B"]
    source: tuple[int, ...]
    target: tuple[int, ...]


class Layout:
    """Where a process stands in a plan.  Processes are the plan's ranks in ascending order."""

    def __init__(self, plan: Plan, process: int) -> None:
        self.plan = plan
        self.process = process
        self._chain = dict(plan.model.modules())
        ranks = sorted(rank for replica in plan.replicas for rank in replica.ranks)
        self._process_of = {rank: index for index, rank in enumerate(ranks)}
        rank = ranks[process]
        self.replica_index = next(i for i, replica in enumerate(plan.replicas) if rank in replica.ranks)
        self.stage_index, self.position = block_of(
            [stage.num_ranks for stage in self.pipeline.stages], self.replica.ranks.index(rank)
        )

    @property
    def replica(self) -> Replica:
        return self.plan.replicas[self.replica_index]

    @property
    def pipeline(self) -> Pipeline:
        return self.plan.pipelines[self.replica.pipeline]

    @property
    def stage(self) -> Stage:
        return self.pipeline.stages[self.stage_index]

    @property
    def is_first_stage(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_index == len(self.pipeline.stages) - 1

    @property
    def num_micro_batches(self) -> int:
        return self.replica.sequences // self.pipeline.micro_batch

    @property
    def first_sequence(self) -> int:
        """Position of the replica's first sequence in the global batch."""
        return sum(replica.sequences for replica in self.plan.replicas[: self.replica_index])

    def stage_processes(self, stage: int, replica: Replica | None = None) -> tuple[int, ...]:
        """Process ranks of a stage, in chunk order."""
        replica = self.replica if replica is None else replica
        starts = self.plan.pipelines[replica.pipeline].stage_starts()
        return tuple(self._process_of[rank] for rank in replica.ranks[starts[stage] : starts[stage + 1]])

    def chunk_cuts(self, stage: int) -> Cuts:
        """Token cut points of a stage of this replica for one micro-batch."""
        return self.pipeline.stages[stage].chunk_cuts(self.pipeline.micro_batch * self.plan.training.seq_len)

    @property
    def chunk(self) -> Interval:
        """This rank's tokens of a micro-batch."""
        return interval_of(self.chunk_cuts(self.stage_index), self.position)

    @cached_property
    def modules(self) -> tuple[ModuleLayout, ...]:
        """This rank's modules, in order."""
        return tuple(module for run in self.runs for module in run)

    @cached_property
    def runs(self) -> tuple[tuple[ModuleLayout, ...], ...]:
        """The modules of each of this rank's virtual stages."""
        return tuple(tuple(map(self._module_layout, run)) for run in self.stage.runs())

    def _module_layout(self, placement: ModulePlacement) -> ModuleLayout:
        module = self._chain[placement.module]
        cuts = self.chunk_cuts(self.stage_index)
        block, position = block_of(placement.blocks, self.position)
        starts = block_starts(placement.blocks)
        start, stop = starts[block : block + 2]
        sharing: tuple[int, ...] = (block,)
        if isinstance(module, Attention):
            num_tokens = self.pipeline.micro_batch * self.plan.training.seq_len
            groups = self.stage.sharing_blocks(placement, num_tokens, self.plan.training.seq_len)
            sharing = next(group for group in groups if block in group)
        processes = self.stage_processes(self.stage_index)
        return ModuleLayout(
            name=placement.module,
            module=module,
            placement=placement,
            units=placement.units_of(self.position, module),
            unit_cuts=placement.block_cuts(block, module),
            block_ranks=processes[start:stop],
            position=position,
            token_counts=tuple(cuts[i + 1] - cuts[i] for i in range(start, stop)),
            block_tokens=Interval(cuts[start], cuts[stop]),
            context=self.pipeline.context_parallel,
            context_ranks=tuple(processes[starts[other] + position] for other in sharing),
            context_position=sharing.index(block),
            context_counts=tuple(cuts[starts[other + 1]] - cuts[starts[other]] for other in sharing),
        )

    def boundary_transfers(self, other_stage: int) -> list[tuple[int, Interval]]:
        """(process, tokens relative to this rank's chunk) for each overlap with another stage's chunks."""
        own, cuts = self.chunk, self.chunk_cuts(other_stage)
        transfers = []
        for position, process in enumerate(self.stage_processes(other_stage)):
            common = own.overlap(interval_of(cuts, position))
            if common.size > 0:
                transfers.append((process, common.shifted(-own.start)))
        return transfers

    def all_blocks(self) -> Iterator[tuple[int, ...]]:
        """Every block of several processes and every group that exchanges keys and values, anywhere in the plan."""
        for replica in self.plan.replicas:
            for index, stage in enumerate(self.plan.pipelines[replica.pipeline].stages):
                processes = self.stage_processes(index, replica)
                for placement in stage.modules:
                    starts = block_starts(placement.blocks)
                    for start, stop in pairwise(starts):
                        if stop - start > 1:
                            yield processes[start:stop]
                    if isinstance(self._chain[placement.module], Attention):
                        yield from _sharing_ranks(self.plan, replica, stage, placement, processes)

    def all_channels(self) -> Iterator[Channel]:
        """Every pair of stages of which one sends to the other, forward or backward, anywhere in the plan."""
        for replica in self.plan.replicas:
            pipeline = self.plan.pipelines[replica.pipeline]
            num_stages = len(pipeline.stages)
            for place in range(num_stages * pipeline.num_virtual - 1):
                here = self.stage_processes(place % num_stages, replica)
                there = self.stage_processes((place + 1) % num_stages, replica)
                yield Channel("F", here, there)
                yield Channel("B", there, here)


def _sharing_ranks(
    plan: Plan, replica: Replica, stage: Stage, placement: ModulePlacement, processes: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Processes that exchange keys and values, because their blocks share a sequence."""
    seq_len = plan.training.seq_len
    num_tokens = plan.pipelines[replica.pipeline].micro_batch * seq_len
    starts = block_starts(placement.blocks)
    for blocks in stage.sharing_blocks(placement, num_tokens, seq_len):
        for position in range(placement.blocks[blocks[0]] if len(blocks) > 1 else 0):
            yield tuple(processes[starts[block] + position] for block in blocks)


@dataclass(frozen=True)
class TensorHoldings:
    """All holders of one global tensor; `module` is the first that has it."""

    tensor: TensorSpec
    module: str
    zero: int
    holdings: tuple[Holding, ...]


def tensor_holdings(plan: Plan) -> dict[str, TensorHoldings]:
    """For every global tensor: which process holds which elements, in chain order of first appearance.

    Raises `BadInputError` when replicas disagree on the optimizer sharding of a module.
    """
    layout = Layout(plan, 0)
    found: defaultdict[str, list[tuple[ModulePlacement, tuple[int, ...]]]] = defaultdict(list)
    for replica in plan.replicas:
        for index, stage in enumerate(plan.pipelines[replica.pipeline].stages):
            processes = layout.stage_processes(index, replica)
            for placement in stage.modules:
                found[placement.module].append((placement, processes))
    holdings: defaultdict[str, list[Holding]] = defaultdict(list)
    tensors: dict[str, tuple[TensorSpec, str, int]] = {}
    for name, module in plan.model.modules():
        for tensor in tensors_of(module):
            key = parameter_name(name, module, tensor)
            width = max(tensor.cols, 1)
            for placement, processes in found[name]:
                *_, zero = tensors.setdefault(key, (tensor, name, placement.zero))
                if zero != placement.zero:
                    raise BadInputError(
                        f"{key}: optimizer sharding is {zero} in one place and {placement.zero} in another; "
                        "all copies of a tensor (tied ones too) need the same `zero`"
                    )
                for position, process in enumerate(processes):
                    rows = local_rows(module, tensor, placement.units_of(position, module))
                    holdings[key].append(Holding(process, Interval(rows.start * width, rows.stop * width)))
    return {key: TensorHoldings(*tensors[key], tuple(holdings[key])) for key in tensors}
