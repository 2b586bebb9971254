"""Bounds that cost nearly nothing: all work, spread evenly over the stages, memory aside."""

from __future__ import annotations

from dataclasses import replace
from operator import mul
from typing import NamedTuple

from planner.options import OptionSource, Restriction
from planner.space import SHARDED, Grid


class _Once(NamedTuple):
    """Seconds of one micro-batch in all modules, and without what may wait when the backward pass is split."""

    all: float
    passed: float


class QuickBounds:
    """Of the grid points of one problem; what depends on a stage's ranks and micro-batch alone is asked for once."""

    def __init__(self, source: OptionSource) -> None:
        self._source = source
        self._known: dict[Grid, float] = {}
        self._quick: dict[tuple[int, int, bool, bool], _Once] = {}

    def seconds(self, grid: Grid) -> float:
        """Step seconds that no layout of a grid point beats, memory aside: all work, spread evenly over the stages."""
        if grid not in self._known:
            self._known[grid] = self._seconds(grid)
        return self._known[grid]

    def _seconds(self, grid: Grid) -> float:
        once = self._quick_seconds(grid)
        host = self._source.costs.overhead.other_seconds_per_action
        m, stages = grid.num_micro_batches, grid.num_stages
        if grid.schedule == "gpipe":
            pipeline = once.all * (1.0 + (m - 1) / stages) + 2.0 * host * (stages + m - 1)
        else:
            actions = 2.0 + (grid.schedule == "zb-h1")
            pipeline = max(once.passed + 2.0 * host * stages, m * (once.all / stages + actions * host))
        return pipeline + self._source.costs.overhead.other_seconds_per_step

    def _quick_seconds(self, grid: Grid) -> _Once:
        """Least seconds of one micro-batch through all modules."""
        key = (grid.num_ranks, grid.micro_batch, grid.num_stages > 1, grid.schedule == "zb-h1")
        if key not in self._quick:
            menu = self._source.menu(replace(grid, zero=1), Restriction())
            self._quick[key] = _Once(float("inf"), float("inf"))
            if menu is not None:
                passed = [float((table.forward + table.backward).min()) for table in menu.tables]
                every = [float((table.forward + table.backward + table.weight).min()) for table in menu.tables]
                counts = self._source.chain.totals.tolist()
                self._quick[key] = _Once(*(sum(map(mul, counts, least)) for least in (every, passed)))
        more = self._source.least_gathered_seconds(grid) if grid.zero in SHARDED else 0.0
        return _Once(*(seconds + more for seconds in self._quick[key]))
