"""Uniform layouts: one degree, one recompute mode, one sharding, layers split evenly.  What one would pick by hand:
data, tensor and pipeline parallelism, ZeRO-1 and all their combinations.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from planner.layout import Layout
from planner.options import OptionSource, Restriction
from planner.paths import PipelineShape, pipeline_bound
from planner.space import Grid
from specs.plan import Recompute


class UniformSearch:
    """The one layout of a grid point that is uniform in a recompute mode.

    Modules without the mode, and the head, recompute nothing.  `divides`, `state_fits` (weights, gradients and
    optimizer alone) and `fits` say whether it can be.
    """

    def __init__(
        self, source: OptionSource, grid: Grid, boundaries: tuple[int, ...], mode: Recompute, *, capacity: float
    ) -> None:
        self._source = source
        self.grid = grid
        self._boundaries = boundaries
        tied = grid.num_ranks if source.tied and grid.num_stages == 1 else None
        self._menu = source.menu(grid, Restriction((grid.num_ranks,), mode, tied=tied))
        self.divides = self._menu is not None
        room = capacity - source.edge_bytes(grid)
        self.state_fits = self._menu is not None and float((self._counts @ self._column("static")).max()) <= room
        self.fits = self.state_fits and self._memory() <= room

    @cached_property
    def _counts(self) -> npt.NDArray[np.int64]:
        """How many of each distinct module every stage has."""
        chain = self._source.chain
        kinds = np.array(chain.kinds)
        rows = [np.bincount(kinds[a:b], minlength=len(chain.modules)) for a, b in pairwise(self._boundaries)]
        return np.stack(rows)

    def _column(self, name: str) -> npt.NDArray[np.float64]:
        assert self._menu is not None
        return np.array([getattr(table, name)[0] for table in self._menu.tables])

    def _memory(self) -> float:
        """Bytes of the modules on the fullest stage."""
        kept, waiting = (self._counts @ self._column(name) for name in ("activation", "deferred"))
        flights = [
            max(flight.kept * kept[stage] + flight.deferred * waiting[stage] for flight in self.grid.flights(stage))
            for stage in range(self.grid.num_stages)
        ]
        held = self._counts @ self._column("static") + np.array(flights)
        return float((held + np.where(self._counts > 0, self._column("working"), 0.0).max(axis=1)).max())

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
