"""The inner search: for one grid point, the best partition of the chain and the best options in every stage.

    minimise    the longest of all paths through the schedule, each with the once-a-step seconds of where it ends
    u_s = exposed gradient sync of stage s + its optimizer; see `planner.partition`

A family of paths needs of a stage the least of (forward f + backward b + once u) for its own weights.  That is a
knapsack: bounded for all contents at once by its linear relaxation, and solved exactly only where it lies on the best
path.  The loop ends when the whole path is exact, or when its bound reaches the incumbent.  (What the finished layout
costs beyond these bounds, `cost_models.step.price` adds.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cost_models.stragglers import expected_maximum
from planner.blocks import stage_degrees
from planner.chain import NO_CONTENT, Chain
from planner.layout import Assignment, Layout
from planner.menu import Menu, OptionTable
from planner.options import OptionSource
from planner.partition import Partition, StageValues, best_partition
from planner.paths import Path, PipelineShape, pipeline_bound
from planner.rates import Exposure
from planner.space import Grid
from planner.stage import Weights
from planner.stage_bounds import Place, StageBounds, StageResult
from planner.windows import Least, Runs, all_runs, distinct, possible_runs

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


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

    def copy(self) -> Incumbent:
        return replace(self, priced=self.priced.copy())

    def offer(self, layout: Layout, at_least: float) -> None:
        """Price a layout unless its bound says that it cannot be better."""
        if at_least >= self.seconds or layout in self.priced:
            return
        seconds = self.priced[layout] = self.price(layout)
        if seconds < self.seconds:
            self.seconds, self.layout = seconds, layout


class _Need(NamedTuple):
    """A family of paths as a stage sees it: `scale` x least of the weighted seconds + `more`."""

    path: Path
    scale: float
    weights: Weights
    more: float


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
        """Without sync, gradient sync counts nothing: a bound for every sharding and order."""
        self.chain = chain
        self.grid = grid
        self._splits = grid.schedule == "zb-h1"
        self.menus = menus
        overhead, m = source.costs.overhead, grid.num_micro_batches
        self.host = overhead.other_seconds_per_action
        self.jitter = source.costs.jitter * expected_maximum(grid.num_replicas)
        self.shape = PipelineShape(
            num_stages=grid.num_stages,
            num_micro_batches=m,
            transfers=source.transfer_seconds(grid),
            schedule=grid.schedule,
        )
        least_spread = self._least_of_all("spread")
        self.less = sum(source.rates.sync(grid, degree).less for degree in stage_degrees(grid.num_ranks))
        self.other = overhead.other_seconds_per_step
        self._costs = source.costs
        self._exposure = self._sharper(source.rates.exposures(grid.zero)) if with_sync else Exposure(0.0, 0.0)
        self.constant = self.other + self.jitter * float(np.sqrt(m * least_spread / grid.num_stages))
        if grid.zero:  # a sharded optimizer takes about as long on any stage
            self.constant += self._least_of_all("update") / grid.num_stages
        # The last backward pass also has host time.
        self.constant -= self._exposure.of_backward * self.host + self._exposure.of_sync * self.less
        self._bounds = StageBounds(menus, chain.counts, capacity, self.host)
        self._places = [Place(s == 0, grid.flights(s), grid.late(s)) for s in range(grid.num_stages)]
        self._alone = self._weights(1.0, 1.0)
        self._total = self._weights(1.0, 1.0, 0.0, 1.0)  # T with this stage's part of the optimizer
        self._forward = self._bounds.least(Weights(1.0, 0.0))
        self._late = self._weights(0.0, 0.0, weight=1.0)
        self._needed = [self._needs_of(stage) for stage in range(grid.num_stages)]
        self._exhausted: float | None = None  # the bound when nothing new was left to try
        self._offered: set[tuple[int, ...]] = set()

    @property
    def num_labels(self) -> int:
        return self._bounds.num_labels

    def run(self, incumbent: Best, tolerance: float, deadline: float) -> float:
        """Offer layouts to the incumbent; return a lower bound of this grid point's step seconds (`inf`: none fits).

        Ends early when the bound is within `tolerance` (relative) of the incumbent, or at the deadline.
        """
        if self._exhausted is not None:
            return self._exhausted
        bound = 0.0
        while True:
            below = self._below(incumbent.seconds * (1.0 - tolerance))
            if not np.isfinite(below):
                return np.inf
            found = self._partition(at_least=bound, below=below, accuracy=tolerance / 4.0)
            if found is None:
                return max(bound, below) + self.constant
            bound = found.bound
            if not self._offer(found, incumbent):
                self._exhausted = bound + self.constant
                return self._exhausted
            if time.monotonic() > deadline:
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
        forward, backward, weight, spread, update = (
            [self._sum(stage, column) for stage in stages]
            for column in ("forward", "backward", "weight", "spread", "update")
        )
        forward, backward = ([seconds + self.host for seconds in of] for of in (forward, backward))
        weight = [seconds + self.host for seconds in weight] if self._splits else [0.0] * len(stages)
        straggler = self.jitter * float(np.sqrt(self.grid.num_micro_batches * max(spread)))
        sync = max(0.0, self._sum(stages[0], "sync") - self.less)
        beside = backward[0] + weight[0]
        exposed = self._costs.exposed_gradient_sync(sync, beside, sharded=bool(self.grid.zero))
        once = exposed + max(update)
        pipeline = pipeline_bound(self.shape, forward, backward, weight)
        return pipeline + once + straggler + self.other

    def _sharper(self, candidates: tuple[Exposure, Exposure]) -> Exposure:
        """The bound of exposed sync that says more here; both hold.  Judged by an average stage's fastest options."""

        sync, backward = (self._least_of_all(name) / self.grid.num_stages for name in ("sync", "backward"))
        return max(candidates, key=lambda part: part.of_sync * sync - part.of_backward * backward)

    def _least_of_all(self, column: str) -> float:
        """Sum over all modules of the model of their least entry."""
        least = np.minimum.reduce([menu.least(getattr(menu.every, column)) for menu in self.menus])
        return float(self.chain.totals @ least)

    def _weights(
        self, forward: float, backward: float, sync: float = 0.0, share: float = 0.0, weight: float = 0.0
    ) -> Weights:
        """Of forward f + backward b + weight w + sync x exposed sync + share x this stage's part of the slowest
        optimizer.

        # max of u_s >= sum of u_s / P, so a path that visits every stage once may count u_s / P of each
        """
        exposure, part = self._exposure, 0.0 if self.grid.zero else share / self.grid.num_stages
        beside = sync * exposure.of_backward
        return Weights(
            forward, backward - beside, sync * exposure.of_sync, part, weight - beside if self._splits else 0.0
        )

    def _ending(self, place: Place) -> Weights:
        """T with what a stage does after its last action for another: weight gradients, sync, optimizer."""
        return self._weights(1.0, 1.0, 1.0, 1.0, place.late)

    def _once(self, place: Place) -> Weights:
        """That alone, without the optimizer."""
        return self._weights(0.0, 0.0, 1.0, 0.0, place.late)

    @cached_property
    def _shortest(self) -> tuple[float, float]:
        """No partition has a slowest forward (backward) pass below this."""
        found = []
        for weights in (Weights(1.0, 0.0), Weights(0.0, 1.0)):
            least = self._bounds.least(weights)
            matrix = np.where(self.chain.contents == NO_CONTENT, np.inf, least[self.chain.contents])
            reach = matrix[0]
            for _ in range(1, self.grid.num_stages):
                reach = np.maximum(reach[:, None], matrix).min(axis=0)
            found.append(float(reach[-1]))
        return found[0], found[1]

    def _needs_of(self, stage: int) -> list[_Need]:
        """The families of paths of a stage; of the first with its gradient sync.  Those that visit other stages once
        with its part of the optimizer.
        """
        m, sync = float(self.grid.num_micro_batches), (stage == 0) / self.grid.num_micro_batches
        found = []
        for path in self.shape.paths(stage):
            scale = m if stage == 0 or path.forward != path.backward else path.forward
            share = 1.0 / m if path.returns == 1 or self.grid.num_stages == 1 else 0.0
            late = self._places[0].late / scale if stage == 0 else 0.0
            weights = self._weights(
                path.forward / scale, path.backward / scale, sync, share, path.weight / scale + late
            )
            found.append(_Need(path, scale, weights, 0.0))
        if self.grid.schedule == "gpipe" and self.grid.num_stages > 1:
            forward, backward = self._shortest
            f_long, b_long = Path(1, m, 1.0), Path(1, 1.0, m)
            found.append(_Need(f_long, m, self._weights(1.0, 1.0 / m, sync, 1.0 / m), (m - 1.0) * backward))
            found.append(_Need(b_long, m, self._weights(1.0 / m, 1.0, sync, 1.0 / m), (m - 1.0) * forward))
        return found

    def _partition(self, *, at_least: float, below: float, accuracy: float) -> Partition | None:
        runs = possible_runs(self.shape, self.chain.contents, self._least, below)
        if runs is None:
            return None
        self._bound(runs)
        values = [self._stage_values(stage, own.numbers) for stage, own in enumerate(runs)]
        return best_partition(self.shape, runs, values, at_least=at_least, below=below, accuracy=accuracy)

    @cached_property
    def _least(self) -> Least:
        alone = np.minimum.reduce([menu.least(menu.every.forward + menu.every.backward) for menu in self.menus])
        return Least(
            forward=self._forward,
            backward=self._bounds.least(Weights(0.0, 1.0)),
            both=self._bounds.least(Weights(1.0, 1.0)),
            weight=self._bounds.least(self._late),
            along=self.chain.counts @ alone + 2.0 * self.host,
        )

    def _bound(self, runs: Sequence[Runs]) -> None:
        """Bound what runs contain, on the places of their stages."""
        numbers: dict[Place, list[Ints]] = {}
        asked: dict[Place, list[Weights]] = {}
        for stage, (place, own) in enumerate(zip(self._places, runs, strict=True)):
            numbers.setdefault(place, []).append(own.numbers)
            weights = asked.setdefault(place, [self._alone, self._total, self._ending(place)])
            weights += [need.weights for need in self._needed[stage]]
        some = {place: distinct(of, len(self.chain.counts)) for place, of in numbers.items()}
        self._bounds.bound({place: list(dict.fromkeys(of)) for place, of in asked.items()}, some)

    def _stage_values(self, stage: int, numbers: Ints) -> StageValues:
        """What the partition needs of a stage, for runs of these contents."""
        place, nothing = self._places[stage], np.zeros(numbers.size)

        def values(weights: Weights) -> Floats:
            return self._bounds.values(place, weights)[numbers]

        once = self._bounds.least(self._once(place))[numbers]
        return StageValues.of(
            [need.path for need in self._needed[stage]],
            [need.scale * values(need.weights) + need.more for need in self._needed[stage]],
            alone=values(self._alone),
            total=values(self._total),
            ending=values(self._ending(place)),
            once=nothing if place.first else once,
            forward=self._forward[numbers],
            weight=self._bounds.least(self._late)[numbers],
            first=once if place.first else nothing,
        )

    def _below(self, enough: float) -> float:
        """The makespan below which a partition is of interest: what reaches `enough` step seconds; without such a
        limit one that some partition reaches (every stage m times all seconds), `inf` when there is none.
        """
        if np.isfinite(enough):
            return enough - self.constant
        self._bound([all_runs(self.chain.contents)] * self.grid.num_stages)
        contents, m = self.chain.contents, self.grid.num_micro_batches
        reach = np.full(self.chain.num_positions, np.inf)
        reach[0] = 0.0
        for stage, place in enumerate(self._places):
            rows = [self._bounds.values(place, need.weights) * need.scale + need.more for need in self._needed[stage]]
            values = np.maximum.reduce([*rows, (m + 1.0) * self._bounds.values(place, self._ending(place))])
            reach = (reach[:, None] + np.where(contents == NO_CONTENT, np.inf, values[contents])).min(axis=0)
        return 1.001 * (m + 1) * (float(reach[-1]) + 2.0 * sum(self.shape.transfers))

    def _offer(self, found: Partition, incumbent: Best) -> bool:
        """Solve the stages of a path; offer the layout when all of them fit.  False when nothing of it was new."""
        known, new = self._bounds.num_solved, found.path not in self._offered
        self._offered.add(found.path)
        runs = [int(self.chain.contents[start, stop]) for start, stop in pairwise(found.path)]
        limits = found.bound - np.cumsum([0.0, *self._forward[runs]])
        chosen: list[StageResult] = []
        posts, longest = np.zeros(1 + len(self.shape.shorts)), 0.0
        for stage in reversed(range(len(runs))):
            best = self._best_on(stage, runs[stage], limits[stage], posts, longest)
            if best is None:
                return True
            result, longest = best
            chosen.insert(0, result)
            seconds = [self._bounds.seconds(result, weights) for weights in (self._total, self._alone)]
            self.shape.add(stage, posts, *seconds)
        boundaries = tuple(self.chain.positions[position] for position in found.path)
        layout = Layout(self.grid, boundaries, tuple(self._assignment(result) for result in chosen))
        incumbent.offer(layout, self.lower(chosen))
        return new or self._bounds.num_solved > known

    def _best_on(
        self, stage: int, content: int, limit: float, posts: Floats, longest: float
    ) -> tuple[StageResult, float] | None:
        """The exact solution of a stage and its longest path to the end; None when the content does not fit.  Of those
        for its binding constraints the shortest within `limit`, or the least above it.
        """
        place, needs = self._places[stage], self._needed[stage]
        later = longest + (2.0 * self.shape.transfers[stage] if stage + 1 < self.grid.num_stages else 0.0)

        trips, after_trips = self.shape.trips[stage], self.shape.after_trips(stage, posts)

        def own(value: Callable[[Weights], float]) -> list[float]:
            return [
                need.scale * value(need.weights) + need.more + float(self.shape.after(stage, need.path, posts))
                for need in needs
            ]

        def visiting(value: Callable[[Weights], float]) -> float:
            if not trips.rows.size:
                return 0.0
            around = after_trips + trips.stays * value(self._alone) + trips.weight * value(self._late)
            around += posts[0] + self.shape.transfers_after(stage)
            return float(around.max()) + (value(self._once(place)) if place.first else 0.0)

        bounded = own(lambda weights: float(self._bounds.values(place, weights)[content]))
        asked = [self._total, self._ending(place), needs[int(np.argmax(bounded))].weights]
        if place.first:
            asked += [need.weights for need in needs]
        candidates = []
        for weights in dict.fromkeys(asked):
            result = self._bounds.solve(place, weights, content)
            if result is None:
                return None
            seconds = partial(self._bounds.seconds, result)
            total = seconds(self._total)
            path = max(*own(seconds), visiting(seconds), total + later)
            ends = path + (0.0 if place.first else seconds(self._once(place)))
            ends = max(ends, seconds(self._ending(place)) + later)
            candidates.append((max(ends - limit, 0.0), path, total, result))
        _, path, _, result = min(candidates, key=lambda candidate: candidate[:3])
        return result, path

    def _assignment(self, stage: StageResult) -> Assignment:
        options = self.menus[stage.menu].options
        return tuple(
            tuple((options[kind][option], number) for option, number in chosen)
            for kind, chosen in enumerate(stage.choice.selection)
        )

    def _sum(self, stage: StageResult, column: str) -> float:
        tables: tuple[OptionTable, ...] = self.menus[stage.menu].tables
        return sum(
            number * float(getattr(tables[kind], column)[option])
            for kind, chosen in enumerate(stage.choice.selection)
            for option, number in chosen
        )
