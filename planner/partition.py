"""Cut the chain into stages: a bound that no partition beats, and a partition that is close to it.

The makespan of a schedule is a longest path through its actions.  Every family of paths gives a lower bound that is
linear in the stages' seconds.  With f_s, b_s the seconds of a micro-batch's forward and backward on stage s,
T_s = f_s + b_s, x_s a transfer, m micro-batches, and w = min(P - 1 - s, m - 1) forwards that stage s runs ahead,

    pre_s = sum over i < s of (T_i + 2 x_i)      post_s = sum over i > s of T_i + sum over i >= s of 2 x_i

each s has (1f1b)

    stay      pre + m T                               stage s is never idle
    first     pre + post + (m - w) f + m b            it waits for its first backward
    last      pre + post + m f + (m - w) b            its last forward is waited for
    both      pre + 2 post + (m - w) T                both, when m > w + 1
    visit     pre + 2 post + n p + (m - w - n v) T    and n round trips of v stages in between, p as post up to there,
                                                      n <= (m - 2 - w) // (v + 1)

and (gpipe: exactly sum of T and 2 x + (m - 1) (max f + max b))

    either    pre + post + m T                        the slowest stage of both passes
    forward   pre + post + m f + b + (m - 1) B        the slowest of the forward passes; B <= max b of any partition
    backward  pre + post + f + m b + (m - 1) F

Every stage has once-a-step seconds u_s to go after its last action (gradient sync, optimizer).  A path may end at any
stage, and then leaves out the backward passes before it:

    minimise Z   such that a partition exists with, for all stages s <= t,
                 sum over i < s of (f_i + x_i) + sum over s <= i < t of (T_i + 2 x_i) + path of t without pre + u_s <= Z

For a given Z a dynamic program from the last stage to the first keeps, for every (stage, position), the least post and
the least longest path through the stages from there on; what comes before is replaced by the least over all
partitions.  So Z stays a lower bound.  It is found by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specs.plan import Schedule

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Round trips turn so many stages before the last; so many kinds of them are looked at for each stage.
SHORT = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)
MOST_VISITS = 3
# Passes through the chain for one Z, at most.
MAX_PASSES = 4


class Path(NamedTuple):
    """pre + `returns` x post + `turns` x (post without the last `short` stages) + `forward` x f + `backward` x b."""

    returns: int
    forward: float
    backward: float
    turns: int = 0
    short: int = 0


@dataclass(frozen=True)
class PipelineShape:
    """What a bound needs besides the stages: seconds of transfers between neighbours, micro-batches, schedule."""

    num_stages: int
    num_micro_batches: int
    transfers: tuple[float, ...]
    schedule: Schedule

    @cached_property
    def along(self) -> Floats:
        """2 x, summed over the transfers before each stage."""
        return np.concatenate([[0.0], 2.0 * np.cumsum(self.transfers)])

    def transfers_before(self, stage: int) -> float:
        return float(self.along[stage])

    def transfers_after(self, stage: int, short: int = 0) -> float:
        """2 x, from a stage to the last or so many before it."""
        return float(self.along[self.num_stages - 1 - short] - self.along[stage])

    def ahead(self, stage: int) -> int:
        """Forwards that a stage runs ahead of its backwards."""
        return min(self.num_stages - 1 - stage, self.num_micro_batches - 1)

    def paths(self, stage: int) -> tuple[Path, ...]:
        """Families of paths; of gpipe only the one without a constant."""
        return self._paths[stage]

    @cached_property
    def _paths(self) -> list[tuple[Path, ...]]:
        return [tuple(self._paths_of(stage)) for stage in range(self.num_stages)]

    def _paths_of(self, stage: int) -> list[Path]:
        m, ahead = float(self.num_micro_batches), self.ahead(stage)
        if self.schedule == "gpipe":
            return [Path(1, m, m)]
        paths = [Path(0, m, m)]
        if not ahead:
            return paths
        paths += [Path(1, m - ahead, m), Path(1, m, m - ahead)]
        between = self.num_micro_batches - 2 - ahead
        if between >= 0:
            visits = [(between // (ahead - short + 1), short) for short in SHORT if short < ahead]
            # What trips have over staying is mostly the transfers.
            visits.sort(key=lambda visit: -visit[0] * (ahead - visit[1]))
            for turns, short in dict.fromkeys([(0, 0), *visits[:MOST_VISITS]]):
                stays = m - ahead - turns * (ahead - short)
                paths.append(Path(2, stays, stays, turns, short))
        return paths

    def after(self, stage: int, path: Path, posts: Floats) -> Floats | float:
        """What a path has after a stage.  `posts`, by row: seconds of later stages once, with what counts once of each;
        then seconds alone, up to each of `shorts`; numbers or arrays.
        """
        if path.returns == 0:
            return 0.0
        found: Floats = posts[0] + path.returns * self.transfers_after(stage)
        if path.returns > 1:
            found = found + (path.returns - 1) * posts[1]
        if path.turns:
            found = found + path.turns * (
                posts[1 + self.shorts.index(path.short)] + self.transfers_after(stage, path.short)
            )
        return found

    def add(self, stage: int, posts: Floats, total: Floats | float, alone: Floats | float) -> None:
        """Add a stage's seconds to `posts`."""
        posts[0] += total
        posts[1:][[stage < self.num_stages - short for short in self.shorts]] += alone

    @cached_property
    def shorts(self) -> list[int]:
        """How many stages before the last the paths turn."""
        return sorted({0} | {path.short for paths in self._paths for path in paths})


