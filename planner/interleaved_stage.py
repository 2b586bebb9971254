"""A stage of an interleaved schedule: the best options of its virtual stages together, within the memory that it has.

    minimise    sum over virtual stages v, kinds k, options c of  n[v, k, c] seconds[k, c]
    subject to  sum over c of n[v, k, c] = counts[v, k]
                sum n[v, k, c] (static[k, c] + held[v] activation[k, c]) + largest working[k, c] <= capacity

held[v] is the number of micro-batches whose activations virtual stage v keeps; the largest working memory is that of
the virtual stage at work.  At the moments at which a stage is fullest both differ: the program has the means of held[v]
and the largest of all that work at those moments, and what it finds is tried at each moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.interleaved_held import Moments
from planner.knapsack import choose_beside
from planner.menu import Menu
from planner.stage import byte_prices

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Prices of a byte at which a stage is bounded.
MAX_PRICES = 24
# What is tried when what fits on average does not fit at every moment: other mixtures of moments, then less capacity.
MOST_MIXTURES, MOST_REPAIRS = 4, 8
# Bytes of the capacity that are worth another try when virtual stages work with unlike memory.
WORTH_A_TRY = 1e-3

# By virtual stage and kind: (option, how many modules take it).
Selection = tuple[tuple[tuple[tuple[int, int], ...], ...], ...]


@dataclass(frozen=True)
class Columns:
    """A menu's costs as arrays [kind, option]; kinds with fewer options repeat their last one."""

    forward: Floats
    backward: Floats
    sync: Floats
    update: Floats
    spread: Floats
    static: Floats
    activation: Floats
    working: Floats

    @classmethod
    def of(cls, menu: Menu) -> Columns:
        names = ("forward", "backward", "sync", "update", "spread", "static", "activation", "working")
        rows = np.empty((len(names), len(menu.tables), max(table.forward.size for table in menu.tables)))
        for kind, table in enumerate(menu.tables):
            own = np.array([getattr(table, name) for name in names])
            rows[:, kind, : own.shape[1]] = own
            rows[:, kind, own.shape[1] :] = own[:, -1:]
        return cls(*rows)


class Solved(NamedTuple):
    """A selection that fits, and the weighted seconds that it takes."""

    weighted: float
    selection: Selection


