"""Uniform layouts: one degree, one recompute mode, one sharding, layers split evenly.  What one would pick by hand:
data, tensor and pipeline parallelism, ZeRO-1 and all their combinations.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from itertools import count, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from planner.chain import even_boundaries
from planner.goal import Worth
from planner.grid_search import Incumbent
from planner.layout import Layout
from planner.options import OptionSource
from planner.outcome import Outcome
from planner.paths import PipelineShape, pipeline_bound
from planner.restriction import Restriction
from planner.space import SHARDED, Grid
from specs.plan import Recompute

if TYPE_CHECKING:
    from planner.search import Searcher


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MODES: tuple[Recompute, ...] = ("none", "selective", "full")


class EvenSplits:
    """The uniform layouts of a searcher's problem."""

    def __init__(self, searcher: Searcher) -> None:
        self._searcher = searcher
        self._modes = [mode for mode in _MODES if self._may_run_in(mode)]
        self._boundaries: dict[int, tuple[int, ...] | None] = {}
        self._by_stage: dict[tuple[int, ...], Ints] = {}

    def search(self, incumbent: Incumbent, outcome: Outcome, worth: Worth | None, *, deadline: float) -> None:
        """Add the best uniform layout to an outcome: of grid points by their bounds, the best first, then of their
        layouts, which are priced in turn.  With `worth`, all in seconds delivered.
        """
        searcher = self._searcher
        # By hand nobody sends gradients of every micro-batch under a pipeline.
        usual = (grid for grid in searcher.grids if grid.num_stages == 1 or grid.zero not in SHARDED)
        number, queue = count(), list[tuple[float, int, Grid | UniformSearch]]()
        for grid in usual:
            boundaries = self._boundaries_of(grid.num_stages)
            if boundaries is None:
                outcome.pruned["more stages than layers"] += 1
            elif not searcher.rules.allows_uniform(grid.num_ranks):
                outcome.pruned["number of degrees"] += 1
            else:
                lower = searcher.quick.even_seconds(grid, boundaries)
                queue.append((lower / worth(grid, lower) if worth else lower, next(number), grid))
        heapq.heapify(queue)
        while queue:
            late = time.monotonic() > deadline and incumbent.layout is not None
            if late or queue[0][0] >= incumbent.seconds:
                outcome.complete = not late
                outcome.pruned["time limit" if late else "seconds"] += len(queue)
                break
            least, _, entry = heapq.heappop(queue)
            if isinstance(entry, UniformSearch):
                incumbent.offer(entry.layout(), least)
                continue
            for search in self._layouts(entry, outcome):
                lower = search.lower()
                lower = lower / worth(search.grid, lower) if worth else lower
                heapq.heappush(queue, (max(least, lower), next(number), search))
        outcome.bound = incumbent.seconds if outcome.complete else queue[0][0]

    def _layouts(self, grid: Grid, outcome: Outcome) -> Iterator[UniformSearch]:
        """The layouts of a grid point's variants that fit, in the recompute mode that is fastest."""
        source, capacity = self._searcher.source, self._searcher.capacity
        boundaries = self._boundaries_of(grid.num_stages)
        assert boundaries is not None
        if not self._may_fit(grid, boundaries):
            outcome.pruned["memory"] += 1
            return
        counts = self._counts(boundaries)
        for mode in self._modes:
            # The first variant needs least memory, and no mode is faster than one that recomputes less.
            search = UniformSearch(source, grid, boundaries, counts, mode, capacity=capacity)
            if search.fits:
                for variant in self._searcher.distinct_variants(grid):
                    search = UniformSearch(source, variant, boundaries, counts, mode, capacity=capacity)
                    if search.fits:
                        yield search
                return
            outcome.pruned["memory" if search.divides else "divisibility"] += 1
            if not search.state_fits:
                return

    def _may_fit(self, grid: Grid, boundaries: tuple[int, ...]) -> bool:
        """Whether stages fit whose modules may each recompute as they like."""
        menu = self._searcher.source.menu(grid, Restriction((grid.num_ranks,)))
        if menu is None:
            return True  # what does not divide is told apart in each mode
        static, kept, waiting, working = (
            np.array([getattr(table, name).min() for table in menu.tables])
            for name in ("static", "activation", "deferred", "working")
        )
        room = self._searcher.capacity - self._searcher.source.edge_bytes(grid)
        return _fullest(grid, self._counts(boundaries), static, kept, waiting, working) <= room

    def _counts(self, boundaries: tuple[int, ...]) -> Ints:
        """How many of each distinct module every stage has."""
        if boundaries not in self._by_stage:
            chain = self._searcher.chain
            kinds = np.array(chain.kinds)
            rows = [np.bincount(kinds[a:b], minlength=len(chain.modules)) for a, b in pairwise(boundaries)]
            self._by_stage[boundaries] = np.stack(rows)
        return self._by_stage[boundaries]

    def _may_run_in(self, mode: Recompute) -> bool:
        """Whether the user's rules leave every module a way to run when all others recompute in this mode."""
        chain = self._searcher.chain
        pairs = zip(chain.modules, chain.rules, strict=True)
        return all(Restriction(recompute=mode).modes_of(module, rule) for module, rule in pairs)

    def _boundaries_of(self, num_stages: int) -> tuple[int, ...] | None:
        if num_stages not in self._boundaries:
            searcher, fixed = self._searcher, self._searcher.rules.boundaries
            self._boundaries[num_stages] = even_boundaries(searcher.model, num_stages) if fixed is None else fixed
        return self._boundaries[num_stages]


