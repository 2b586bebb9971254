"""Cut the chain into stages: a bound that no partition beats, and a partition that is close to it.

The makespan of a schedule is a longest path through its actions; `planner.paths` has the families of paths and their
symbols.  Every stage has once-a-step seconds u_s to go after its last input gradient (k w, gradient sync, optimizer).
A path may end at any stage, and then leaves out the backward passes before it:

    minimise Z   such that a partition exists with, for all stages s <= t,
                 sum over i < s of (f_i + x_i) + sum over s <= i < t of (T_i + 2 x_i) + path of t without pre + u_s <= Z

The last trip of `last`, `both` and `visit` may end at a later stage than it began, which leaves out the backward passes
from there to the first stage:

                 sum over i < s of (f_i + x_i) + path of s without pre, post and b_s + x_s
                 + sum over s < i < t of (f_i + x_i) + sum over i >= t of (T_i + 2 x_i) + u_t <= Z      for all s < t

For a given Z a dynamic program from the last stage to the first keeps, for every (stage, position), the least post and
the least longest path through the stages from there on; what comes before is replaced by the least over all
partitions.  So Z stays a lower bound.  It is found by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from planner.paths import Path, PipelineShape
from planner.windows import Runs

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Passes through the chain for one Z, at most.
MAX_PASSES = 4
# Rows of a stage's values before those of its paths.
NUM_SHARED = 7
# Another pass is worthwhile when the last left fewer than this share of runs.
WORTHWHILE = 0.98


@dataclass(frozen=True)
class StageValues:
    """Least seconds of every run of one stage (`inf` where it cannot be), [row, run]; each may come from other options.

    Rows: T alone; total, T and what may be counted once of each stage; ending, total + u; once, u; f; w, where the
    backward pass is split; u of the first stage, else 0.  Then a stage's own part of each of `paths`, those of the
    first stage with u.
    """

    paths: tuple[Path, ...]
    table: Floats

    @staticmethod
    def of(
        paths: Sequence[Path],
        own: Sequence[Floats],
        *,
        alone: Floats,
        total: Floats,
        ending: Floats,
        once: Floats,
        forward: Floats,
        weight: Floats,
        first: Floats,
    ) -> StageValues:
        return StageValues(tuple(paths), np.stack([alone, total, ending, once, forward, weight, first, *own]))

    @property
    def own(self) -> Floats:
        """Of each path, [path, run]."""
        return self.table[NUM_SHARED:]


@dataclass(frozen=True)
class Partition:
    """`path` holds P + 1 positions; no partition has a longest path below `bound`."""

    path: tuple[int, ...]
    bound: float


def best_partition(
    shape: PipelineShape,
    runs: Sequence[Runs],
    values: Sequence[StageValues],
    *,
    at_least: float = 0.0,
    below: float,
    accuracy: float,
) -> Partition | None:
    """Bisection for Z.  `runs` and `values`: the runs that each stage may take, and their seconds there.

    None when no partition has all its paths below `below` (finite).  `at_least` is a bound known before; the result
    is exact up to the relative `accuracy`.
    """
    finder = _Finder(shape, runs, values, below)
    path = finder.path_within(below)
    if path is None:
        return None
    low, high, step = max(at_least, finder.floor), below, accuracy
    while high > low * (1.0 + accuracy):
        # From a known bound upwards in growing steps, then halving.
        middle = min(low * (1.0 + step), 0.5 * (low + high))
        step *= 8.0
        found = finder.path_within(middle)
        if found is None:
            low = middle
        else:
            high, path = middle, found
    return Partition(path, low)


@dataclass(frozen=True)
class _Runs:
    """The runs of the chain that a stage may still take, by start, and its values for each of them."""

    starts: Ints
    stops: Ints
    values: StageValues

    def keep(self, mask: npt.NDArray[np.bool_]) -> _Runs:
        if mask.all():
            return self
        some = np.flatnonzero(mask)
        values = StageValues(self.values.paths, self.values.table.take(some, axis=1))
        return _Runs(self.starts[some], self.stops[some], values)

    def least_from(self, values: Floats, size: int) -> Floats:
        """For every position the least of the values (last axis) over the runs that start there."""
        least = np.full((*values.shape[:-1], size), np.inf)
        if self.starts.size:
            firsts = _firsts(self.starts)
            least[..., self.starts[firsts]] = np.minimum.reduceat(values, firsts, axis=-1)
        return least

    def least_to(self, values: Floats, size: int) -> Floats:
        """For every position the least of the values over the runs that end there."""
        least = np.full((*values.shape[:-1], size), np.inf)
        if self.stops.size:
            order, firsts = self._by_stop
            least[..., self.stops[order][firsts]] = np.minimum.reduceat(values.take(order, axis=-1), firsts, axis=-1)
        return least

    @cached_property
    def _by_stop(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.stops, kind="stable")
        return order, _firsts(self.stops[order])


def _firsts(ordered: Ints) -> Ints:
    """Where a new number begins."""
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))


class _Finder:
    """Asks for one set of values whether a partition exists within a limit that falls whenever one does."""

    def __init__(self, shape: PipelineShape, runs: Sequence[Runs], values: Sequence[StageValues], below: float) -> None:
        self._shape = shape
        self._size = 1 + max(int(of_stage.stops.max()) for of_stage in runs)
        every = (_Runs(own.starts, own.stops, of) for own, of in zip(runs, values, strict=True))
        self._stages = [one.keep(one.values.own[0] <= below) for one in every]
        self._before, self.floor = self._pass_forward(self._stages)
        # Round trips have a row each, so a first pass is made without: few runs are left to look at with them.
        self._possible = self._narrow(below, turning=False) is not None

    def path_within(self, limit: float) -> tuple[int, ...] | None:
        """A partition all of whose paths may stay below `limit`, or None when there is none.

        What one pass rules out sharpens the next: they are repeated while they rule out much.
        """
        if not self._possible:
            return None
        known, path = (self._stages, self._before, self.floor), None
        for _ in range(MAX_PASSES):
            number = sum(runs.starts.size for runs in self._stages)
            path = self._narrow(limit)
            if path is None:
                # Nothing below this limit says nothing about those above it.
                self._stages, self._before, self.floor = known
                return None
            if sum(runs.starts.size for runs in self._stages) > WORTHWHILE * number:
                break
        return path

    def _narrow(self, limit: float, *, turning: bool = True) -> tuple[int, ...] | None:
        """A path as the last backward pass found it, and only the runs that may be part of one left."""
        path, fits = self._pass_backward(self._stages, limit, self._before, turning=turning)
        if path is None:
            return None
        self._stages = [stage.keep(mask) for stage, mask in zip(self._stages, fits, strict=True)]
        self._before, self.floor = self._pass_forward(self._stages)
        return path if self.floor <= limit else None

    def _to_next(self, index: int) -> float:
        """2 x, to the next stage."""
        return 2.0 * self._shape.transfers[index] if index + 1 < self._shape.num_stages else 0.0

    def _pass_forward(self, stages: Sequence[_Runs]) -> tuple[list[Floats], float]:
        """For every stage and position the least pre, with what is left to do once a step at its end, and the least
        forward seconds before, [2, position].  And the least of all.
        """
        before = np.full((2, self._size), np.inf)
        before[:, 0] = 0.0
        found = []
        for index, runs in enumerate(stages):
            found.append(before)
            pre, forward = before.take(runs.starts, axis=1)
            to_next = self._to_next(index)
            _, total, ending, _, f, _, _ = runs.values.table[:NUM_SHARED]
            longer = np.maximum(pre + total, forward + ending) + to_next
            before = runs.least_to(np.stack([longer, forward + f + 0.5 * to_next]), self._size)
        return found, float(before[0, -1])

    def _pass_backward(
        self, stages: Sequence[_Runs], limit: float, before: Sequence[Floats], *, turning: bool
    ) -> tuple[tuple[int, ...] | None, list[npt.NDArray[np.bool_]]]:
        """A path of runs that may be part of a partition within `limit`, and which runs of every stage may be.

        `turning`: look at paths with round trips in between, too.
        """
        shape, split = self._shape, self._shape.schedule == "zb-h1"
        # Rows: seconds of later stages (`PipelineShape.after`), the latest end of a last trip through them, and the
        # longest path through them.
        after = np.full((3 + (len(shape.shorts) if turning else 1), self._size), np.inf)
        after[:, -1] = 0.0
        posts: list[Floats] = []
        all_fits = []
        for index in reversed(range(shape.num_stages)):
            runs, (pre, forward) = stages[index], before[index].take(stages[index].starts, axis=1)
            alone, total, ending, once, f, weight, first = runs.values.table[:NUM_SHARED]
            by_run = after.take(runs.stops, axis=1)
            posted, to_next, beyond = by_run[:-2], self._to_next(index), shape.transfers_after(index)
            later = by_run[-1] + to_next
            paths = zip(runs.values.paths, runs.values.own, strict=True)
            longest = [own + shape.after(index, path, posted) for path, own in paths if turning or not path.turns]
            trips = shape.trips[index]
            visits = turning and trips.rows.size > 0
            if visits:
                visiting = shape.after_trips(index, posted) + trips.stays[:, None] * alone
                if split:
                    visiting += trips.weight[:, None] * weight
                around = visiting.max(axis=0)
                longest.append(around + posted[0] + beyond + first)
            path = np.maximum.reduce([*longest, total + later])
            fits = pre + path <= limit
            fits &= forward + np.maximum(path + once, ending + later) <= limit
            if shape.schedule != "gpipe":
                # Paths whose last trip ends at a later stage, without this one's last backward.
                ahead = shape.ahead(index)
                last = (shape.num_micro_batches - ahead) * alone + shape.steady * weight
                both = posted[1] + beyond if shape.num_micro_batches - 2 >= ahead else 0.0
                last = last + np.maximum(ahead * f, both)
                if visits:
                    last = np.maximum(last, around)
                by_run[-2] += 0.5 * to_next
                fits &= forward + last - alone + f + by_run[-2] <= limit
                by_run[-2] = np.maximum(by_run[-2] + f, ending + posted[0] + beyond)
            shape.add(index, posted, total, alone)
            by_run[-1] = path
            by_run += np.where(fits, 0.0, np.inf)
            after = runs.least_from(by_run, self._size)
            posts.append(by_run[0])
            all_fits.append(fits)
        all_fits.reverse()
        if not np.isfinite(after[0, 0]):
            return None, all_fits
        found = [0]
        for runs, post in zip(stages, reversed(posts), strict=True):
            here = np.flatnonzero(runs.starts == found[-1])
            found.append(int(runs.stops[here[post[here].argmin()]]))
        return tuple(found), all_fits
