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
from planner.space import Flight

Floats = npt.NDArray[np.float64]
Flights = tuple[Flight, ...]

# Prices of a byte at which all contents are bounded at once; any subset of the true ones gives valid bounds.
MAX_PRICES = 48
# Rows whose own prices are taken.
PRICED_ROWS = 6


@dataclass(frozen=True)
class OptionTable:
    """The ways to run one distinct module, as parallel arrays.

    Seconds of a micro-batch's forward and backward with communication; seconds of gradient sync and of the optimizer
    once a step (lower bounds that add up over modules); sum of squares of the two passes' computing seconds; bytes
    held always, per micro-batch in flight, and at work.  Where the schedule splits the backward pass, `backward` is
    its part for the input, `weight` the seconds of its part for the weights, and `deferred` the bytes of a
    micro-batch that waits for that; else both are 0.
    """

    forward: Floats
    backward: Floats
    sync: Floats
    update: Floats
    spread: Floats
    static: Floats
    activation: Floats
    working: Floats
    weight: Floats
    deferred: Floats


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

    def __init__(self, tables: Sequence[OptionTable], counts: npt.NDArray[np.int64], capacity: float) -> None:
        self.tables = tables
        self.counts = counts
        self.capacity = capacity
        self.num_labels = 0
        self._counts = counts.astype(np.float64)  # floats multiply fast
        least = np.array([table.working.min() for table in tables])
        self._least_working: Floats = np.where(counts > 0, least, 0.0).max(axis=1)
        self._weighted: dict[Weights, list[Floats]] = {}
        self._prices: Floats = np.zeros(1)
        self._exact: dict[tuple[int, Flights, Weights], StageChoice | None] = {}

    def weighted(self, weights: Weights) -> list[Floats]:
        """Weighted seconds of each option, by distinct module."""
        if weights not in self._weighted:
            self._weighted[weights] = [
                weights.forward * table.forward
                + weights.backward * table.backward
                + weights.sync * table.sync
                + weights.update * table.update
                + weights.weight * table.weight
                for table in self.tables
            ]
        return self._weighted[weights]

    def memory(self, kind: int, flights: Flights) -> Floats:
        """Bytes of each option of a distinct module, without working memory; of several moments the most."""
        table = self.tables[kind]
        held = [kept * table.activation + deferred * table.deferred for kept, deferred in flights]
        most: Floats = table.static + (held[0] if len(held) == 1 else np.maximum.reduce(held))
        return most

    def least(self, weights: Weights) -> Floats:
        """Least weighted seconds of every content, memory aside."""
        seconds: Floats = self._counts @ np.array([w.min() for w in self.weighted(weights)])
        return seconds

    def sample(self, rows: Sequence[tuple[Flights, Weights]]) -> None:
        """Take the prices of a byte at which contents are bounded from some of these rows of (moments, weights)."""
        some = [rows[i] for i in sorted({round(i) for i in np.linspace(0, len(rows) - 1, PRICED_ROWS)})]
        kinds = range(len(self.tables))
        self._prices = byte_prices(
            [(self.weighted(w)[k], self.memory(k, flights[:1])) for flights, w in some for k in kinds],
            MAX_PRICES,
        )

    def bounds(self, flights: Flights, weights: Sequence[Weights], contents: npt.NDArray[np.int64]) -> Floats:
        """Lower bounds of weighted seconds, [weights, content]; `inf` where a content cannot fit at the first moment.
        Any price of a byte gives a bound.
        """
        prices, counts, kinds = self._prices, self._counts[contents], range(len(self.tables))
        room = self.capacity - self._least_working[contents]
        memory = [self.memory(kind, flights[:1]) for kind in kinds]
        duals = np.empty((len(self.tables), len(weights), prices.size))
        for kind, held in enumerate(memory):
            seconds = np.stack([self.weighted(own)[kind] for own in weights])
            duals[kind] = (seconds[:, :, None] + (held[:, None] * prices)).min(axis=1)
        least = (counts @ duals.reshape(len(self.tables), -1)).reshape(contents.size, len(weights), prices.size)
        least -= (room[:, None] * prices)[:, None, :]
        result: Floats = least.max(axis=2).T
        result[:, counts @ np.array([held.min() for held in memory]) > room] = np.inf
        return result

    def solve(self, content: int, flights: Flights, weights: Weights) -> StageChoice | None:
        """The optimum in weighted seconds; None when the content does not fit."""
        key = (content, flights, weights)
        if key not in self._exact:
            self._exact[key] = self._solve_all(content, flights, self.weighted(weights))
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
        used = sum(n * float(self.memory(k, flights)[option]) for k, option, n in chosen)
        return used + max(float(self.tables[k].working[option]) for k, option, _ in chosen) <= self.capacity

    def _solve(self, content: int, flights: Flights, weighted: Sequence[Floats]) -> StageChoice | None:
        kinds = np.flatnonzero(self.counts[content]).tolist()
        counts = self.counts[content, kinds].tolist()
        memory = [self.memory(kind, flights) for kind in kinds]
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
