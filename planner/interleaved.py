"""Interleaved schedules: V virtual stages on each of P stages, in even splits of the chain.

A split fixes what every stage holds, and each stage then runs with its fastest options within memory.  What is least
promising is never looked at closely: grid points, then their splits, then a split's variants are taken by their bounds,
the least first, and each bound is made sharper only when its turn comes:

    1  a grid point       its work, spread evenly over the stages
    2  a split            max over stages of pre_s + m T_s + post_s, one micro-batch through all; whatever the memory
    3  a variant of it    the same within memory, with what comes once a step; then simulated (`interleaved_point`)

    T_s = sum over the virtual stages of s of (f + b)      x seconds between stages; on virtual stage 0
    pre_s = sum over i < s of (f_i + x_i)                  post_s = sum over i < s of (b_i + x_i)
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from planner.goal import Worth, WorthView
from planner.grid_search import Best, Incumbent
from planner.interleaved_point import Costs, Point, before, ring_seconds
from planner.interleaved_split import MOST_VIRTUAL, splits
from planner.interleaved_stage import Columns, Ints
from planner.options import Menu, OptionSource
from planner.outcome import Outcome
from planner.space import SHARDED, Grid

if TYPE_CHECKING:
    from planner.search import Searcher

Floats = npt.NDArray[np.float64]


class Node(Protocol):
    """A part of the space.  `bound`: step seconds that none of its layouts beats; `closed`: it gets no sharper."""

    grid: Grid
    bound: float
    closed: bool
    num_labels: int

    def refine(self, best: Best) -> Sequence[Node]:
        """What takes its place."""
        ...


class Interleaved:
    """The interleaved layouts of one problem.  `nodes`: as finely as they have been looked at; `possible`: some exist.

    Left out are stages that the user gave, sequences that blocks share, and more sharded than the optimizer.
    """

    def __init__(self, searcher: Searcher) -> None:
        space = Space(searcher)
        free = searcher.rules.boundaries is None
        self.nodes: list[Node] = [
            _Shape(space, grid, searcher.quick_bound(grid))
            for grid in searcher.grids
            if free and grid.schedule == "1f1b" and grid.zero not in SHARDED and grid.context == 1
            if grid.num_stages > 1 and grid.num_micro_batches > 1
        ]
        self.possible = bool(self.nodes)

    def search(
        self, incumbent: Incumbent, outcome: Outcome, worth: Worth | None, *, tolerance: float, deadline: float
    ) -> None:
        """Add the best interleaved layouts to an outcome; with `worth`, all in seconds delivered."""
        serial = count()

        def entry(node: Node, least: float) -> tuple[float, int, Node]:
            delivered = node.bound / worth(node.grid, node.bound) if worth and np.isfinite(node.bound) else node.bound
            return max(least, delivered), next(serial), node

        queue = [entry(node, 0.0) for node in self.nodes]
        heapq.heapify(queue)
        settled: list[Node] = []
        while queue:
            least, _, node = queue[0]
            late = time.monotonic() > deadline
            if late or least >= incumbent.seconds * (1.0 - tolerance):
                outcome.complete = outcome.complete and not late
                outcome.pruned["time limit" if late else "seconds, interleaved"] += len(queue)
                outcome.bound = min(outcome.bound, least)
                break
            heapq.heappop(queue)
            if node.closed:
                outcome.bound = min(outcome.bound, least)
                settled.append(node)
                continue
            best = WorthView(incumbent, worth(node.grid, node.bound)) if worth else incumbent
            labels = node.num_labels
            for other in node.refine(best):
                if np.isfinite(other.bound):
                    heapq.heappush(queue, entry(other, least))
                else:
                    outcome.pruned["memory, interleaved"] += 1
            outcome.labels += node.num_labels - labels
        self.nodes = [*settled, *(node for _, _, node in queue)]


class Space:
    """What splits are made of: the menus and variants of a searcher's grid points."""

    def __init__(self, searcher: Searcher) -> None:
        self._model = searcher.model
        self.source = searcher.source
        self._capacity = searcher.capacity
        self.variants = searcher.distinct_variants
        self._menus = searcher.menus
        kinds = np.array(searcher.chain.kinds)
        one_hot = np.eye(len(searcher.chain.modules), dtype=np.int64)[kinds]
        self._before = np.concatenate([np.zeros_like(one_hot[:1]), one_hot.cumsum(axis=0)])
        self._costs: dict[tuple[Grid, int], Costs] = {}
        self._splits: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        self._columns: dict[int, tuple[Menu, Columns]] = {}  # by identity; a menu is kept so that it stays the same

    def menus(self, grid: Grid) -> list[Menu]:
        """A grid point's menus, one for each way to meet the user's rules that tie modules together."""
        return [menu for (menu,) in self._menus(grid, "cuts")]

    def splits(self, num_stages: int, num_virtual: int) -> list[tuple[int, ...]]:
        """Where the runs of every split begin."""
        key = (num_stages, num_virtual)
        if key not in self._splits:
            self._splits[key] = list(splits(self._model, *key))
        return self._splits[key]

    def columns(self, menu: Menu) -> Columns:
        """A menu's costs; menus are kept by their source, so that each is read once."""
        if id(menu) not in self._columns:
            self._columns[id(menu)] = menu, Columns.of(menu)
        return self._columns[id(menu)][1]

    def counts(self, boundaries: tuple[int, ...]) -> Ints:
        """Modules of each kind in the runs of a split, [run, kind]."""
        counts: Ints = np.diff(self._before[list(boundaries)], axis=0)
        return counts

    def costs(self, variant: Grid, grid: Grid, number: int) -> Costs:
        """Of a variant and its interleaved grid point, with one of its menus.

        A virtual stage sends and receives as a stage does, so the edges of all take V times the bytes.
        """
        key = (grid, number)
        if key not in self._costs:
            menu = self.menus(variant)[number]
            capacity = self._capacity - grid.num_virtual * self.source.edge_bytes(variant)
            self._costs[key] = Costs(grid, menu, self.columns(menu), capacity, self.source)
        return self._costs[key]


