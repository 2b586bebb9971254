"""Interleaved schedules: V virtual stages on each of P stages, in even splits of the chain.

A split fixes what every stage holds, and each stage then runs with its fastest options within memory.  What is least
promising is never looked at closely: grid points, then their splits, then a split's variants are taken by their bounds,
the least first, and each bound is made sharper only when its turn comes:

    1  a grid point       its work, spread evenly over the stages
    2  a split            max over stages of pre_s + m T_s + post_s, one micro-batch through all; whatever the memory
                          the same within memory
    3  a variant of it    with what comes once a step; then simulated (`interleaved_point`)

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
from planner.interleaved_held import held_at_first
from planner.interleaved_point import Costs, Point, before, ring_seconds, there_and_back
from planner.interleaved_split import MOST_VIRTUAL, splits
from planner.interleaved_stage import Columns, Ints
from planner.menu import Menu
from planner.options import OptionSource
from planner.outcome import Outcome
from planner.space import SHARDED, Grid
from specs.model import Embedding, Head

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
            _Shape(space, grid, searcher.evenly(grid))
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

    def may_fit(self, grid: Grid, splits: Sequence[tuple[int, ...]], menu: Menu) -> npt.NDArray[np.bool_]:
        """Of each split of an interleaved grid point: False where a stage's smallest options are too much before its
        first backward.
        """
        columns = self._columns_of(grid, menu)
        held = held_at_first(grid)
        least = (columns.static + held[:, :, None, None] * columns.activation).min(axis=3)  # [stage, v, kind]
        counts = np.stack([self.counts(split) for split in splits])
        counts = counts.reshape(len(splits), grid.num_virtual, grid.num_stages, -1).swapaxes(1, 2)
        used = (counts * least).sum(axis=(2, 3))
        # That backward is of the last virtual stage.
        used += np.where(counts[:, :, -1] > 0, columns.working.min(axis=1), 0.0).max(axis=2)
        fits: npt.NDArray[np.bool_] = (used <= self._capacity - self.source.edge_bytes(grid)).all(axis=1)
        return fits

    def costs(self, variant: Grid, grid: Grid, number: int) -> Costs:
        """Of a variant and its interleaved grid point, with one of its menus."""
        key = (grid, number)
        if key not in self._costs:
            menu, room = self.menus(variant)[number], self._capacity - self.source.edge_bytes(grid)
            self._costs[key] = Costs(grid, menu, self._columns_of(grid, menu), room, self.source)
        return self._costs[key]

    def _columns_of(self, grid: Grid, menu: Menu) -> Columns:
        """A menu's costs in a ring: the first and the last stage have as many edges as the others, and a menu takes one
        from the embedding and the head.
        """
        columns, ends = self.columns(menu), [isinstance(m, Embedding | Head) for m in self.source.chain.modules]
        edge = self.source.edge_bytes(grid) / 2.0
        return replace(columns, static=columns.static + np.where(ends, edge, 0.0)[:, None])


class _Shape:
    """A grid point with its splits still to make."""

    closed = False
    num_labels = 0

    def __init__(self, space: Space, grid: Grid, bound: float) -> None:
        self.grid = grid
        self.bound = bound
        self._space = space

    def refine(self, best: Best) -> list[Split]:  # noqa: ARG002 (all nodes have it)
        """Every split of every V, bounded whatever the memory; those that cannot fit are out."""
        space, grid = self._space, self.grid
        rings = np.minimum.reduce([ring_seconds(variant, space.source) for variant in space.variants(grid)])
        found = []
        for number, menu in enumerate(space.menus(grid)):
            seconds = _least_by_module(space, menu)
            for num_virtual in range(2, MOST_VIRTUAL + 1):
                splits = space.splits(grid.num_stages, num_virtual)
                if splits:
                    virtual = replace(grid, schedule="interleaved", num_virtual=num_virtual)
                    bounds = _whatever_memory(virtual, splits, seconds, rings, space.source)
                    bounds[~space.may_fit(virtual, splits, menu)] = np.inf
                    found += [
                        Split(space, virtual, split, number, rings, max(bound, self.bound))
                        for split, bound in zip(splits, bounds.tolist(), strict=True)
                    ]
        return found


class Split:
    """A split of one grid point, and which of its menus the modules choose from."""

    closed = False
    num_labels = 0

    def __init__(
        self, space: Space, grid: Grid, boundaries: tuple[int, ...], menu: int, ring: Floats, bound: float
    ) -> None:
        """`ring`: the least seconds between stages of all variants."""
        self.grid = grid
        self.bound = bound
        self._space = space
        self.boundaries = boundaries
        self._menu = menu
        self._ring = ring
        self._within_memory = False

    def refine(self, best: Best) -> list[Split] | list[Point]:  # noqa: ARG002
        """The same within memory; then its variants."""
        space, found = self._space, list[Point]()
        counts = space.counts(self.boundaries).reshape(self.grid.num_virtual, self.grid.num_stages, -1)
        for variant in space.variants(replace(self.grid, schedule="1f1b", num_virtual=1)):
            grid = replace(variant, schedule="interleaved", num_virtual=self.grid.num_virtual)
            costs = space.costs(variant, grid, self._menu)
            if not self._within_memory:  # by the first variant, which shards the optimizer: the others hold no less
                self._within_memory = True
                self.bound = max(self.bound, there_and_back(grid, counts, costs, self._ring, space.source))
                return [self]
            point = Point(grid, self.boundaries, counts, costs, space.source)
            point.bound = max(point.bound, self.bound)
            found.append(point)
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
    grid: Grid, splits: Sequence[tuple[int, ...]], seconds: _LeastSeconds, ring: Floats, source: OptionSource
) -> Floats:
    """The second bound above, of each split."""
    overhead, shape = source.costs.overhead, (len(splits), grid.num_virtual, grid.num_stages)
    host = overhead.other_seconds_per_action
    at = np.array(splits)
    forward, backward, both = (np.diff(of[at]).reshape(shape) for of in seconds)
    pre, post = before(forward[:, 0] + host + ring), before(backward[:, 0] + host + ring)
    work = both.sum(axis=1) + 2.0 * host * grid.num_virtual
    links = 2.0 * (grid.num_virtual * float(ring.sum()) - float(ring[-1]))
    longest = np.maximum((pre + grid.num_micro_batches * work + post).max(axis=1), work.sum(axis=1) + links)
    bounds: Floats = longest + overhead.other_seconds_per_step
    return bounds
