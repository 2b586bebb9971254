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

(zb-h1) the paths of 1f1b, with the part of b for the input in place of b everywhere.  In its own actions a stage has
the weights' parts w too: k = min(s + 1, m) of the m come after its last input gradient, and the last forward waits
for max(0, m - P) of them:

    stay, first   + (m - k) w       last, both   + max(0, m - P) w       visit   + max(0, m - P - n v) w

Every stage has once-a-step seconds u_s to go after its last input gradient (k w, gradient sync, optimizer).  A path may
end at any stage, and then leaves out the backward passes before it:

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
SHORT = (0, 1, 2, 4, 8, 16)
MOST_VISITS = 2
# Passes through the chain for one Z, at most.
MAX_PASSES = 4
# Another pass is worthwhile when the last left fewer than this share of runs.
WORTHWHILE = 0.98


class Path(NamedTuple):
    """pre + `returns` x post + `turns` x (post without the last `short` stages) + `forward` x f + `backward` x b
    + `weight` x w.
    """

    returns: int
    forward: float
    backward: float
    turns: int = 0
    short: int = 0
    weight: float = 0.0


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
        split = self.schedule == "zb-h1"
        early = m - min(stage + 1, m) if split else 0.0  # weight gradients before the last input gradient
        steady = max(0.0, m - self.num_stages) if split else 0.0  # and before the last forward
        paths = [Path(0, m, m, weight=early)]
        if not ahead:
            return paths
        paths += [Path(1, m - ahead, m, weight=early), Path(1, m, m - ahead, weight=steady)]
        between = self.num_micro_batches - 2 - ahead
        if between >= 0:
            visits = [(between // (ahead - short + 1), short) for short in SHORT if short < ahead]
            visits = [visit for visit in visits if visit[0]]
            # What trips have over staying is mostly the transfers.
            visits.sort(key=lambda visit: -visit[0] * (ahead - visit[1]))
            for turns, short in dict.fromkeys([(0, 0), *visits[:MOST_VISITS]]):
                stays = m - ahead - turns * (ahead - short)
                paths.append(Path(2, stays, stays, turns, short, max(0.0, steady - turns * (ahead - short))))
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


def pipeline_bound(
    shape: PipelineShape, forward: Sequence[float], backward: Sequence[float], weight: Sequence[float] = ()
) -> float:
    """The longest of the paths above to the end of the first stage, for given stages: never above its simulated finish.

    `weight`: of a schedule that splits the backward pass, the part of which is then not in `backward`.
    """
    f, b = np.array(forward), np.array(backward)
    w = np.array(weight) if len(weight) else np.zeros(len(f))
    own = f + b
    if shape.schedule == "gpipe":
        longer = (shape.num_micro_batches - 1) * (f.max() + b.max())
        return float(own.sum() + 2.0 * sum(shape.transfers) + longer)
    pre = np.cumsum(own) - own + shape.along

    def post(stage: int, short: int = 0) -> float:
        last = shape.num_stages - 1 - short
        return float(pre[last] + own[last] - pre[stage] - own[stage])

    longest = max(
        float(pre[s] + p.returns * post(s) + p.forward * f[s] + p.backward * b[s] + p.weight * w[s])
        + (p.turns * post(s, p.short) if p.turns else 0.0)
        for s in range(shape.num_stages)
        for p in shape.paths(s)
    )
    return longest + float(w[0])


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

    @classmethod
    def of(cls, values: StageValues, starts: Ints, stops: Ints, numbers: Ints, below: float) -> _Runs:
        """Those of which the stage's first family of paths allows `below`."""
        some = values.families[0].own[numbers] <= below
        runs, ends, numbers = starts[some], stops[some], numbers[some]
        families = tuple(Family(family.path, family.own[numbers]) for family in values.families)
        columns = np.stack([values.alone, values.total, values.ending, values.once, values.forward])[:, numbers]
        return cls(runs, ends, families, *columns)

    def keep(self, mask: npt.NDArray[np.bool_]) -> _Runs:
        families = tuple(Family(family.path, family.own[mask]) for family in self.families)
        columns = (self.alone, self.total, self.ending, self.once, self.forward)
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
        shape = self._shape
        # Rows: seconds of later stages (`PipelineShape.after`), then the longest path through them.
        after = np.full((2 + len(shape.shorts), self._size), np.inf)
        after[:, -1] = 0.0
        posts: list[Floats] = []
        all_fits = []
        for index in reversed(range(shape.num_stages)):
            runs, (pre, forward) = stages[index], before[index][:, stages[index].starts]
            by_run = after[:, runs.stops]
            later = by_run[-1] + self._to_next(index)
            own = [family.own + shape.after(index, family.path, by_run[:-1]) for family in runs.families]
            path = np.maximum.reduce([*own, runs.total + later])
            fits = pre + path <= limit
            fits &= forward + np.maximum(path + runs.once, runs.ending + later) <= limit
            shape.add(index, by_run[:-1], runs.total, runs.alone)
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