def pipeline_bound(shape: PipelineShape, forward: Sequence[float], backward: Sequence[float]) -> float:
    """The longest of the paths above for given stages: never above the simulated makespan."""
    f, b = np.array(forward), np.array(backward)
    own = f + b
    if shape.schedule == "gpipe":
        longer = (shape.num_micro_batches - 1) * (f.max() + b.max())
        return float(own.sum() + 2.0 * sum(shape.transfers) + longer)
    pre = np.cumsum(own) - own + shape.along

    def post(stage: int, short: int = 0) -> float:
        last = shape.num_stages - 1 - short
        return float(pre[last] + own[last] - pre[stage] - own[stage])

    return max(
        float(pre[s] + p.returns * post(s) + p.forward * f[s] + p.backward * b[s])
        + (p.turns * post(s, p.short) if p.turns else 0.0)
        for s in range(shape.num_stages)
        for p in shape.paths(s)
    )


@dataclass(frozen=True)
class Family:
    """A family of paths of a stage, with the least of its own part for every content."""

    path: Path
    own: Floats


@dataclass(frozen=True)
class StageValues:
    """Least seconds of every content on one stage (`inf` where it cannot be); each may come from other options.

    `alone`: T.  `total`: T and what may be counted once of each stage.  `ending`: total + u.  `once`: u.  `forward`: f.
    `families`: of paths, those of the first stage with u.
    """

    alone: Floats
    total: Floats
    ending: Floats
    once: Floats
    forward: Floats
    families: tuple[Family, ...]


@dataclass(frozen=True)
class Partition:
    """`path` holds P + 1 positions; no partition has a longest path below `bound`."""

    path: tuple[int, ...]
    bound: float


class Runs:
    """Runs of the chain of at most `longest` positions, as indices of their contents.

    `from_start[i, k]` is the content of the run from position i to i + 1 + k; `num_contents` (an index past the end)
    where there is no such run.
    """

    def __init__(self, contents: Ints, num_contents: int, longest: int) -> None:
        size = contents.shape[0]
        padded = np.full((size, size + longest), num_contents, dtype=np.int64)
        padded[:, :size] = np.where(contents < 0, num_contents, contents)
        rows, steps = np.arange(size)[:, None], np.arange(longest)[None, :]
        self.stops = rows + 1 + steps
        self.from_start = padded[rows, self.stops]
        self._starts = np.maximum(rows - 1 - steps, 0)
        self._no_start = rows - 1 - steps < 0
        self._steps = steps
        self.longest = longest
        self.size = size

    def least_to(self, values: Floats) -> Floats:
        """For every position the least of values[start, step] over the runs that end there."""
        to_stop = values[self._starts, self._steps]
        to_stop[self._no_start] = np.inf
        least: Floats = to_stop.min(axis=1)
        return least


def best_partition(
    shape: PipelineShape,
    contents: Ints,
    spans: Ints,
    values: Sequence[StageValues],
    *,
    at_least: float = 0.0,
    below: float,
    accuracy: float,
) -> Partition | None:
    """Bisection for Z.  `contents[i, j]` numbers the run from position i to j (negative: none), `spans` has the
    largest j - i of every content.

    None when no partition has all its paths below `below` (finite).  `at_least` is a bound known before; the result
    is exact up to the relative `accuracy`.
    """
    possible = np.minimum.reduce([stage.families[0].own for stage in values]) <= below
    if not possible.any():
        return None
    finder = _Finder(shape, Runs(contents, len(spans), int(spans[possible].max())), values)
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


