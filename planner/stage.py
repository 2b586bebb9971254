"""Stages of one grid point: for a content and a number of micro-batches in flight, the least seconds that fit.

    memory of a stage = sum over modules of (static + in flight x activation) + largest working memory

The largest working memory is no sum, so each of its possible values W is tried: only options that work within W,
and W bytes less for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from planner.knapsack import Label, choose, hull

Floats = npt.NDArray[np.float64]

# Prices of a byte at which all contents are bounded at once; any subset of the true ones gives valid bounds.
MAX_PRICES = 48


@dataclass(frozen=True)
class OptionTable:
    """The ways to run one distinct module, as parallel arrays.

    Seconds of a micro-batch's forward and backward with communication; seconds of gradient sync and of the optimizer
    once a step (lower bounds that add up over modules); sum of squares of the two passes' computing seconds; bytes
    held always, per micro-batch in flight, and at work.
    """

    forward: Floats
    backward: Floats
    sync: Floats
    update: Floats
    spread: Floats
    static: Floats
    activation: Floats
    working: Floats


@dataclass(frozen=True)
class StageChoice:
    """A solved stage.  `selection[k]` lists (option, count) of distinct module k; `weighted` is what was minimised."""

    weighted: float
    selection: tuple[tuple[tuple[int, int], ...], ...]


class StageSolver:
    """Solves stages by content: least weighted seconds within `capacity` bytes.

    # weighted = forward + (1 - h) backward + a sync + b update
    #   a, b weights of once-a-step seconds, h the part of backward that hides gradient sync
    """

    def __init__(
        self,
        tables: Sequence[OptionTable],
        counts: npt.NDArray[np.int64],
        capacity: float,
        *,
        sync_weight: float,
        update_weight: float,
        hiding: float,
    ) -> None:
        self.tables = tables
        self.counts = counts
        self.capacity = capacity
        self.num_labels = 0
        self._weights = counts.astype(np.float64)  # floats multiply fast
        self.weighted = [
            table.forward + (1.0 - hiding) * table.backward + sync_weight * table.sync + update_weight * table.update
            for table in tables
        ]
        least = np.array([table.working.min() for table in tables])
        self._least_working: Floats = np.where(counts > 0, least, 0.0).max(axis=1)
        self._exact: dict[tuple[int, int], StageChoice | None] = {}

    def memory(self, kind: int, in_flight: int) -> Floats:
        """Bytes of each option of a distinct module, without working memory."""
        table = self.tables[kind]
        return table.static + in_flight * table.activation

    def bounds(self, in_flight: Sequence[int]) -> Floats:
        """Lower bounds of weighted seconds, [in flight, content]; `inf` where a content cannot fit."""
        prices = _prices(self.weighted, [self.memory(k, f) for k in range(len(self.tables)) for f in set(in_flight)])
        flights = np.array(in_flight, dtype=np.float64)[:, None]
        memory = [t.static + flights * t.activation for t in self.tables]
        duals = np.stack(
            [
                (w[None, :, None] + m[:, :, None] * prices).min(axis=1)
                for w, m in zip(self.weighted, memory, strict=True)
            ]
        )
        values: Floats = np.tensordot(self._weights, duals, axes=(1, 0))
        values -= (self.capacity - self._least_working)[:, None, None] * prices
        result: Floats = values.max(axis=2).T
        least_memory = np.stack([m.min(axis=1) for m in memory]).T @ self._weights.T
        result[least_memory + self._least_working > self.capacity] = np.inf
        return result

    def solve(self, content: int, in_flight: int) -> StageChoice | None:
        """The exact optimum in weighted seconds; None when the content does not fit."""
        key = (content, in_flight)
        if key not in self._exact:
            self._exact[key] = self._solve(content, in_flight)
        return self._exact[key]

    def _solve(self, content: int, in_flight: int) -> StageChoice | None:
        kinds, counts, memory, works = self._problem(content, in_flight)
        fastest = [int(np.lexsort((m, self.weighted[k]))[0]) for k, m in zip(kinds, memory, strict=True)]
        used = sum(n * float(m[c]) for n, m, c in zip(counts, memory, fastest, strict=True))
        if used + max(float(self.tables[k].working[c]) for k, c in zip(kinds, fastest, strict=True)) <= self.capacity:
            return self._choice(kinds, [[(c, n)] for n, c in zip(counts, fastest, strict=True)])
        best: tuple[float, list[list[tuple[int, int]]]] | None = None
        for work in works:
            usable, weighted, bytes_ = self._within(kinds, memory, work)
            cutoff = np.inf if best is None else best[0]
            label = choose(counts, weighted, bytes_, self.capacity - work, cutoff=cutoff)
            self.num_labels += 1
            if label is not None:
                best = (label.seconds, _renumber(label, usable))
        return None if best is None else self._choice(kinds, best[1])

    def _problem(self, content: int, in_flight: int) -> tuple[list[int], list[int], list[Floats], list[float]]:
        """Kinds present, their counts and bytes, and the possible largest working memories, descending."""
        kinds = [int(kind) for kind in np.flatnonzero(self.counts[content])]
        counts = [int(self.counts[content, kind]) for kind in kinds]
        memory = [self.memory(kind, in_flight) for kind in kinds]
        least = max(float(self.tables[kind].working.min()) for kind in kinds)
        every = np.unique(np.concatenate([self.tables[kind].working for kind in kinds]))
        return kinds, counts, memory, every[every >= least][::-1].tolist()

    def _within(
        self, kinds: list[int], memory: list[Floats], work: float
    ) -> tuple[list[npt.NDArray[np.int64]], list[Floats], list[Floats]]:
        """Options of each kind that work within `work` bytes, with their weighted seconds and bytes."""
        usable = [np.flatnonzero(self.tables[kind].working <= work) for kind in kinds]
        weighted = [self.weighted[kind][u] for kind, u in zip(kinds, usable, strict=True)]
        return usable, weighted, [m[u] for m, u in zip(memory, usable, strict=True)]

    def _choice(self, kinds: list[int], selection: list[list[tuple[int, int]]]) -> StageChoice:
        weighted = 0.0
        by_kind: list[tuple[tuple[int, int], ...]] = [()] * len(self.tables)
        for kind, chosen in zip(kinds, selection, strict=True):
            by_kind[kind] = tuple(chosen)
            weighted += sum(number * float(self.weighted[kind][option]) for option, number in chosen)
        return StageChoice(weighted, tuple(by_kind))


def _renumber(label: Label, usable: list[npt.NDArray[np.int64]]) -> list[list[tuple[int, int]]]:
    return [[(int(u[option]), n) for option, n in chosen] for chosen, u in zip(label.selection, usable, strict=True)]


def _prices(weighted: Sequence[Floats], memory: Sequence[Floats]) -> Floats:
    """Zero and slopes of convex hulls: the prices of a byte at which some module changes its option.

    `memory` may hold the same modules several times, for different numbers in flight.
    """
    slopes = {0.0}
    for index, m in enumerate(memory):
        w = weighted[index * len(weighted) // len(memory)]
        points = hull(w, m)
        slopes.update(float((w[a] - w[b]) / (m[b] - m[a])) for a, b in pairwise(points))
    ordered = np.array(sorted(slopes))
    if ordered.size > MAX_PRICES:
        ordered = ordered[np.linspace(0, ordered.size - 1, MAX_PRICES).round().astype(np.int64)]
    return ordered
