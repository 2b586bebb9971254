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
    bounds.bound(((place, work) for place in places), some)
    none = chain.contents == NO_CONTENT
    fill = np.where(none, np.inf, forward[chain.contents])
    pre = longest = np.full(chain.num_positions, np.inf)
    pre[0] = longest[0] = 0.0
    known: dict[Place, np.ndarray] = {}
    for place, transfer in zip(places, (*source.transfer_seconds(grid), 0.0), strict=True):
        if place not in known:
            known[place] = np.where(none, np.inf, m * bounds.values(place, work)[chain.contents])
        longest = np.maximum(longest[:, None], pre[:, None] + known[place]).min(axis=0)
        pre = (pre[:, None] + fill).min(axis=0) + transfer
    found = float(longest[-1])
    if np.isfinite(found):
        return found + overhead.other_seconds_per_step
    return enough if np.isfinite(enough) else np.inf
