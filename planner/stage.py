"""Stages of one grid point: for a content and a number of micro-batches in flight, the least seconds that fit.

    memory of a stage = sum over modules of (static + kept x activation + deferred x what waits) + largest working
    memory, at the moment where that is most

The largest working memory is no sum, so each of its possible values W is tried: only options that work within W,
and W bytes less for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.knapsack import choose_beside, hull
from planner.menu import Menu
from planner.space import Flight

Floats = npt.NDArray[np.float64]
Flights = tuple[Flight, ...]

# Prices of a byte at which all contents are bounded at once; any subset of the true ones gives valid bounds.
MAX_PRICES = 48
# Rows whose own prices are taken.
PRICED_ROWS = 3


@dataclass(frozen=True)
class StageChoice:
    """A solved stage.  `selection[k]` lists (option, count) of distinct module k; `weighted` is the least of what was
    minimised: the selection's, or less where it could not be made to fit at two moments exactly.
    """

    weighted: float
    selection: tuple[tuple[tuple[int, int], ...], ...]


class Weights(NamedTuple):
    """Of a module's five kinds of seconds in what a stage minimises."""

    forward: float = 1.0
    backward: float = 1.0
    sync: float = 0.0
    update: float = 0.0
    weight: float = 0.0

    @property
    def passes(self) -> float:
        """Actions, each with its host time."""
        return self.forward + self.backward + self.weight


