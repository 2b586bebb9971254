"""A bound for all schedules of one shape: what stages take, whatever the order of their actions.

    minimise Z   such that a partition exists with, for every stage s,   pre_s + m T_s <= Z
    pre_s = sum over i < s of (f_i + x_i)      T_s = f_s + b_s

No stage begins before the first micro-batch has come to it, and each does all of its work.  Of all schedules 1f1b holds
least, so its memory stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner.chain import NO_CONTENT, Chain
from planner.menu import Menu
from planner.options import OptionSource
from planner.space import Grid
from planner.stage import Weights
from planner.stage_bounds import Place, StageBounds

Floats = npt.NDArray[np.float64]


def shape_bound(
    chain: Chain, grid: Grid, menus: Sequence[Menu], source: OptionSource, *, capacity: float, enough: float
) -> float:
    """Step seconds that no schedule of the grid's shape beats; `inf` where none fits.  As good as needed to reach
    `enough`.
    """
    overhead, m = source.costs.overhead, grid.num_micro_batches
    bounds = StageBounds(menus, chain.counts, capacity, overhead.other_seconds_per_action)
    work = Weights(1.0, 1.0)
    forward = bounds.least(Weights(1.0, 0.0))
    limit = (enough - overhead.other_seconds_per_step) / m
    some = np.flatnonzero(bounds.least(work) <= limit)
    if not some.size:
        return enough
    allowed = np.zeros(len(chain.counts), dtype=bool)
    allowed[some] = True
    stops, starts = np.nonzero(((chain.contents != NO_CONTENT) & allowed[chain.contents]).T)
    numbers = chain.contents[starts, stops]
    firsts = np.flatnonzero(np.diff(stops, prepend=-1))
    ends, fill = stops[firsts], forward[numbers]

    def finish(busy_of: Sequence[Floats]) -> float:
        """The least Z for given T of every stage, by content."""
        pre, longest = np.full((2, chain.num_positions), np.inf)
        pre[0] = longest[0] = 0.0
        for busy, transfer in zip(busy_of, (*source.transfer_seconds(grid), 0.0), strict=True):
            before = pre[starts]
            until = np.maximum(longest[starts], before + m * busy[numbers])
            pre, longest = np.full((2, chain.num_positions), np.inf)
            longest[ends] = np.minimum.reduceat(until, firsts)
            pre[ends] = np.minimum.reduceat(before + fill, firsts) + transfer
        return float(longest[-1]) + overhead.other_seconds_per_step

    found = finish([bounds.least(work)] * grid.num_stages)
    if found < enough:  # memory, which costs more to ask about, may say more
        places = [Place(False, grid.flights(stage)) for stage in range(grid.num_stages)]
        bounds.bound({place: [work] for place in places}, dict.fromkeys(places, some))
        found = finish([bounds.values(place, work) for place in places])
    if np.isfinite(found):
        return found
    return enough if np.isfinite(enough) else np.inf
