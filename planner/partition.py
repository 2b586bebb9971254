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

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Passes through the chain for one Z, at most.
MAX_PASSES = 4
# Another pass is worthwhile when the last left fewer than this share of runs.
WORTHWHILE = 0.98


@dataclass(frozen=True)
class Family:
    """A family of paths of a stage, with the least of its own part for every content."""

    path: Path
    own: Floats


@dataclass(frozen=True)
class StageValues:
    """Least seconds of every content on one stage (`inf` where it cannot be); each may come from other options.

    `alone`: T.  `total`: T and what may be counted once of each stage.  `ending`: total + u.  `once`: u.  `forward`: f.
    `families`: of paths, those of the first stage with u.  `weight`: w, where the backward pass is split; `first`: u of
    the first stage, else 0.
    """

    alone: Floats
    total: Floats
    ending: Floats
    once: Floats
    forward: Floats
    families: tuple[Family, ...]
    weight: Floats
    first: Floats


@dataclass(frozen=True)
class Partition:
    """`path` holds P + 1 positions; no partition has a longest path below `bound`."""

    path: tuple[int, ...]
    bound: float


def best_partition(
    shape: PipelineShape,
    contents: Ints,
    values: Sequence[StageValues],
    *,
    at_least: float = 0.0,
    below: float,
    accuracy: float,
) -> Partition | None:
    """Bisection for Z.  `contents[i, j]` numbers the run from position i to j (negative: none).

    None when no partition has all its paths below `below` (finite).  `at_least` is a bound known before; the result
    is exact up to the relative `accuracy`.
    """
    finder = _Finder(shape, contents, values, below)
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
    """The runs of the chain that a stage may take, by start, and its values for each of them."""

    starts: Ints
    stops: Ints
    families: tuple[Family, ...]
    alone: Floats
    total: Floats
    ending: Floats
    once: Floats
    forward: Floats
    weight: Floats
    first: Floats

    @classmethod
    def of(cls, values: StageValues, starts: Ints, stops: Ints, numbers: Ints, below: float) -> _Runs:
        """Those of which the stage's first family of paths allows `below`."""
        some = values.families[0].own[numbers] <= below
        runs, ends, numbers = starts[some], stops[some], numbers[some]
        families = tuple(Family(family.path, family.own[numbers]) for family in values.families)
        every = (values.alone, values.total, values.ending, values.once, values.forward, values.weight, values.first)
        return cls(runs, ends, families, *np.stack(every)[:, numbers])

    def keep(self, mask: npt.NDArray[np.bool_]) -> _Runs:
        families = tuple(Family(family.path, family.own[mask]) for family in self.families)
        columns = (self.alone, self.total, self.ending, self.once, self.forward, self.weight, self.first)
        return _Runs(self.starts[mask], self.stops[mask], families, *(column[mask] for column in columns))

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
            least[..., self.stops[order][firsts]] = np.minimum.reduceat(values[..., order], firsts, axis=-1)
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

    def __init__(self, shape: PipelineShape, contents: Ints, values: Sequence[StageValues], below: float) -> None:
        self._shape = shape
        self._size = len(contents)
        possible = np.minimum.reduce([stage.families[0].own for stage in values]) <= below
        starts, stops = np.nonzero((contents >= 0) & possible[contents])
        numbers = contents[starts, stops]
        known: dict[int, _Runs] = {}  # stages alike share their values
        for stage in values:
            if id(stage) not in known:
                known[id(stage)] = _Runs.of(stage, starts, stops, numbers, below)
        self._stages = [known[id(stage)] for stage in values]
        self._before, self.floor = self._pass_forward(self._stages)

    def path_within(self, limit: float) -> tuple[int, ...] | None:
        """A partition all of whose paths may stay below `limit`, or None when there is none.

        What one pass rules out sharpens the next: they are repeated while they rule out much.
        """
        stages, before = self._stages, self._before
        for _ in range(MAX_PASSES):
            path, fits = self._pass_backward(stages, limit, before)
            if path is None:
                return None
            number = sum(mask.size for mask in fits)
            left = sum(int(np.count_nonzero(mask)) for mask in fits)
            stages = [stage.keep(mask) for stage, mask in zip(stages, fits, strict=True)]
            before, least = self._pass_forward(stages)
            if least > limit:
                return None
            if left > WORTHWHILE * number:
                break
        self._stages, self._before = stages, before
        return path

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
            pre, forward = before[:, runs.starts]
            to_next = self._to_next(index)
            longer = np.maximum(pre + runs.total, forward + runs.ending) + to_next
            before = runs.least_to(np.stack([longer, forward + runs.forward + 0.5 * to_next]), self._size)
        return found, float(before[0, -1])

    def _pass_backward(
        self, stages: Sequence[_Runs], limit: float, before: Sequence[Floats]
    ) -> tuple[tuple[int, ...] | None, list[npt.NDArray[np.bool_]]]:
        """A path of runs that may be part of a partition within `limit`, and which runs of every stage may be."""
        shape, split = self._shape, self._shape.schedule == "zb-h1"
        # Rows: seconds of later stages (`PipelineShape.after`), the latest end of a last trip through them, and the
        # longest path through them.
        after = np.full((3 + len(shape.shorts), self._size), np.inf)
        after[:, -1] = 0.0
        posts: list[Floats] = []
        all_fits = []
        for index in reversed(range(shape.num_stages)):
            runs, (pre, forward) = stages[index], before[index][:, stages[index].starts]
            by_run = after[:, runs.stops]
            posted, to_next, beyond = by_run[:-2], self._to_next(index), shape.transfers_after(index)
            later = by_run[-1] + to_next
            own = [family.own + shape.after(index, family.path, posted) for family in runs.families]
            trips = shape.trips[index]
            if trips.rows.size:
                visiting = shape.after_trips(index, posted) + trips.stays[:, None] * runs.alone
                if split:
                    visiting += trips.weight[:, None] * runs.weight
                longest = visiting.max(axis=0)
                own.append(longest + posted[0] + beyond + runs.first)
            path = np.maximum.reduce([*own, runs.total + later])
            fits = pre + path <= limit
            fits &= forward + np.maximum(path + runs.once, runs.ending + later) <= limit
            if shape.schedule != "gpipe":
                # Paths whose last trip ends at a later stage, without this one's last backward.
                ahead = shape.ahead(index)
                last = (shape.num_micro_batches - ahead) * runs.alone + shape.steady * runs.weight
                both = posted[1] + beyond if shape.num_micro_batches - 2 >= ahead else 0.0
                last = last + np.maximum(ahead * runs.forward, both)
                if trips.rows.size:
                    last = np.maximum(last, longest)
                by_run[-2] += 0.5 * to_next
                fits &= forward + last - runs.alone + runs.forward + by_run[-2] <= limit
                by_run[-2] = np.maximum(by_run[-2] + runs.forward, runs.ending + posted[0] + beyond)
            shape.add(index, posted, runs.total, runs.alone)
            by_run[-1] = path
            by_run[:, ~fits] = np.inf
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
