"""One interleaved split in one variant of a grid point: a bound within memory, and its layouts.

Every stage runs with the options that take it the least seconds of a step within its memory,

    m (f + b) + what of its gradient sync is exposed at least + its optimizer

or the first stage alone does, since it ends with the step, and the others take the least m (f + b).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.activations import ACTIVATION_BYTES
from cost_models.pipeline import simulate
from cost_models.stragglers import expected_maximum
from planner.blocks import stage_degrees
from planner.grid_search import Best
from planner.interleaved_held import moments_on
from planner.interleaved_stage import Columns, Ints, Relaxed, Selection, StageSolver
from planner.layout import Layout
from planner.menu import Menu
from planner.options import OptionSource
from planner.rates import Exposure
from planner.space import Grid

Floats = npt.NDArray[np.float64]


class Costs:
    """What all splits of a variant share: a menu, its costs as arrays, the bytes that modules may fill, relaxations."""

    def __init__(self, grid: Grid, menu: Menu, columns: Columns, capacity: float, source: OptionSource) -> None:
        self.menu = menu
        self.columns = columns
        self.capacity = capacity
        self.less = sum(source.rates.sync(grid, degree).less for degree in stage_degrees(grid.num_ranks))
        self.exposures = source.rates.exposures(grid.zero)
        self.ring = ring_seconds(grid, source)
        self.moments = moments_on(grid)
        self._grid = grid

    @cached_property
    def work(self) -> Relaxed:
        """m (f + b) of a stage."""
        return self._relaxed(0.0)

    @cached_property
    def ends(self) -> tuple[Relaxed, ...]:
        """The same with what of its gradient sync is exposed at least, by each of the lines."""
        return tuple(self._relaxed(self.after(line)) for line in self.exposures)

    def after(self, line: Exposure) -> Floats:
        """A line of exposed sync by kind and option, without what is the same for all."""
        after: Floats = line.of_sync * self.columns.sync - line.of_backward * self.columns.backward
        return after

    def _relaxed(self, after: Floats | float) -> Relaxed:
        work = self._grid.num_micro_batches * (self.columns.forward + self.columns.backward)
        return Relaxed(self.columns, self.moments, work + after, self.capacity)


class _Solution(NamedTuple):
    """Options of every stage, and a bound of the layout's price."""

    selections: tuple[Selection, ...]
    lower: float


