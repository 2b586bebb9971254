"""Bounds that cost nearly nothing: all work, as well spread over the stages as can be, memory aside."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.menu import OptionTable
from planner.options import OptionSource
from planner.space import SHARDED, Grid


class _Once(NamedTuple):
    """Seconds of one micro-batch in all modules, and without what may wait when the backward pass is split; seconds
    with and without it of every distinct module.
    """

    all: float
    passed: float
    each: npt.NDArray[np.float64]


def filled(num_stages: int, num_micro_batches: int) -> float:
    """Seconds of a pipeline at least, for each second that a micro-batch takes along all stages, however it is cut.

    # max over s of  sum over i < s of T_i + m T_s  >= T / (1 - (1 - 1 / m)^P)
    #   T_s seconds of stage s, T their sum; it is least where all of these are equal, T_s = T_0 (1 - 1 / m)^s
    """
    return float(1.0 / (1.0 - (1.0 - 1.0 / num_micro_batches) ** num_stages))


class QuickBounds:
    """Of the grid points of one problem; what depends on a stage's ranks and micro-batch alone is asked for once."""

    def __init__(self, source: OptionSource) -> None:
        self._source = source
        self._known: dict[Grid, float] = {}
        self._quick: dict[tuple[object, ...], _Once] = {}
        self._counts: dict[tuple[int, ...], npt.NDArray[np.int64]] = {}  # of distinct modules, by stage

    def seconds(self, grid: Grid) -> float:
        """Step seconds that no layout of a grid point beats, memory aside: all work, as well spread as can be."""
        if grid not in self._known:
            self._known[grid] = max(self.evenly(grid), self._filled(grid))
        return self._known[grid]

    def evenly(self, grid: Grid) -> float:
        """The same of interleaved layouts, too, which fill and drain the pipeline in parts: all work, spread evenly."""
        once = self._quick_seconds(grid)
        host = self._source.costs.overhead.other_seconds_per_action
        m, stages = grid.num_micro_batches, grid.num_stages
        actions = 2.0 + (grid.schedule == "zb-h1")
        pipeline = max(once.passed + 2.0 * host * stages, m * (once.all / stages + actions * host))
        return pipeline + self._source.costs.overhead.other_seconds_per_step

    def _filled(self, grid: Grid) -> float:
        overhead, m, stages = self._source.costs.overhead, grid.num_micro_batches, grid.num_stages
        along = self._quick_seconds(grid).passed + 2.0 * overhead.other_seconds_per_action * stages
        pipeline = along * (1.0 + (m - 1) / stages if grid.schedule == "gpipe" else filled(stages, m))
        return pipeline + overhead.other_seconds_per_step

    def _quick_seconds(self, grid: Grid) -> _Once:
        """Least seconds of one micro-batch through all modules."""
        inside = self._source.topology.block_level(grid.num_ranks) == "scale_up"
        shape = () if inside else (grid.num_stages, grid.num_replicas)  # which stages leave their domain
        key = (grid.num_ranks, grid.micro_batch, grid.num_stages > 1, grid.schedule == "zb-h1", *shape)
        if key not in self._quick:
            ways = [self._source.ways.of(kind, grid) for kind in range(len(self._source.chain.modules))]
            each = np.full((2, len(ways)), np.inf)
            if all(own.options for own in ways):
                tables = [OptionTable(*own.careful) for own in ways]
                passed = [float((own.forward + own.backward).min()) for own in tables]
                every = [float((own.forward + own.backward + own.weight).min()) for own in tables]
                each = np.array([every, passed])
            all_modules, passed_modules = (each @ self._source.chain.totals).tolist()
            self._quick[key] = _Once(all_modules, passed_modules, each)
        known = self._quick[key]
        more = self._source.least_gathered_seconds(grid) if grid.zero in SHARDED else 0.0
        return known._replace(all=known.all + more, passed=known.passed + more)

    def even_seconds(self, grid: Grid, boundaries: tuple[int, ...]) -> float:
        """Step seconds that no layout with stages of these modules beats, memory aside.

        # 1f1b, zb-h1: max over s of  pre_s + m (T_s + w_s),  sum of T + (m - 1 - ahead_s) T_s      gpipe: sum of T +
        #   (m - 1) max T;  T_s of a stage without weight gradients w_s, pre_s the T before it   (`planner.paths`)
        """
        chain, m, stages = self._source.chain, grid.num_micro_batches, grid.num_stages
        if not np.isfinite(self.seconds(grid)):
            return self.seconds(grid)
        if boundaries not in self._counts:
            of_stages = [np.bincount(chain.kinds[a:b], minlength=len(chain.modules)) for a, b in pairwise(boundaries)]
            self._counts[boundaries] = np.stack(of_stages)
        overhead, each = self._source.costs.overhead, self._quick_seconds(grid).each
        host = np.array([[2.0 + (grid.schedule == "zb-h1")], [2.0]]) * overhead.other_seconds_per_action
        every, passed = each @ self._counts[boundaries].T + host
        total = passed.sum()
        if grid.schedule == "gpipe":
            pipeline = total + (m - 1) * passed.max()
        else:
            ahead = np.minimum(stages - 1 - np.arange(stages), m - 1)
            pipeline = max((passed.cumsum() - passed + m * every).max(), (total + (m - 1 - ahead) * passed).max())
        return max(self.seconds(grid), float(pipeline) + overhead.other_seconds_per_step)
