"""State that outlives a generation of workers: what each one's memory holds, and its way to the new owners.

Weights (in master precision) and both moments are told apart by intervals of each tensor's row-major elements, as in
a checkpoint.  Every member announces what it holds and what it needs; each element goes from one holder, itself if
it is one, to everyone who needs it.  An element that nobody holds makes the memory of no use: then a checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from executor.buckets import Bucket
from executor.engine import Engine
from specs.layout import Interval, refine

NUM_KINDS = 3  # weight, exp_avg, exp_avg_sq
Parts = list[tuple[Interval, tuple[torch.Tensor, ...]]]  # elements, and each kind's values


@dataclass
class Held:
    """The state of one step as far as this worker has it, by tensor."""

    step: int
    parts: Mapping[str, Parts]


def _segments(engine: Engine) -> Iterator[tuple[str, Interval, tuple[torch.Tensor, ...]]]:
    """(tensor, elements, views of each kind) of everything this rank optimises."""
    for bucket in engine.sync.buckets:
        kinds = _kinds(engine, bucket)
        for piece in bucket.layout.pieces:
            mine = Interval(piece.offset, piece.offset + piece.elements.size).overlap(bucket.segment)
            if mine.size > 0:
                where = slice(*mine.shifted(-bucket.segment.start))
                elements = mine.shifted(piece.elements.start - piece.offset)
                yield piece.tensor, elements, tuple(values[where] for values in kinds)


def _kinds(engine: Engine, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    state = engine.optimizer.adam.state[bucket.master]
    return bucket.master.detach(), state["exp_avg"], state["exp_avg_sq"]


def hold(engine: Engine, step: int) -> Held:
    """What this rank has of the state after `step`; on a GPU a copy on the host, for the next plan needs the room."""
    parts: defaultdict[str, Parts] = defaultdict(list)
    for tensor, elements, values in _segments(engine):
        parts[tensor].append((elements, tuple(v.cpu() for v in values)))
    return Held(step, dict(parts))


@dataclass(frozen=True)
class Outcome:
    """`step` of the state taken over; None when `missing` elements (of `example`, say) are held by nobody."""

    step: int | None
    missing: int
    example: str


def take_over(engine: Engine, held: Held | None) -> Outcome:
    """Fill the engine from what all members hold; a collective.  Nothing is changed when an element is missing."""
    needed: defaultdict[str, list[Interval]] = defaultdict(list)
    targets: defaultdict[str, Parts] = defaultdict(list)
    for tensor, elements, values in _segments(engine):
        needed[tensor].append(elements)
        targets[tensor].append((elements, values))
    had = {} if held is None else {name: [elements for elements, _ in parts] for name, parts in held.parts.items()}
    mine = (-1 if held is None else held.step, had, dict(needed))
    everyone: list[tuple[int, dict[str, list[Interval]], dict[str, list[Interval]]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    step = max(newest for newest, _, _ in everyone)
    have = [{} if newest != step else parts for newest, parts, _ in everyone]
    need = [parts for _, _, parts in everyone]
    names = sorted({name for parts in need for name in parts})
    routes = {name: _routes([h.get(name, []) for h in have], [n.get(name, []) for n in need]) for name in names}
    missing = sum(route.missing for route in routes.values())
    example = next((name for name in names if routes[name].missing), "")
    if step < 0 or missing:
        return Outcome(None, missing, example)
    for name in names:
        parts = [] if held is None else held.parts.get(name, [])
        _move(routes[name], parts, targets[name], torch.promote_types(engine.dtype, torch.float32), engine.device)
    for bucket in engine.sync.buckets:
        bucket.reset_weights()
    engine.sync.gather_weights()
    engine.optimizer.set_steps(step)
    return Outcome(step, 0, "")


@dataclass
class _Routes:
    """Which elements go from whom to whom, in one order that all members know."""

    moves: list[tuple[int, int, Interval]]  # source, destination, elements
    missing: int


def _routes(have: Sequence[Sequence[Interval]], need: Sequence[Sequence[Interval]]) -> _Routes:
    """One tensor's moves; `have` and `need` by process."""
    routes = _Routes([], 0)
    for atom in refine(interval for intervals in (*have, *need) for interval in intervals):
        holders = [process for process, intervals in enumerate(have) if _covers(intervals, atom)]
        takers = [process for process, intervals in enumerate(need) if _covers(intervals, atom)]
        if takers and not holders:
            routes.missing += atom.size
            continue
        for number, taker in enumerate(takers):
            # Takers are dealt out to holders in turn, so that no single one sends everything.
            source = taker if taker in holders else holders[number % len(holders)]
            routes.moves.append((source, taker, atom))
    return routes


def _covers(intervals: Sequence[Interval], atom: Interval) -> bool:
    return any(i.start <= atom.start and atom.stop <= i.stop for i in intervals)


def _move(routes: _Routes, held: Parts, targets: Parts, dtype: torch.dtype, device: torch.device) -> None:
    """One tensor's elements, all kinds together, in one exchange."""
    process, size = dist.get_rank(), dist.get_world_size()
    sent = [
        [atom for source, to, atom in routes.moves if source == process and to == p != process] for p in range(size)
    ]
    taken = [[atom for source, to, atom in routes.moves if to == process and source == p] for p in range(size)]
    for atom in taken[process]:
        _put(targets, atom, _get(held, atom))
    taken[process] = []
    counts_out = [NUM_KINDS * sum(atom.size for atom in atoms) for atoms in sent]
    counts_in = [NUM_KINDS * sum(atom.size for atom in atoms) for atoms in taken]
    if not any(source != to for source, to, _ in routes.moves):
        return
    parts = [value.to(device) for atoms in sent for atom in atoms for value in _get(held, atom)]
    outgoing = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
    incoming = torch.empty(sum(counts_in), dtype=dtype, device=device)
    dist.all_to_all_single(incoming, outgoing, counts_in, counts_out)
    offset = 0
    for atoms in taken:
        for atom in atoms:
            values = []
            for _ in range(NUM_KINDS):
                values.append(incoming[offset : offset + atom.size])
                offset += atom.size
            _put(targets, atom, tuple(values))


def _get(parts: Parts, atom: Interval) -> tuple[torch.Tensor, ...]:
    """The values of an atom; one part covers it, for atoms are not cut by any part's ends."""
    elements, values = next(part for part in parts if part[0].start <= atom.start and atom.stop <= part[0].stop)
    where = slice(*atom.shifted(-elements.start))
    return tuple(value[where] for value in values)


def _put(parts: Parts, atom: Interval, values: Sequence[torch.Tensor]) -> None:
    """Write an atom wherever a part holds it (a shared KV head may lie in several)."""
    for elements, targets in parts:
        if elements.start <= atom.start and atom.stop <= elements.stop:
            where = slice(*atom.shifted(-elements.start))
            for target, value in zip(targets, values, strict=True):
                target[where] = value