class Point:
    """`bound`: step seconds that none of its layouts beats; `closed`: it gets no sharper."""

    def __init__(
        self, grid: Grid, boundaries: tuple[int, ...], counts: Ints, costs: Costs, source: OptionSource
    ) -> None:
        """`counts` of modules, [v, stage, kind]."""
        self.grid = grid
        self.closed = False
        self.num_labels = 0
        self.boundaries = boundaries
        self._counts = counts
        self._costs = costs
        self._source = source.costs
        self._host = source.costs.overhead.other_seconds_per_action
        self._other = source.costs.overhead.other_seconds_per_step
        self._jitter = source.costs.jitter * expected_maximum(grid.num_replicas)
        self.bound = self._relaxed()
        self._layouts: list[_Solution] = []
        self._simulated = False

    def refine(self, best: Best) -> list[Point]:
        """Solve the stages; then simulate the layouts; then offer these: each sharpens the bound, and is left for later
        while there is some layout.
        """
        if not self._layouts:
            solver = StageSolver(self._costs.columns, self._costs.capacity)
            self._layouts = [_Solution(one, self._lower(one, self._along(one))) for one in self._selections(solver)]
            self.num_labels += solver.num_labels
        elif not self._simulated:
            self._simulated = True
            of = [one.selections for one in self._layouts]
            self._layouts = [_Solution(one, self._lower(one, self._simulate(one))) for one in of]
        else:
            self.closed = True
            for one in sorted(self._layouts, key=attrgetter("lower")):
                if one.lower < best.seconds:
                    best.offer(self._layout(one.selections), one.lower)
        self.bound = max(self.bound, min((one.lower for one in self._layouts), default=np.inf))
        return [self] if self.closed or np.isfinite(best.seconds) or not self._layouts else self.refine(best)

    def _relaxed(self) -> float:
        """A bound before any stage is solved."""
        costs, host = self._costs, self._host
        there_and_back, pre, stages = _paths(self.grid, self._counts, costs, costs.ring, host)
        if not np.isfinite(there_and_back):
            return np.inf
        columns, longest, totals = costs.columns, there_and_back, stages.sum(axis=1)
        hosts = 2.0 * self.grid.num_micro_batches * self.grid.num_virtual * host
        for line, ends in zip(costs.exposures, costs.ends, strict=True):
            less = line.of_sync * costs.less + line.of_backward * self.grid.num_virtual * host
            back = there_and_back + float(totals[0] @ costs.after(line).min(axis=1)) - less
            longest = max(longest, back, float((pre + ends.bounds(stages)).max()) + hosts - less)
        update = float((totals @ columns.update.min(axis=1)).max())
        spread = float((totals @ columns.spread.min(axis=1)).max())
        return longest + update + self._other + self._straggler(spread)

    def _straggler(self, spread: float) -> float:
        return self._jitter * float(np.sqrt(self.grid.num_micro_batches * spread))

    def _selections(self, solver: StageSolver) -> set[tuple[Selection, ...]]:
        """For every stage; none where one of them does not fit."""
        costs, stages, m = self._costs, range(1, self.grid.num_stages), self.grid.num_micro_batches
        totals = self._counts.sum(axis=(0, 1))
        line = max(costs.exposures, key=lambda line: float(totals @ costs.after(line).min(axis=1)))
        work = m * (costs.columns.forward + costs.columns.backward)
        ending = work + costs.after(line) + costs.columns.update
        first = solver.solve(self._counts[:, 0], costs.moments[0], ending)
        found = set()
        for weighted in (ending, work):
            solved = [first, *(solver.solve(self._counts[:, s], costs.moments[s], weighted) for s in stages)]
            fitting = tuple(one.selection for one in solved if one is not None)
            if len(fitting) < len(solved):
                return set()
            found.add(fitting)
        return found

    def _seconds(self, selections: tuple[Selection, ...]) -> tuple[Floats, Floats]:
        """Forward and backward of every virtual stage, [v, stage]."""
        columns = self._costs.columns
        forward, backward = (
            np.stack([_by_run(one, of) for one in selections], axis=1) + self._host
            for of in (columns.forward, columns.backward)
        )
        return forward, backward

    def _along(self, selections: tuple[Selection, ...]) -> list[float]:
        """When every stage is done at least: pre + m T, the first also there and back."""
        forward, backward = self._seconds(selections)
        pre, post = before(forward[0] + self._costs.ring), before(backward[0] + self._costs.ring)
        own = pre + self.grid.num_micro_batches * (forward + backward).sum(axis=0)
        return [float((own + post).max()), *own[1:].tolist()]

    def _simulate(self, selections: tuple[Selection, ...]) -> list[float]:
        """When every stage is done."""
        forward, backward = self._seconds(selections)
        timing = simulate(
            "interleaved",
            forward.ravel().tolist(),
            backward.ravel().tolist(),
            np.tile(self._costs.ring, self.grid.num_virtual)[:-1].tolist(),
            self.grid.num_micro_batches,
            num_virtual=self.grid.num_virtual,
        )
        return list(timing.finish_seconds)

    def _lower(self, selections: tuple[Selection, ...], done: Sequence[float]) -> float:
        """A bound of a layout's price: when its stages are done, with what comes once a step."""
        columns, costs, (_, backward) = self._costs.columns, self._costs, self._seconds(selections)
        sync, update, spread = (
            [float(_by_run(one, of).sum()) for one in selections]
            for of in (columns.sync, columns.update, columns.spread)
        )
        exposed, sharded = self._source.exposed_gradient_sync, bool(self.grid.zero)
        ends = max(
            finish + exposed(max(0.0, own - costs.less), beside, sharded=sharded)
            for finish, own, beside in zip(done, sync, backward.sum(axis=0).tolist(), strict=True)
        )
        return ends + max(update) + self._straggler(max(spread)) + self._other

    def _layout(self, selections: tuple[Selection, ...]) -> Layout:
        options, grid = self._costs.menu.options, self.grid
        runs = [
            tuple(
                tuple((options[kind][min(option, len(options[kind]) - 1)], number) for option, number in chosen)
                for kind, chosen in enumerate(selections[s][v])
            )
            for v in range(grid.num_virtual)
            for s in range(grid.num_stages)
        ]
        return Layout(grid, self.boundaries, tuple(runs))


def there_and_back(grid: Grid, counts: Ints, costs: Costs, ring: Floats, source: OptionSource) -> float:
    """Step seconds of a split within memory at least, without what comes once a step; `counts` [v, stage, kind]."""
    overhead = source.costs.overhead
    longest, _, _ = _paths(grid, counts, costs, ring, overhead.other_seconds_per_action)
    return longest + overhead.other_seconds_per_step


def _paths(grid: Grid, counts: Ints, costs: Costs, ring: Floats, host: float) -> tuple[float, Floats, Floats]:
    """The longest pre + m T + post within memory, pre of each stage, and modules [stage, v, kind]."""
    stages = counts.swapaxes(0, 1).astype(np.float64)
    own = costs.work.bounds(stages) + 2.0 * grid.num_micro_batches * grid.num_virtual * host
    columns, first = costs.columns, stages[:, 0]
    pre = before(first @ columns.forward.min(axis=1) + host + ring)
    post = before(first @ columns.backward.min(axis=1) + host + ring)
    return float((pre + own + post).max()), pre, stages


def ring_seconds(grid: Grid, source: OptionSource) -> Floats:
    """From each stage to the next, and from the last to the first."""
    ends = np.array([grid.stage_positions(stage)[0, 0] for stage in (grid.num_stages - 1, 0)])
    tokens = -(-grid.micro_batch * source.training.seq_len // grid.num_ranks)
    back = source.costs.collective(
        "point_to_point",
        num_ranks=2,
        payload_bytes=tokens * source.chain.modules[0].hidden * ACTIVATION_BYTES[source.training.precision],
        level=source.topology.span(ends).level,
    )
    return np.array([*source.transfer_seconds(grid), back])


def before(seconds: Floats) -> Floats:
    """Sums of all entries before each, along the last axis."""
    return np.cumsum(seconds, axis=-1) - seconds


def _by_run(selection: Selection, of: Floats) -> Floats:
    """Sums over the modules of each virtual stage."""
    return np.array(
        [
            sum(number * float(of[kind, option]) for kind, chosen in enumerate(own) for option, number in chosen)
            for own in selection
        ]
    )
