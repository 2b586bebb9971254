"""A bound for all schedules of one shape: what stages take, whatever the order of their actions.

    minimise Z   such that a partition exists with, for every stage s,   pre_s + m T_s <= Z
    pre_s = sum over i < s of (f_i + x_i)      T_s = f_s + b_s

No stage begins before the first micro-batch has come to it, and each does all of its work.  Of all schedules 1f1b holds
least, so its memory stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.chain import NO_CONTENT, Chain
from planner.options import Menu, OptionSource
from planner.space import Grid
from planner.stage import Weights
from planner.stage_bounds import Place, StageBounds


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
    places = [Place(False, grid.flights(stage)) for stage in range(grid.num_stages)]
    bounds.bound({place: [work] for place in places}, dict.fromkeys(places, some))
    allowed = np.zeros(len(chain.counts), dtype=bool)
    allowed[some] = True
    stops, starts = np.nonzero(((chain.contents != NO_CONTENT) & allowed[chain.contents]).T)
    numbers = chain.contents[starts, stops]
    firsts = np.flatnonzero(np.diff(stops, prepend=-1))
    ends, fill = stops[firsts], forward[numbers]
    pre, longest = np.full((2, chain.num_positions), np.inf)
    pre[0] = longest[0] = 0.0
    for place, transfer in zip(places, (*source.transfer_seconds(grid), 0.0), strict=True):
        before = pre[starts]
        busy = np.maximum(longest[starts], before + m * bounds.values(place, work)[numbers])
        pre, longest = np.full((2, chain.num_positions), np.inf)
        longest[ends] = np.minimum.reduceat(busy, firsts)
        pre[ends] = np.minimum.reduceat(before + fill, firsts) + transfer
    found = float(longest[-1])
    if np.isfinite(found):
        return found + overhead.other_seconds_per_step
    return enough if np.isfinite(enough) else np.inf
