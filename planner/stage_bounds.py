"""Seconds of every content on every kind of place in a pipeline: bounds at first, exact where asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.menu import Menu
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
        self._solvers = [StageSolver(menu, counts, capacity) for menu in menus]
        self._num_contents = len(counts)
        self._host = host
        self._values: dict[tuple[Place, Weights], Floats] = {}
        self._least: dict[Weights, Floats] = {}
        self._bounded: dict[Place, npt.NDArray[np.bool_]] = {}  # contents
        self._results: dict[tuple[Place, Weights, int], StageResult | None] = {}

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
        if weights not in self._least:
            least = np.minimum.reduce([solver.least(weights) for solver in self._solvers])
            self._least[weights] = least + self._host * weights.passes
        return self._least[weights]

    def bound(self, asked: Mapping[Place, Sequence[Weights]], contents: Mapping[Place, npt.NDArray[np.int64]]) -> None:
        """Bound these contents of every place, unless they were bounded before; always for the same weights."""
        if not self._bounded:
            for solver in self._solvers:
                solver.sample([(place.flights, weights) for place, of in asked.items() for weights in of])
        for place, weights in asked.items():
            known = self._bounded.setdefault(place, np.zeros(self._num_contents, dtype=bool))
            new = contents[place][~known[contents[place]]]
            known[new] = True
            bounds = np.minimum.reduce([solver.bounds(place.flights, weights, new) for solver in self._solvers])
            for own, row in zip(weights, bounds, strict=True):
                values = self._values.setdefault((place, own), np.full(self._num_contents, np.inf))
                values[new] = row + self._host * own.passes

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
        return self._solvers[result.menu].seconds(result.choice, weights) + self._host * weights.passes

    def _enter(self, place: Place, weights: Weights, content: int) -> None:
        """An exact result takes the place of its bound; what does not fit does not under any weights."""
        result = self._results[place, weights, content]
        if result is None:
            for at, values in self._values.items():
                if at[0] == place:
                    values[content] = np.inf
        elif (place, weights) in self._values:
            self._values[place, weights][content] = result.choice.weighted + self._host * weights.passes