class _Finder:
    """Asks for one set of values whether a partition exists within Z."""

    def __init__(self, shape: PipelineShape, runs: Runs, values: Sequence[StageValues]) -> None:
        self._shape = shape
        self._runs = runs
        self._rows = np.arange(runs.size)
        known: dict[int, _Gathered] = {}  # stages alike share their values
        for stage in values:
            if id(stage) not in known:
                known[id(stage)] = _Gathered(runs, stage)
        self._stages = [known[id(stage)] for stage in values]
        self._before, self.floor = self._pass_forward(None)

    def path_within(self, limit: float) -> tuple[int, ...] | None:
        """A partition all of whose paths may stay below `limit`, or None when there is none.

        What one pass rules out sharpens the next: they are repeated while they rule out more.
        """
        before, ruled_out = self._before, -1
        for _ in range(MAX_PASSES):
            path, fits = self._pass_backward(limit, before)
            number = sum(int(mask.size - np.count_nonzero(mask)) for mask in fits)
            if path is None or number == ruled_out:
                break
            ruled_out = number
            before, least = self._pass_forward(fits)
            if least > limit:
                return None
        return path

    def _pass_forward(self, fits: list[npt.NDArray[np.bool_]] | None) -> tuple[list[tuple[Floats, Floats]], float]:
        """For every stage and position the least pre, with what is left to do once a step at its end, and the least
        forward seconds before; over prefixes of runs that fit.  And the least of all.
        """
        shape, runs = self._shape, self._runs
        pre, forward = np.full((2, runs.size), np.inf)
        pre[0] = forward[0] = 0.0
        found = []
        for index, stage in enumerate(self._stages):
            found.append((pre[:, None], forward[:, None]))
            to_next = 2.0 * shape.transfers[index] if index + 1 < shape.num_stages else 0.0
            seconds = np.maximum(pre[:, None] + stage.total, forward[:, None] + stage.ending) + to_next
            own = forward[:, None] + stage.forward + 0.5 * to_next
            if fits is not None:
                seconds[~fits[index]] = own[~fits[index]] = np.inf
            pre, forward = self._runs.least_to(seconds), self._runs.least_to(own)
        return found, float(pre[-1]) if np.isfinite(pre[-1]) else 0.0

    def _pass_backward(
        self, limit: float, before: list[tuple[Floats, Floats]]
    ) -> tuple[tuple[int, ...] | None, list[npt.NDArray[np.bool_]]]:
        """A path of runs that may be part of a partition within `limit`, and which runs of every stage may be."""
        shape, runs = self._shape, self._runs
        posts = np.full((1 + len(shape.shorts), runs.size + runs.longest), np.inf)
        longest = np.full(runs.size + runs.longest, np.inf)
        posts[:, runs.size - 1] = longest[runs.size - 1] = 0.0
        choices, all_fits = [], []
        for index in reversed(range(shape.num_stages)):
            stage, (pre, forward) = self._stages[index], before[index]
            by_run = posts[:, runs.stops]
            own = np.maximum.reduce([need + shape.after(index, path, by_run) for path, need in stage.families])
            later = longest[runs.stops] + (2.0 * shape.transfers[index] if index + 1 < shape.num_stages else 0.0)
            path = np.maximum(own, stage.total + later)
            fits = pre + path <= limit
            fits &= forward + np.maximum(path + stage.once, stage.ending + later) <= limit
            path[~fits] = np.inf
            longest[: runs.size] = path.min(axis=1)
            shape.add(index, by_run, stage.total, stage.alone)
            by_run[:, ~fits] = np.inf
            choices.append(by_run[0].argmin(axis=1))
            posts[:, : runs.size] = by_run.min(axis=2)
            all_fits.append(fits)
        all_fits.reverse()
        if not np.isfinite(posts[0, 0]):
            return None, all_fits
        found = [0]
        for choice in reversed(choices):
            found.append(found[-1] + 1 + int(choice[found[-1]]))
        return tuple(found), all_fits


class _Gathered:
    """A stage's values by run."""

    def __init__(self, runs: Runs, values: StageValues) -> None:
        def of(array: Floats) -> Floats:
            gathered: Floats = np.append(array, np.inf)[runs.from_start]
            return gathered

        self.alone = of(values.alone)
        self.total = of(values.total)
        self.ending = of(values.ending)
        self.once = of(values.once)
        self.families = [(family.path, of(family.own)) for family in values.families]
        self.forward = of(values.forward)