class _Shape:
    """A grid point with its splits still to make."""

    closed = False
    num_labels = 0

    def __init__(self, space: Space, grid: Grid, bound: float) -> None:
        self.grid = grid
        self.bound = bound
        self._space = space

    def refine(self, best: Best) -> list[_Split]:  # noqa: ARG002 (all nodes have it)
        """Every split of every V, bounded whatever the memory."""
        space, grid = self._space, self.grid
        rings = np.minimum.reduce([ring_seconds(variant, space.source) for variant in space.variants(grid)])
        found = []
        for number, menu in enumerate(space.menus(grid)):
            seconds = _least_by_module(space, menu)
            for num_virtual in range(2, MOST_VIRTUAL + 1):
                virtual = replace(grid, schedule="interleaved", num_virtual=num_virtual)
                for boundaries in space.splits(grid.num_stages, num_virtual):
                    bound = _whatever_memory(virtual, boundaries, seconds, rings, space.source)
                    found.append(_Split(space, virtual, boundaries, number, max(bound, self.bound)))
        return found


class _Split:
    """A split of one grid point, and which of its menus the modules choose from."""

    closed = False
    num_labels = 0

    def __init__(self, space: Space, grid: Grid, boundaries: tuple[int, ...], menu: int, bound: float) -> None:
        self.grid = grid
        self.bound = bound
        self._space = space
        self._boundaries = boundaries
        self._menu = menu

    def refine(self, best: Best) -> list[Point]:  # noqa: ARG002
        """Its variants, bounded within memory."""
        space = self._space
        counts = space.counts(self._boundaries).reshape(self.grid.num_virtual, self.grid.num_stages, -1)
        found = []
        for variant in space.variants(replace(self.grid, schedule="1f1b", num_virtual=1)):
            grid = replace(variant, schedule="interleaved", num_virtual=self.grid.num_virtual)
            point = Point(grid, self._boundaries, counts, space.costs(variant, grid, self._menu), space.source)
            point.bound = max(point.bound, self.bound)
            found.append(point)
            if not np.isfinite(point.bound):
                break  # those that shard the optimizer come first: the others hold no less
        return found


class _LeastSeconds(NamedTuple):
    """Of all modules before each: forward, backward and both."""

    forward: Floats
    backward: Floats
    both: Floats


def _least_by_module(space: Space, menu: Menu) -> _LeastSeconds:
    columns, kinds = space.columns(menu), np.array(space.source.chain.kinds)
    every = (columns.forward, columns.backward, columns.forward + columns.backward)
    return _LeastSeconds(*(np.concatenate([[0.0], of.min(axis=1)[kinds].cumsum()]) for of in every))


def _whatever_memory(
    grid: Grid, boundaries: tuple[int, ...], seconds: _LeastSeconds, ring: Floats, source: OptionSource
) -> float:
    """The second bound above."""
    overhead, shape = source.costs.overhead, (grid.num_virtual, grid.num_stages)
    host = overhead.other_seconds_per_action
    at = np.array(boundaries)
    forward, backward, both = (np.diff(of[at]).reshape(shape) for of in seconds)
    pre, post = before(forward[0] + host + ring), before(backward[0] + host + ring)
    work = both.sum(axis=0) + 2.0 * host * grid.num_virtual
    links = 2.0 * (grid.num_virtual * float(ring.sum()) - float(ring[-1]))
    longest = max(float((pre + grid.num_micro_batches * work + post).max()), float(work.sum()) + links)
    return longest + overhead.other_seconds_per_step