class Relaxed:
    """Bounds of the weighted seconds of a grid point's stages, whatever they contain; any price of a byte gives one.

    What a kind of module takes at a price depends on the micro-batches that its virtual stage holds, so it is found
    once for all contents.
    """

    def __init__(self, columns: Columns, moments: Sequence[Moments], weighted: Floats, capacity: float) -> None:
        """`moments` by stage; `weighted` [kind, option]."""
        fullest = [own.fullest(own.held.sum(axis=1)) for own in moments]
        numbers, at = np.unique(np.stack([own.held.mean(axis=0) for own in fullest]), return_inverse=True)
        at = at.reshape(len(moments), -1)
        self._memory = columns.static + numbers[:, None, None] * columns.activation  # [held, kind, option]
        self._at, self._weighted = at, weighted
        self._least = self._memory.min(axis=2)[at].reshape(len(moments), -1)
        self._working = columns.working.min(axis=1)
        self._at_work = np.stack([own.at_work() for own in fullest])
        self._capacity = capacity

    @cached_property
    def _priced(self) -> tuple[Floats, Floats]:
        """Prices of a byte, and what a module takes at each: [stage, v and kind, price].  Found for those that fit."""
        memory, weighted = self._memory, self._weighted
        sample = [memory[0], memory[len(memory) // 2], memory[-1]]
        prices = byte_prices([(w, m[k]) for m in sample for k, w in enumerate(weighted)], MAX_PRICES)
        duals = (weighted[:, :, None] + memory[..., None] * prices).min(axis=2)
        return prices, duals[self._at].reshape(len(self._at), -1, prices.size)

    def bounds(self, counts: Floats) -> Floats:
        """By stage, for [stage, v, kind] modules; `inf` where it cannot fit."""
        working = np.where(counts > 0.0, self._working, 0.0).max(axis=2)
        room = self._capacity - (self._at_work * working).sum(axis=1)
        flat = counts.reshape(len(counts), 1, -1)
        if ((flat[:, 0] * self._least).sum(axis=1) > room).any():
            return np.full(len(counts), np.inf)
        prices, duals = self._priced
        seconds: Floats = ((flat @ duals)[:, 0] - room[:, None] * prices).max(axis=1)
        return seconds


class StageSolver:
    """Solves the stages of one grid point and menu."""

    def __init__(self, columns: Columns, capacity: float) -> None:
        self._columns = columns
        self._capacity = capacity
        self.num_labels = 0

    def most_bytes(self, moments: Moments, selection: Selection) -> float:
        """At the fullest of these moments."""
        static, kept, working = self._bytes(selection)
        return static + float((moments.held @ kept + working[moments.working]).max())

    def _bytes(self, selection: Selection) -> tuple[float, Floats, Floats]:
        """What a selection has all the time, and by virtual stage what it keeps of a micro-batch and works with."""
        columns, static = self._columns, 0.0
        kept, working = np.zeros(len(selection)), np.zeros(len(selection))
        for v, of_kinds in enumerate(selection):
            for kind, chosen in enumerate(of_kinds):
                for option, number in chosen:
                    static += number * float(columns.static[kind, option])
                    kept[v] += number * float(columns.activation[kind, option])
                    working[v] = max(working[v], float(columns.working[kind, option]))
        return static, kept, working

    def solve(self, counts: Ints, moments: Moments, weighted: Floats) -> Solved | None:
        """The least weighted seconds, [kind, option], of [v, kind] modules; None where nothing is found that fits.

        The least, where one moment is the fullest for all selections; else what these tries find.
        """
        fullest = moments.fullest(moments.held @ (counts @ self._columns.activation.mean(axis=1)))
        mixture, at_work = fullest.held.mean(axis=0), fullest.at_work() > 0.0
        capacity = self._capacity
        for turn in range(MOST_MIXTURES + MOST_REPAIRS):
            groups = self._groups(counts, mixture, at_work, weighted)
            chosen = self._fastest(counts, moments, groups)
            if chosen is not None:
                return Solved(_seconds(groups, chosen), _dealt(counts, groups, chosen))
            chosen = self._exact(groups, capacity)
            if chosen is None and turn == 0 and at_work.sum() > 1:  # perhaps only because all of them work
                mixture, at_work = fullest.held[0], np.arange(len(counts)) == fullest.working[0]
                continue
            if chosen is None:
                break
            selection = _dealt(counts, groups, chosen)
            excess = self.most_bytes(moments, selection) - self._capacity
            if excess <= 0.0:
                return self._with_more(counts, moments, at_work, groups, Solved(_seconds(groups, chosen), selection))
            if turn < MOST_MIXTURES:
                _, kept, working = self._bytes(selection)
                most = int((moments.held @ kept + working[moments.working]).argmax())
                works = np.arange(len(counts)) == moments.working[most]
                mixture = moments.held[most] if turn == 0 else 0.5 * (mixture + moments.held[most])
                at_work = works if turn == 0 else at_work | works
            else:
                capacity -= excess
        if capacity == self._capacity:
            return None  # a mean of moments is no harder to fit than all of them
        groups = self._groups(counts, moments.held.max(axis=0), np.full(len(counts), True), weighted)
        chosen = self._exact(groups, self._capacity)
        return None if chosen is None else Solved(_seconds(groups, chosen), _dealt(counts, groups, chosen))

    def _with_more(
        self, counts: Ints, moments: Moments, at_work: Bools, groups: Sequence[_Group], found: Solved
    ) -> Solved:
        """Where virtual stages work with unlike memory, the largest does so when less is held: the capacity is tried
        that what was found would have needed if it were not so.
        """
        static, kept, working = self._bytes(found.selection)
        at_most = static + float((moments.held @ kept).max() + working[at_work].max())
        spare = at_most - self.most_bytes(moments, found.selection)
        if spare > WORTH_A_TRY * self._capacity:
            for part in (1.0, 0.5):
                chosen = self._exact(groups, self._capacity + part * spare)
                if chosen is None:
                    continue
                selection = _dealt(counts, groups, chosen)
                if self.most_bytes(moments, selection) <= self._capacity:
                    return min(found, Solved(_seconds(groups, chosen), selection))
        return found

    def _groups(self, counts: Ints, held: Floats | Ints, at_work: Bools, weighted: Floats) -> list[_Group]:
        """Virtual stages' kinds; those that hold as much and are at work alike are one."""
        members: dict[tuple[int, float, bool], list[int]] = {}
        for v, kind in zip(*np.nonzero(counts), strict=True):
            members.setdefault((int(kind), float(held[v]), bool(at_work[v])), []).append(int(v))
        return [
            _Group(
                kind,
                tuple(own),
                int(counts[own, kind].sum()),
                weighted[kind],
                self._columns.static[kind] + kept * self._columns.activation[kind],
                self._columns.working[kind] * works,
            )
            for (kind, kept, works), own in members.items()
        ]

    def _fastest(self, counts: Ints, moments: Moments, groups: Sequence[_Group]) -> list[list[tuple[int, int]]] | None:
        """Of every module the fastest option, if they fit."""
        fastest = [[(int(np.lexsort((group.memory, group.seconds))[0]), group.number)] for group in groups]
        return fastest if self.most_bytes(moments, _dealt(counts, groups, fastest)) <= self._capacity else None

    def _exact(self, groups: Sequence[_Group], capacity: float) -> list[list[tuple[int, int]]] | None:
        seconds, memory = [group.seconds for group in groups], [group.memory for group in groups]
        prices = byte_prices(list(zip(seconds, memory, strict=True)), MAX_PRICES)
        working = [group.working for group in groups]
        label, asked = choose_beside([group.number for group in groups], seconds, memory, working, capacity, prices)
        self.num_labels += asked
        return None if label is None else label.selection


class _Group(NamedTuple):
    """Modules of one kind in virtual stages alike; seconds and bytes by option, `working` nothing where not at work."""

    kind: int
    members: tuple[int, ...]
    number: int
    seconds: Floats
    memory: Floats
    working: Floats


def _seconds(groups: Sequence[_Group], chosen: Sequence[Sequence[tuple[int, int]]]) -> float:
    return sum(n * float(group.seconds[c]) for group, own in zip(groups, chosen, strict=True) for c, n in own)


def _dealt(counts: Ints, groups: Sequence[_Group], chosen: Sequence[Sequence[tuple[int, int]]]) -> Selection:
    """A group's options over its virtual stages, to each the same mixture as far as numbers allow."""
    num_virtual, num_kinds = counts.shape
    found: list[list[dict[int, int]]] = [[{} for _ in range(num_kinds)] for _ in range(num_virtual)]
    for group, own in zip(groups, chosen, strict=True):
        options = [option for option, number in own for _ in range(number)]
        seats = sorted((i / counts[v, group.kind], v) for v in group.members for i in range(int(counts[v, group.kind])))
        for option, (_, v) in zip(options, seats, strict=True):
            taken = found[v][group.kind]
            taken[option] = taken.get(option, 0) + 1
    return tuple(tuple(tuple(sorted(taken.items())) for taken in of_kinds) for of_kinds in found)
