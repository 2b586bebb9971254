"""Plans that were not taken, and why: the next best of other shapes, and well-known layouts that do not fit."""

from __future__ import annotations

import time

from planner.describe import describe
from planner.fit import least_memory
from planner.grid_search import Incumbent
from planner.layout import Layout
from planner.search import Searcher
from planner.space import Grid
from specs.plan import Alternative, Prediction
from specs.units import num_bytes
from specs.units import seconds as format_seconds


def alternatives(
    searcher: Searcher,
    incumbent: Incumbent,
    predictions: dict[Layout, Prediction],
    best: Layout,
    memory_bytes: int,
    top_k: int,
    *,
    deadline: float,
) -> tuple[Alternative, ...]:
    """The `top_k` best layouts of other shapes, then hand-made ones and why they lose, while there is
    time to look.
    """
    found: list[Alternative] = []
    seen = {_shape(best.grid)}
    for layout, seconds in sorted(incumbent.priced.items(), key=lambda item: item[1]):
        if len(found) == top_k or seconds == float("inf"):
            break
        if _shape(layout.grid) not in seen:
            seen.add(_shape(layout.grid))
            less = 1.0 - predictions[layout].goodput_tokens_per_second / predictions[best].goodput_tokens_per_second
            slower = seconds / predictions[best].step_time_seconds - 1.0
            found.append(
                Alternative(
                    layout=describe(layout),
                    step_time_seconds=seconds,
                    peak_memory_bytes=predictions[layout].peak_memory_bytes,
                    reason=f"{100.0 * slower:.2f} % slower" if slower >= 0.0 else _faster_but(-slower, less),
                )
            )
    for name, num_stages, num_ranks in _by_hand(searcher):
        if not any(shape[:2] == (num_stages, num_ranks) for shape in seen):
            rejected = _rejected(searcher, name, num_stages, num_ranks, memory_bytes, deadline)
            found += [] if rejected is None else [rejected]
    return tuple(found)


def _faster_but(faster: float, less: float) -> str:
    return f"{100.0 * faster:.2f} % faster, delivers {100.0 * less:.2f} % less"


def _shape(grid: Grid) -> tuple[int, int, int]:
    return grid.num_stages, grid.num_ranks, grid.num_replicas


def _by_hand(searcher: Searcher) -> list[tuple[str, int, int]]:
    """Names, stages and ranks per stage of layouts that one would try first."""
    total, domain = searcher.topology.num_ranks, searcher.topology.domain
    return [("data parallel only", 1, 1), (f"tensor parallel {domain} and data parallel", 1, domain)][: min(total, 2)]


def _rejected(
    searcher: Searcher, name: str, num_stages: int, num_ranks: int, memory_bytes: int, deadline: float
) -> Alternative | None:
    """Why a shape was not taken: divisibility, memory, or its bound; None when there is no time to tell."""
    grids = [g for g in searcher.grids if (g.num_stages, g.num_ranks) == (num_stages, num_ranks)]
    needs = []
    for grid in grids:
        if time.monotonic() > deadline:
            return None
        if grid.schedule == "1f1b":  # holds no more than any other schedule
            least = least_memory(searcher.chain, grid, searcher.source)
            needs += [] if least is None else [least]
    if not needs:
        constrained = searcher.rules.by_module and not grids
        reason = "does not divide the ranks, the global batch or a module"
        reason, needed = reason + ", or the constraints rule it out" if constrained else reason, None
    else:
        needed = round(min(least.total_bytes for least in needs))
        quick = (
            min(searcher.quick_bound(least.grid) for least in needs if least.total_bytes <= memory_bytes)
            if (needed <= memory_bytes)
            else None
        )
        if quick is None:
            reason = f"needs {num_bytes(needed)} at least, {num_bytes(needed - memory_bytes)} too much"
        else:
            reason = f"{format_seconds(quick)} with memory to spare, slower within this one"
    return Alternative(layout=name, step_time_seconds=None, peak_memory_bytes=needed, reason=reason)
