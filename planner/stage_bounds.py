"""Seconds of every content on every kind of place in a pipeline: bounds at first, exact where asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.options import Menu
from planner.stage import Flights, StageChoice, StageSolver, Weights

Floats = npt.NDArray[np.float64]


class Place(NamedTuple):
    """What tells the stages of one grid point apart: what they hold, and weight gradients that come last."""

    first: bool
    flights: Flights
    late: int = 0


@dataclass(frozen=True)
class StageResult:
    """A solved stage, and which menu its options come from."""

    menu: int
    choice: StageChoice


class StageBounds:
    """Least weighted seconds of contents whose modules all choose from one of `menus`, with `host` seconds for each
    pass; `capacity` in bytes.
    """

    def __init__(self, menus: Sequence[Menu], counts: npt.NDArray[np.int64], capacity: float, host: float) -> None:
        self._solvers = [StageSolver(menu.tables, counts, capacity) for menu in menus]
        self._num_contents = len(counts)
        self._host = host
        self._values: dict[tuple[Place, Weights], Floats] = {}
        self._results: dict[tuple[Place, Weights, int], StageResult | None] = {}
        self._num_bounded = 0

    @property
    def num_labels(self) -> int:
        return sum(solver.num_labels for solver in self._solvers)

    @property
    def num_solved(self) -> int:
        return len(self._results)

    def values(self, place: Place, weights: Weights) -> Floats:
        """By content; `inf` where it does not fit, or was not asked for."""
        return self._values[place, weights]

    def least(self, weights: Weights) -> Floats:
        """By content, memory aside."""
        least: Floats = np.minimum.reduce([solver.least(weights) for solver in self._solvers])
        return least + self._host * weights.passes

    def bound(self, rows: Iterable[tuple[Place, Weights]], contents: npt.NDArray[np.int64]) -> None:
        """Bound these contents, unless as many were bounded before."""
        if self._values and len(contents) <= self._num_bounded:
            return
        self._num_bounded = len(contents)
        rows = list(dict.fromkeys(rows))
        asked = list(dict.fromkeys((place.flights, weights) for place, weights in rows))
        bounds = np.minimum.reduce([solver.bounds(asked, contents) for solver in self._solvers])
        index = {row: number for number, row in enumerate(asked)}
        for place, weights in rows:
            host = self._host * weights.passes
            values = np.full(self._num_contents, np.inf)
            values[contents] = bounds[index[place.flights, weights]] + host
            self._values[place, weights] = values
        for place, weights, content in self._results:
            self._enter(place, weights, content)

    def solve(self, place: Place, weights: Weights, content: int) -> StageResult | None:
        """The best choice of a content in weighted seconds, over the menus; None when it does not fit."""
        key = (place, weights, content)
        if key not in self._results:
            solved = [(menu, s.solve(content, place.flights, weights)) for menu, s in enumerate(self._solvers)]
            fitting = [StageResult(menu, choice) for menu, choice in solved if choice is not None]
            self._results[key] = min(fitting, key=lambda result: result.choice.weighted, default=None)
            self._enter(*key)
        return self._results[key]

    def seconds(self, result: StageResult, weights: Weights) -> float:
        """Weighted seconds of a solved stage."""
        weighted = self._solvers[result.menu].weighted(weights)
        chosen = enumerate(result.choice.selection)
        seconds = sum(n * float(weighted[kind][option]) for kind, options in chosen for option, n in options)
        return seconds + self._host * weights.passes

    def _enter(self, place: Place, weights: Weights, content: int) -> None:
        """An exact result takes the place of its bound; what does not fit does not under any weights."""
        result = self._results[place, weights, content]
        if result is None:
            for at, values in self._values.items():
                if at[0] == place:
                    values[content] = np.inf
        elif (place, weights) in self._values:
            self._values[place, weights][content] = result.choice.weighted + self._host * weights.passes
