"""How much slower a stage becomes when it goes on with fewer ranks: whole heads, whole sequences, real blocks.

Two ways are priced.  "ntp": the block that lost a rank keeps its place with fewer ranks (nonuniform tensor
parallelism, arXiv 2504.06095).  "composed": every module is composed anew from blocks of the surviving ranks, of
any sizes, as memory allows; the attention modules of the stage agree on token cuts that keep sequences whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from cost_models.activations import activation_bytes
from cost_models.flops import largest_units, matrix_flop, score_backward_ratio, score_flop
from cost_models.share import Share
from specs.layout import balanced_cuts, block_starts, sequence_token_cuts
from specs.model import SEQUENCE_KINDS, Module
from specs.plan import Plan, Stage
from specs.schedule import most_held
from specs.tensors import local_num_elements

Reduction = Literal["ntp", "composed"]
Blocks = tuple[int, ...]

# Per element: bf16 weights 2, fp32 gradients 4, fp32 master weights and two moments 12.  What the replicas do not
# shard between them: ZeRO-1 shards the last, ZeRO-2 the gradients too, ZeRO-3 everything.
STATE_BYTES = 18
REPLICATED_BYTES = {0: 18, 1: 6, 2: 2, 3: 0}


@dataclass(frozen=True, slots=True)
class StageWork:
    """One stage: distinct (module, healthy blocks) with their number, and what limits its rearrangement.

    `communication_share` is the part of a healthy stage's time that gathers and scatters take.  `free_bytes` is what
    a rank has beyond the healthy static state, None when unknown (then memory does not limit).  `droppable` are the
    bytes that one module of each entry would not keep if it were recomputed in full (empty: not known, not tried).
    State that is not `replicated_bytes` per element is divided among `shards` replicas.
    """

    modules: tuple[tuple[Module, Blocks, int], ...]
    num_ranks: int
    micro_batch: int
    seq_len: int
    communication_share: float
    free_bytes: float | None = None
    activation_bytes: float = 0.0
    shards: int = 1
    replicated_bytes: int = 6
    droppable: tuple[float, ...] = ()


def stage_work(plan: Plan, stage: Stage, *, communication_share: float, micro_batch: int) -> StageWork:
    """The work of one stage of the first replica; the memory limit follows from its prediction."""
    by_name = dict(plan.model.modules())
    counts = Counter((by_name[item.module], item.blocks) for item in stage.modules)
    zero = min(item.zero for item in stage.modules)
    index = plan.pipelines[plan.replicas[0].pipeline].stages.index(stage)
    kept, droppable = _kept(plan, index, micro_batch, tuple(counts))
    free: float | None = None
    activations = 0.0
    if plan.predicted is not None:
        activations = sum(kept) + plan.predicted.peak_memory_terms.working
        device = plan.cluster.device_of(plan.replicas[0].ranks[0])
        cap = plan.memory_cap_bytes if plan.memory_cap_bytes is not None else device.memory_bytes
        free = float(cap - plan.predicted.stage_memory_bytes[index])
    return StageWork(
        modules=tuple((module, blocks, count) for (module, blocks), count in counts.items()),
        num_ranks=stage.num_ranks,
        micro_batch=micro_batch,
        seq_len=plan.training.seq_len,
        communication_share=communication_share,
        free_bytes=free,
        activation_bytes=activations,
        shards=len(plan.replicas),
        replicated_bytes=REPLICATED_BYTES[zero],
        droppable=droppable,
    )


def _kept(
    plan: Plan, index: int, micro_batch: int, entries: tuple[tuple[Module, Blocks], ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For every entry the bytes that its modules keep for backward, and what one of them, on average over its recompute
    modes, would not keep if it were recomputed in full; of all micro-batches in flight (1F1B's, or all with GPipe).
    """
    pipeline = plan.pipelines[plan.replicas[0].pipeline]
    stage, number = pipeline.stages[index], plan.replicas[0].sequences // micro_batch
    flight: float = number if pipeline.schedule == "gpipe" else min(number, len(pipeline.stages) - index)
    if pipeline.schedule == "interleaved":
        flight = max(sum(held.kept) for held in most_held(pipeline.stage_actions(number)[index])) / pipeline.num_virtual
    by_name = dict(plan.model.modules())
    precision, seq_len = plan.training.precision, plan.training.seq_len
    kept, droppable = [], []
    for module, blocks in entries:
        share = Share.of(module, max(blocks), micro_batch * seq_len * max(blocks) // stage.num_ranks, seq_len)
        modes = [p.recompute for p in stage.modules if (by_name[p.module], p.blocks) == (module, blocks)]
        all_of_them = flight * sum(activation_bytes(module, share, precision, mode) for mode in modes)
        least = flight * activation_bytes(module, share, precision, "full")
        kept.append(float(all_of_them))
        droppable.append(max(0.0, all_of_them / len(modes) - least))
    return tuple(kept), tuple(droppable)


@lru_cache(maxsize=4096)
def slowdown(work: StageWork, survivors: int, how: Reduction, boost: float = 1.0) -> float:
    """Stage time with `survivors` ranks over the healthy stage time; infinite when it cannot run or does not fit.

    `boost`: clock of the ranks of a damaged stage over nominal; compute speeds up by it, communication does not.

    # slowdown = (F(n) / boost + k V(n)) / (F(D) + k V(D)),    k V(D) = c / (1 - c) F(D)
    #   F largest rank's operations (matrix products 3 x forward, scores 3.5 x), V bytes gathered and scattered per
    #   rank: (size - 1) / size x tokens of the block; c communication share
    #   leaves out: slower matrix products at smaller sizes, norms, the reduced optimizer share
    """
    if survivors >= work.num_ranks:
        return 1.0
    if survivors < 1:
        return math.inf
    even = balanced_cuts(work.micro_batch * work.seq_len, work.num_ranks)
    healthy = [_cost(module, blocks, even, work.seq_len) for module, blocks, _ in work.modules]
    counts = [count for _, _, count in work.modules]
    flop = sum(count * cost[0] for count, cost in zip(counts, healthy, strict=True))
    moved = sum(count * cost[1] for count, cost in zip(counts, healthy, strict=True))
    share = work.communication_share if moved > 0.0 else 0.0
    per_token = share / (1.0 - share) * flop / moved if moved > 0.0 else 0.0
    now = min(
        (_layout_cost(work, layout, per_token, boost) for layout in _layouts(work, survivors, how)),
        default=math.inf,
    )
    return now / (flop / (1.0 - share))


Layout = tuple[tuple[int, ...], tuple[tuple[Blocks, ...], ...]]


def _layouts(work: StageWork, survivors: int, how: Reduction) -> Iterable[Layout]:
    """(token cuts, for each module the blocks it may take) for every way to keep sequences whole."""
    if how == "ntp":
        blocks_of = [_shrunk(blocks, work.num_ranks - survivors) for _, blocks, _ in work.modules]
        attention = next(
            (b for (m, _, _), b in zip(work.modules, blocks_of, strict=True) if m.kind in SEQUENCE_KINDS), None
        )
        cuts = _cuts(attention, survivors, work)
        if cuts is not None:
            yield cuts, tuple((blocks,) for blocks in blocks_of)
        return
    free = candidates(survivors)
    has_attention = any(module.kind in SEQUENCE_KINDS for module, _, _ in work.modules)
    for attention in free if has_attention else (None,):
        cuts = _cuts(attention, survivors, work)
        if cuts is not None:
            yield (
                cuts,
                tuple(
                    (attention,) if module.kind in SEQUENCE_KINDS and attention else free
                    for module, _, _ in work.modules
                ),
            )


def _cuts(attention: Blocks | None, survivors: int, work: StageWork) -> tuple[int, ...] | None:
    if attention is None:
        return balanced_cuts(work.micro_batch * work.seq_len, survivors)
    return sequence_token_cuts(attention, work.micro_batch, work.seq_len)


def _layout_cost(work: StageWork, layout: Layout, per_token: float, boost: float) -> float:
    """Least cost under given token cuts: each module takes its cheapest blocks; if that does not fit, larger ones, or
    it is recomputed: its forward pass, a third of its operations and half of its communication, once more.
    """
    cuts, allowed = layout
    total, extra = 0.0, 0.0
    survivors = len(cuts) - 1
    more_tokens = work.num_ranks / survivors
    chosen: list[tuple[Module, int, list[tuple[float, float]]]] = []
    droppable = work.droppable or (0.0,) * len(work.modules)
    for (module, blocks, count), options, drop in zip(work.modules, allowed, droppable, strict=True):
        priced = []
        before = _static_bytes(work, module, blocks)
        for option in options:
            if max(option) > _units(module):
                continue
            flop, moved = _cost(module, option, cuts, work.seq_len)
            bytes_more = _static_bytes(work, module, option) - before
            priced.append((flop / boost + per_token * moved, bytes_more))
            if drop:
                again = flop / boost * 4.0 / 3.0 + per_token * moved * 1.5
                priced.append((again, bytes_more - drop * more_tokens))
        if not priced:
            return math.inf
        priced.sort()
        chosen.append((module, count, priced))
        total += count * priced[0][0]
        extra += count * priced[0][1]
    if work.free_bytes is None:
        return total
    room = work.free_bytes - work.activation_bytes * (more_tokens - 1.0)
    # Too much: give modules of the kind with the cheapest saving per byte a smaller option, as many as are needed.
    position = [0] * len(chosen)
    while extra > room:
        best: tuple[float, int, int] | None = None
        for index, (_, _, priced) in enumerate(chosen):
            here = priced[position[index]]
            for step in range(position[index] + 1, len(priced)):
                saved = here[1] - priced[step][1]
                if saved > 0:
                    price = (priced[step][0] - here[0]) / saved
                    if best is None or price < best[0]:
                        best = (price, index, step)
        if best is None:
            return math.inf
        _, index, step = best
        _, count, priced = chosen[index]
        here, there = priced[position[index]], priced[step]
        number = min(count, math.ceil((extra - room) / (here[1] - there[1])))
        total += number * (there[0] - here[0])
        extra += number * (there[1] - here[1])
        position[index] = step
        if number < count:
            break
    return total


@lru_cache(maxsize=65536)
def _cost(module: Module, blocks: Blocks, cuts: tuple[int, ...], seq_len: int) -> tuple[float, float]:
    """(operations of the busiest rank, tokens x (size - 1) / size that the busiest rank moves)."""
    starts = block_starts(blocks)
    flop, moved = 0.0, 0.0
    for block, size in enumerate(blocks):
        tokens = cuts[starts[block + 1]] - cuts[starts[block]]
        units = largest_units(module, size)
        matrix = 3.0 * matrix_flop(module, tokens, units)
        scores = (1.0 + score_backward_ratio(module)) * score_flop(module, tokens, seq_len, units)
        flop = max(flop, matrix + scores)
        moved = max(moved, tokens * (size - 1) / size * module.hidden)
    return flop, moved


def _units(module: Module) -> int:
    return largest_units(module, 1).size


@lru_cache(maxsize=65536)
def _elements(module: Module, blocks: Blocks) -> int:
    """Of the fullest rank."""
    return local_num_elements(module, largest_units(module, min(blocks)))


def _static_bytes(work: StageWork, module: Module, blocks: Blocks) -> float:
    """Weights, gradients and optimizer of the fullest rank."""
    sharded = (STATE_BYTES - work.replicated_bytes) / work.shards
    return _elements(module, blocks) * (work.replicated_bytes + sharded)


def _shrunk(blocks: Blocks, lost: int) -> Blocks:
    """The blocks after `lost` ranks went from the last ones."""
    left = list(blocks)
    while lost > 0:
        taken = min(lost, left[-1])
        left[-1] -= taken
        lost -= taken
        if left[-1] == 0:
            left.pop()
    return tuple(left)


@lru_cache(maxsize=256)
def candidates(num_ranks: int) -> tuple[Blocks, ...]:
    """Compositions worth trying: as even as can be into k blocks, and as many of size d as fit with the rest as one."""
    found: dict[Blocks, None] = {}
    for parts in range(1, num_ranks + 1):
        small, more = divmod(num_ranks, parts)
        found[(small + 1,) * more + (small,) * (parts - more)] = None
    for size in range(2, num_ranks):
        whole, rest = divmod(num_ranks, size)
        if rest:
            found[(size,) * whole + (rest,)] = None
            found[(size,) * (whole - 1) + (size + rest,)] = None
    return tuple(found)