class StageSolver:
    """Solves stages by content: least weighted seconds within `capacity` bytes."""

    def __init__(self, menu: Menu, counts: npt.NDArray[np.int64], capacity: float) -> None:
        self._menu = menu
        self.tables = menu.tables
        self.counts = counts
        self.capacity = capacity
        self.num_labels = 0
        self._counts = counts.astype(np.float64)  # floats multiply fast
        self._least_working: Floats = np.where(counts > 0, menu.least(menu.every.working), 0.0).max(axis=1)
        self._weighted: dict[Weights, Floats] = {}
        self._prices: Floats = np.zeros(1)
        self._exact: dict[tuple[int, Flights, Weights], StageChoice | None] = {}

    def weighted(self, weights: Weights) -> Floats:
        """Weighted seconds of each option, of all distinct modules in turn."""
        if weights not in self._weighted:
            every = self._menu.every
            self._weighted[weights] = (
                weights.forward * every.forward
                + weights.backward * every.backward
                + weights.sync * every.sync
                + weights.update * every.update
                + weights.weight * every.weight
            )
        return self._weighted[weights]

    def memory(self, flights: Flights) -> Floats:
        """Bytes of each option of all distinct modules in turn, without working memory; of several moments the most."""
        every = self._menu.every
        held = [kept * every.activation + deferred * every.deferred for kept, deferred in flights]
        most: Floats = every.static + (held[0] if len(held) == 1 else np.maximum.reduce(held))
        return most

    def least(self, weights: Weights) -> Floats:
        """Least weighted seconds of every content, memory aside."""
        seconds: Floats = self._counts @ self._menu.least(self.weighted(weights))
        return seconds

    def sample(self, rows: Sequence[tuple[Flights, Weights]]) -> None:
        """Take the prices of a byte at which contents are bounded from some of these rows of (moments, weights)."""
        some = [rows[i] for i in sorted({round(i) for i in np.linspace(0, len(rows) - 1, PRICED_ROWS)})]
        self._prices = byte_prices(
            [
                pair
                for flights, w in some
                for pair in zip(self._of_kinds(self.weighted(w)), self._of_kinds(self.memory(flights[:1])), strict=True)
            ],
            MAX_PRICES,
        )

    def bounds(self, flights: Flights, weights: Sequence[Weights], contents: npt.NDArray[np.int64]) -> Floats:
        """Lower bounds of weighted seconds, [weights, content]; `inf` where a content cannot fit at the first moment.
        Any price of a byte gives a bound.
        """
        prices, counts, memory = self._prices, self._counts[contents], self.memory(flights[:1])
        room = self.capacity - self._least_working[contents]
        seconds = np.array([self.weighted(own) for own in weights])
        duals = seconds.T[:, :, None] + (memory[:, None] * prices)[:, None, :]  # [option, weights, price]
        least_duals = np.minimum.reduceat(duals, self._menu.firsts, axis=0)
        least = (counts @ least_duals.reshape(len(least_duals), -1)).reshape(contents.size, len(weights), prices.size)
        least -= (room[:, None] * prices)[:, None, :]
        result: Floats = least.max(axis=2).T
        result[:, counts @ self._menu.least(memory) > room] = np.inf
        return result

    def seconds(self, choice: StageChoice, weights: Weights) -> float:
        """Weighted seconds of a solved stage."""
        weighted = self._of_kinds(self.weighted(weights))
        chosen = enumerate(choice.selection)
        return sum(n * float(weighted[kind][option]) for kind, options in chosen for option, n in options)

    def _of_kinds(self, values: Floats) -> list[Floats]:
        """Values of all options by distinct module."""
        stops = [*self._menu.firsts[1:].tolist(), values.size]
        return [values[a:b] for a, b in zip(self._menu.firsts.tolist(), stops, strict=True)]

    def solve(self, content: int, flights: Flights, weights: Weights) -> StageChoice | None:
        """The optimum in weighted seconds; None when the content does not fit."""
        key = (content, flights, weights)
        if key not in self._exact:
            self._exact[key] = self._solve_all(content, flights, self._of_kinds(self.weighted(weights)))
        return self._exact[key]

    def _solve_all(self, content: int, flights: Flights, weighted: Sequence[Floats]) -> StageChoice | None:
        """The optimum for one moment is that for all when it fits at the others too; if none does, the optimum for
        modules that are each held at their own fullest moment, with what is proven of all.
        """
        least, some = 0.0, StageChoice(0.0, ())
        for flight in flights:
            found = self._solve(content, (flight,), weighted)
            if found is None or all(self._fits(found, (other,)) for other in flights):
                return found
            least = max(least, found.weighted)
            some = found
        careful = self._solve(content, flights, weighted)
        return replace(some if careful is None else careful, weighted=least)

    def _fits(self, choice: StageChoice, flights: Flights) -> bool:
        """Whether what a choice holds at a moment, and its largest working memory, are within the capacity."""
        chosen = [(k, option, n) for k, options in enumerate(choice.selection) for option, n in options]
        memory = self._of_kinds(self.memory(flights))
        used = sum(n * float(memory[k][option]) for k, option, n in chosen)
        return used + max(float(self.tables[k].working[option]) for k, option, _ in chosen) <= self.capacity

    def _solve(self, content: int, flights: Flights, weighted: Sequence[Floats]) -> StageChoice | None:
        kinds = np.flatnonzero(self.counts[content]).tolist()
        counts = self.counts[content, kinds].tolist()
        of_kinds = self._of_kinds(self.memory(flights))
        memory = [of_kinds[kind] for kind in kinds]
        fastest = [int(np.lexsort((m, weighted[k]))[0]) for k, m in zip(kinds, memory, strict=True)]
        used = sum(n * float(m[c]) for n, m, c in zip(counts, memory, fastest, strict=True))
        if used + max(float(self.tables[k].working[c]) for k, c in zip(kinds, fastest, strict=True)) <= self.capacity:
            return _choice(kinds, [[(c, n)] for n, c in zip(counts, fastest, strict=True)], weighted)
        label, asked = choose_beside(
            counts,
            [weighted[kind] for kind in kinds],
            memory,
            [self.tables[kind].working for kind in kinds],
            self.capacity,
            self._prices,
        )
        self.num_labels += asked
        return None if label is None else _choice(kinds, label.selection, weighted)


def _choice(kinds: list[int], selection: list[list[tuple[int, int]]], weighted: Sequence[Floats]) -> StageChoice:
    total = 0.0
    by_kind: list[tuple[tuple[int, int], ...]] = [()] * len(weighted)
    for kind, chosen in zip(kinds, selection, strict=True):
        by_kind[kind] = tuple(chosen)
        total += sum(number * float(weighted[kind][option]) for option, number in chosen)
    return StageChoice(total, tuple(by_kind))


def byte_prices(sample: Sequence[tuple[Floats, Floats]], most: int) -> Floats:
    """Zero and slopes of convex hulls of (seconds, bytes): prices of a byte at which some module changes its option; at
    `most` so many of them.
    """
    slopes = {0.0}
    for seconds, memory in sample:
        points = hull(seconds, memory)
        slopes.update(float((seconds[a] - seconds[b]) / (memory[b] - memory[a])) for a, b in pairwise(points))
    ordered = np.array(sorted(slopes))
    if ordered.size > most:
        ordered = ordered[np.linspace(0, ordered.size - 1, most).round().astype(np.int64)]
    return ordered