class UniformSearch:
    """The one layout of a grid point that is uniform in a recompute mode.

    Modules without the mode, and the head, recompute nothing.  `divides`, `state_fits` (weights, gradients and
    optimizer alone) and `fits` say whether it can be.
    """

    def __init__(
        self,
        source: OptionSource,
        grid: Grid,
        boundaries: tuple[int, ...],
        counts: Ints,
        mode: Recompute,
        *,
        capacity: float,
    ) -> None:
        """`counts`: distinct modules of every stage, [stage, kind]."""
        self._source = source
        self.grid = grid
        self._boundaries = boundaries
        self._counts = counts
        tied = grid.num_ranks if source.tied and grid.num_stages == 1 else None
        self._menu = source.menu(grid, Restriction((grid.num_ranks,), mode, tied=tied))
        self.divides = self._menu is not None
        room = capacity - source.edge_bytes(grid)
        self.state_fits = self._menu is not None and float((self._counts @ self._column("static")).max()) <= room
        self.fits = self.state_fits and self._memory() <= room

    def _column(self, name: str) -> Floats:
        assert self._menu is not None
        return np.array([getattr(table, name)[0] for table in self._menu.tables])

    def _memory(self) -> float:
        """Bytes of the modules on the fullest stage."""
        columns = (self._column(name) for name in ("static", "activation", "deferred", "working"))
        return _fullest(self.grid, self._counts, *columns)

    def lower(self) -> float:
        """A bound of the layout's step seconds."""
        assert self._menu is not None
        overhead = self._source.costs.overhead
        host = overhead.other_seconds_per_action
        forward, backward = (self._counts @ self._column(name) + host for name in ("forward", "backward"))
        weight = self._counts @ self._column("weight") + host if self.grid.schedule == "zb-h1" else 0.0 * forward
        shape = PipelineShape(
            num_stages=self.grid.num_stages,
            num_micro_batches=self.grid.num_micro_batches,
            transfers=self._source.transfer_seconds(self.grid),
            schedule=self.grid.schedule,
        )
        less = self._source.rates.sync(self.grid, self.grid.num_ranks).less
        sync = max(0.0, float(self._counts[0] @ self._column("sync")) - less)
        sharded = bool(self.grid.zero)
        once = self._source.costs.exposed_gradient_sync(sync, float(backward[0] + weight[0]), sharded=sharded)
        once += float((self._counts @ self._column("update")).max())
        pipeline = pipeline_bound(shape, forward.tolist(), backward.tolist(), weight.tolist())
        return pipeline + once + overhead.other_seconds_per_step

    def layout(self) -> Layout:
        assert self._menu is not None
        stages = tuple(
            tuple(((options[0], n),) if n else () for options, n in zip(self._menu.options, row, strict=True))
            for row in self._counts.tolist()
        )
        return Layout(self.grid, self._boundaries, stages)


def _fullest(grid: Grid, counts: Ints, static: Floats, kept: Floats, waiting: Floats, working: Floats) -> float:
    """Bytes of the fullest stage; columns by distinct module."""
    of_kept, of_waiting = counts @ kept, counts @ waiting
    flights = [
        max(flight.kept * of_kept[stage] + flight.deferred * of_waiting[stage] for flight in grid.flights(stage))
        for stage in range(grid.num_stages)
    ]
    held = counts @ static + np.array(flights)
    return float((held + np.where(counts > 0, working, 0.0).max(axis=1)).max())
