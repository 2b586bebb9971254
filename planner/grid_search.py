"""The inner search: for one grid point, the best partition of the chain and the best options in every stage.

    minimise    makespan(T) + sync_0 + max of update_s + constant
    T_s seconds of a micro-batch on stage s; sync_0 gradient sync of the first stage, which finishes last;
    update_s optimizer.  (What the finished layout costs beyond that, `cost_models.step.price` adds.)

No path through the schedule visits a stage more than m times, and none has more than m + P - 1 visits.  So with

    v_s = T_s + update_s / (m + P - 1) + [s = 0] sync_0 / m

makespan(v) is never above the objective (and equal for one stage): partitions under v give bounds.  Stages are
bounded by their linear relaxation first and solved exactly only when they lie on the best path; the loop ends when
the whole path is exact, or when its bound reaches the incumbent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cost_models.stragglers import expected_maximum
from planner.chain import NO_CONTENT, Chain
from planner.layout import Assignment, Layout
from planner.options import Menu, OptionSource
from planner.partition import Partition, PipelineShape, best_partition, pipeline_bound
from planner.rates import Exposure
from planner.space import Grid, divisors
from planner.stage import OptionTable, StageChoice, StageSolver

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StageResult:
    """A solved stage, and which menu its options come from."""

    menu: int
    choice: StageChoice


class Best(Protocol):
    """What a grid point needs to know of the best layout so far."""

    @property
    def seconds(self) -> float:
        """Step seconds that a layout must beat."""
        ...

    def offer(self, layout: Layout, at_least: float) -> None:
        """Price a layout unless its bound says that it cannot be better."""
        ...


@dataclass
class Incumbent:
    """The best layout so far over all grid points.  `price` gives the exact step seconds of a layout."""

    price: Callable[[Layout], float]
    seconds: float = np.inf
    layout: Layout | None = None
    priced: dict[Layout, float] = field(default_factory=dict)

    def offer(self, layout: Layout, at_least: float) -> None:
        """Price a layout unless its bound says that it cannot be better."""
        if at_least >= self.seconds or layout in self.priced:
            return
        seconds = self.priced[layout] = self.price(layout)
        if seconds < self.seconds:
            self.seconds, self.layout = seconds, layout


class GridSearch:
    """One grid point whose stages each use the options of one of `menus`; `capacity` in bytes for modules alone."""

    num_nodes = 0  # of an integer program; there is none here

    def __init__(
        self,
        chain: Chain,
        grid: Grid,
        menus: Sequence[Menu],
        source: OptionSource,
        *,
        capacity: float,
        with_sync: bool = True,
    ) -> None:
        """Without sync the first stage's gradient sync counts nothing: a bound for every sharding and order."""
        self.chain = chain
        self.grid = grid
        self.menus = menus
        overhead, m = source.costs.overhead, grid.num_micro_batches
        self.host = overhead.other_seconds_per_action
        self.jitter = source.costs.jitter * expected_maximum(grid.num_replicas)
        self.shape = PipelineShape(
            num_stages=grid.num_stages,
            num_micro_batches=m,
            transfers=source.transfer_seconds(grid),
            longer_share=min(menu.longer_share for menu in menus),
            schedule=grid.schedule,
        )
        least_spread = sum(
            count * min(float(menu.tables[kind].spread.min()) for menu in menus)
            for kind, count in enumerate(chain.totals.tolist())
        )
        self.less = sum(source.rates.sync(grid, degree).less for degree in divisors(grid.num_ranks))
        self.other = overhead.other_seconds_per_step
        self.constant = self.other + self.jitter * float(np.sqrt(m * least_spread / grid.num_stages))
        visits = m + grid.num_stages - 1
        self._costs = source.costs
        exposure = self._exposure(source.rates.exposures(grid.zero)) if with_sync else Exposure(0.0, 0.0)
        self._solvers = [
            [
                StageSolver(
                    menu.tables,
                    chain.counts,
                    capacity,
                    sync_weight=part.of_sync / m,
                    update_weight=1.0 / visits,
                    hiding=part.of_backward / m,
                )
                for menu in menus
            ]
            for part in (exposure, Exposure(0.0, 0.0))
        ]
        # The first stage's backward pass also has host time.
        self.constant -= exposure.of_backward * self.host + exposure.of_sync * self.less
        self._values = self._weighted_bounds()
        self._results: dict[tuple[bool, int, int], StageResult | None] = {}

    @property
    def num_labels(self) -> int:
        return sum(solver.num_labels for solvers in self._solvers for solver in solvers)

    def run(self, incumbent: Best, tolerance: float, deadline: float) -> float:
        """Offer layouts to the incumbent; return a lower bound of this grid point's step seconds (`inf`: none fits).

        Ends early when the bound is within `tolerance` (relative) of the incumbent, or at the deadline.
        """
        bound = 0.0
        while True:
            below = self._below(incumbent.seconds * (1.0 - tolerance))
            if not np.isfinite(below):
                return np.inf
            found = self._partition(at_least=bound, below=below, accuracy=tolerance / 4.0)
            if found is None:
                return max(bound, below) + self.constant
            bound = found.bound
            if not self._offer(found.path, incumbent) or time.monotonic() > deadline:
                return bound + self.constant

    def quick_bound(self, enough: float) -> float:
        """A bound of step seconds before any stage is solved exactly; only as good as needed to reach `enough`."""
        below = self._below(enough)
        if not np.isfinite(below):
            return np.inf
        found = self._partition(at_least=0.0, below=below, accuracy=np.inf)
        return 0.0 if found is not None else below + self.constant

    def lower(self, stages: Sequence[StageResult]) -> float:
        """A bound of a solved layout's price."""
        forward, backward, spread, update = (
            [self._total(stage, column) for stage in stages] for column in ("forward", "backward", "spread", "update")
        )
        seconds = [f + b + 2.0 * self.host for f, b in zip(forward, backward, strict=True)]
        straggler = self.jitter * float(np.sqrt(self.grid.num_micro_batches * max(spread)))
        sync = max(0.0, self._total(stages[0], "sync") - self.less)
        exposed = self._costs.exposed_gradient_sync(sync, backward[0] + self.host, sharded=bool(self.grid.zero))
        once = exposed + max(update)
        return pipeline_bound(self.shape, seconds) + once + straggler + self.other

    def _exposure(self, candidates: tuple[Exposure, Exposure]) -> Exposure:
        """The bound of exposed sync that says more here; both hold.  Judged by an average stage's fastest options."""

        def average(column: str) -> float:
            least = [min(float(getattr(menu.tables[k], column).min()) for menu in self.menus) for k in self._kinds]
            return float(self.chain.totals @ np.array(least)) / self.grid.num_stages

        sync, backward = average("sync"), average("backward")
        return max(candidates, key=lambda part: part.of_sync * sync - part.of_backward * backward)

    @property
    def _kinds(self) -> range:
        return range(len(self.chain.modules))

    def _partition(self, *, at_least: float, below: float, accuracy: float) -> Partition | None:
        chain = self.chain
        return best_partition(
            self.shape, chain.contents, chain.spans, self._values, at_least=at_least, below=below, accuracy=accuracy
        )

    def _weighted_bounds(self) -> list[Floats]:
        """For every stage, weighted seconds of every content: bounds at first, exact where solved (`_result`).

        Stages with as many micro-batches in flight share an array, but for the first.
        """
        later, first = self._solvers[1], self._solvers[0]
        own = np.minimum.reduce([solver.bounds([self.grid.in_flight(0)]) for solver in first])[0] + 2.0 * self.host
        flights = sorted({self.grid.in_flight(stage) for stage in range(1, self.grid.num_stages)})
        arrays: dict[int, Floats] = {}
        if flights:
            rows = np.minimum.reduce([solver.bounds(flights) for solver in later]) + 2.0 * self.host
            arrays = dict(zip(flights, rows, strict=True))
        return [own] + [arrays[self.grid.in_flight(stage)] for stage in range(1, self.grid.num_stages)]

    def _below(self, enough: float) -> float:
        """The makespan below which a partition is of interest: what reaches `enough` step seconds; without such a
        limit one that some partition reaches (least sum, every stage m times), `inf` when there is none.
        """
        if np.isfinite(enough):
            return enough - self.constant
        contents = self.chain.contents
        reach = np.full(self.chain.num_positions, np.inf)
        reach[0] = 0.0
        for values in self._values:
            matrix = np.where(contents == NO_CONTENT, np.inf, values[contents])
            reach = (reach[:, None] + matrix).min(axis=0)
        transfers = 2.0 * self.grid.num_micro_batches * sum(self.shape.transfers)
        return 1.001 * (self.grid.num_micro_batches + 1) * (float(reach[-1]) + transfers)

    def _offer(self, path: tuple[int, ...], incumbent: Best) -> bool:
        """Solve the stages of a path; offer the layout when all of them fit.  False when nothing new was solved."""
        known = len(self._results)
        results = [
            self._result(stage, int(self.chain.contents[start, stop]))
            for stage, (start, stop) in enumerate(pairwise(path))
        ]
        stages = [result for result in results if result is not None]
        if len(stages) == len(results):
            boundaries = tuple(self.chain.positions[position] for position in path)
            layout = Layout(self.grid, boundaries, tuple(self._assignment(stage) for stage in stages))
            incumbent.offer(layout, self.lower(stages))
        return len(self._results) > known

    def _result(self, stage: int, content: int) -> StageResult | None:
        """The best choice of a content in weighted seconds, over the menus."""
        first, in_flight = stage == 0, self.grid.in_flight(stage)
        key = (first, in_flight, content)
        if key not in self._results:
            solved = [(menu, solver.solve(content, in_flight)) for menu, solver in enumerate(self._solvers[not first])]
            fitting = [StageResult(menu, choice) for menu, choice in solved if choice is not None]
            best = min(fitting, key=lambda result: result.choice.weighted, default=None)
            self._results[key] = best
            value = np.inf if best is None else best.choice.weighted + 2.0 * self.host
            self._values[stage][content] = value
        return self._results[key]

    def _assignment(self, stage: StageResult) -> Assignment:
        options = self.menus[stage.menu].options
        return tuple(
            tuple((options[kind][option], number) for option, number in chosen)
            for kind, chosen in enumerate(stage.choice.selection)
        )

    def _total(self, stage: StageResult, column: str) -> float:
        tables: tuple[OptionTable, ...] = self.menus[stage.menu].tables
        return sum(
            number * float(getattr(tables[kind], column)[option])
            for kind, chosen in enumerate(stage.choice.selection)
            for option, number in chosen
        )
