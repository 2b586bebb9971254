"""A layout in one line, for ladders, alternatives and messages."""

from __future__ import annotations

from collections import Counter

from planner.blocks import Blocks, describe_blocks
from planner.layout import Layout
from specs.plan import Recompute


def describe(layout: Layout) -> str:
    """E.g. `2 stages x 4 ranks x 1 replica, micro-batch 4, zero 1, degrees 2 4, recompute 12 full of 66`."""
    grid = layout.grid
    degrees: set[Blocks] = set()
    modes: Counter[Recompute] = Counter()
    for assignment in layout.stages:
        for chosen in assignment:
            for option, number in chosen:
                degrees.add(option.blocks)
                modes[option.recompute] += number
    parts = [
        f"{_count(grid.num_stages, 'stage')} x {_count(grid.num_ranks, 'rank')} x "
        f"{_count(grid.num_replicas, 'replica')}",
        f"micro-batch {grid.micro_batch}",
        f"zero {grid.zero}",
        f"{'degree' if len(degrees) == 1 else 'degrees'} {' '.join(map(describe_blocks, sorted(degrees)))}",
    ]
    if grid.context > 1:
        parts.append(f"context parallel {grid.context}")
    if grid.num_virtual > 1:
        parts.append(f"{grid.schedule} with {grid.num_virtual} virtual stages")
    elif grid.schedule != "1f1b":
        parts.append(grid.schedule)
    redone = [f"{modes[mode]} {mode}" for mode in ("selective", "full") if modes[mode]]
    if modes["keep"]:
        parts.append(f"gathered inputs of {_count(modes['keep'], 'module')} kept")
    parts.append(f"recompute {', '.join(redone)} of {modes.total()} modules" if redone else "no recompute")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
