"""Cut the chain into stages: a bound that no partition beats, and a partition that is close to it.

The makespan of a schedule is a longest path through its actions.  Every family of paths gives a lower bound that is
linear in the stages' seconds.  With T_s the seconds of a micro-batch on stage s, pre_s = sum over i < s of
(T_i + 2 x_i), post_s = sum over i > s of T_i + sum over i >= s of 2 x_i, m micro-batches, and w = min(P - 1 - s,
m - 1) forwards that stage s runs ahead, each s has (1f1b)

    stay      pre + m T                                        stage s is never idle
    return    pre + post + (m - w (1 - r)) T                   it waits for its first backward (or its last)
    visit     pre + q post + (m - (q - 1) w) T                 q round trips to the last stage in between,
                                                               2 <= q <= (m - 1) // (w + 1) + 1

where r >= 1/2 is the least share of a stage's seconds that its longer pass takes.  gpipe has pre + post + m T.

    minimise Z   such that a partition exists with every path of every stage <= Z

For a given Z a dynamic program from the last stage to the first keeps the least post for every (stage, position);
pre is replaced by the least over all partitions, so Z stays a lower bound.  Z is found by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specs.plan import Schedule

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PipelineShape:
    """What the bound needs besides the stages: transfers x between neighbours and the share r of the longer pass."""

    num_stages: int
    num_micro_batches: int
    transfers: tuple[float, ...]
    longer_share: float
    schedule: Schedule

    def transfers_before(self, stage: int) -> float:
        return 2.0 * sum(self.transfers[:stage])

    def transfers_after(self, stage: int) -> float:
        return 2.0 * sum(self.transfers[stage:])

    def paths(self, stage: int) -> list[tuple[float, float]]:
        """(factor of post, factor of T) of every family of paths."""
        m = self.num_micro_batches
        if self.schedule == "gpipe":
            return [(1.0, float(m))]
        ahead = min(self.num_stages - 1 - stage, m - 1)
        families = [(0.0, float(m)), (1.0, m - ahead * (1.0 - self.longer_share))]
        most = (m - 1) // (ahead + 1) + 1
        return families + [(float(q), float(m - (q - 1) * ahead)) for q in sorted({2, most}) if 2 <= q <= most]


@dataclass(frozen=True)
class Partition:
    """`path` holds P + 1 positions; no partition has a longest path below `bound`."""

    path: tuple[int, ...]
    bound: float


def pipeline_bound(shape: PipelineShape, seconds: Sequence[float]) -> float:
    """The longest of the paths above for given stages: never above the simulated makespan."""
    longest, before, after = 0.0, 0.0, float(sum(seconds))
    for stage, own in enumerate(seconds):
        after -= own
        post = after + shape.transfers_after(stage)
        pre = before + shape.transfers_before(stage)
        longest = max(longest, *(pre + a * post + b * own for a, b in shape.paths(stage)))
        before += own
    return longest


class Runs:
    """Runs of the chain of at most `longest` positions, as indices of their contents.

    `from_start[i, k]` is the content of the run from position i to i + 1 + k, `to_stop[j, k]` that of the run from
    j - 1 - k to j; both `num_contents` (an index past the end) where there is no such run.
    """

    def __init__(self, contents: npt.NDArray[np.int64], num_contents: int, longest: int) -> None:
        size = contents.shape[0]
        padded = np.full((size + longest, size + longest), num_contents, dtype=np.int64)
        padded[:size, :size] = np.where(contents < 0, num_contents, contents)
        rows, steps = np.arange(size)[:, None], np.arange(longest)[None, :]
        self.stops = rows + 1 + steps
        self.starts = rows - 1 - steps
        self.from_start = padded[rows, self.stops]
        self.to_stop = np.where(self.starts < 0, num_contents, padded[self.starts, rows])
        self.longest = longest
        self.size = size


def best_partition(
    shape: PipelineShape,
    contents: npt.NDArray[np.int64],
    spans: npt.NDArray[np.int64],
    values: Sequence[Floats],
    *,
    at_least: float = 0.0,
    below: float,
    accuracy: float,
) -> Partition | None:
    """Bisection for Z.  `contents[i, j]` numbers the run from position i to j (negative: none), `spans` has the
    largest j - i of every content, `values[s]` the seconds of every content on stage s (`inf` where it cannot be).

    None when no partition has all its paths below `below` (finite).  `at_least` is a bound known before; the result
    is exact up to the relative `accuracy`.
    """
    least = np.minimum.reduce(values)
    possible = least * shape.num_micro_batches <= below
    if not possible.any():
        return None
    runs = Runs(contents, len(spans), int(spans[possible].max()))
    finder = _Finder(shape, runs, values)
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

    def __init__(self, shape: PipelineShape, runs: Runs, values: Sequence[Floats]) -> None:
        self._shape = shape
        self._runs = runs
        self._values = [np.append(v, np.inf) for v in values]
        reach = np.full(runs.size, np.inf)
        reach[0] = 0.0
        self._before = []
        for stage, v in enumerate(self._values):
            self._before.append(reach + shape.transfers_before(stage))
            reach = (reach[np.maximum(runs.starts, 0)] + v[runs.to_stop]).min(axis=1)
        least = float(reach[-1])
        self.floor = least + 2.0 * sum(shape.transfers) if np.isfinite(least) else 0.0
        self._rows = np.arange(runs.size)

    def path_within(self, limit: float) -> tuple[int, ...] | None:
        """A partition all of whose paths may stay below `limit`, or None when there is none."""
        shape, runs = self._shape, self._runs
        post = np.full(runs.size + runs.longest, np.inf)
        post[runs.size - 1] = 0.0
        choices = []
        for stage in reversed(range(shape.num_stages)):
            own, after = self._values[stage][runs.from_start], post[runs.stops]
            room = limit - self._before[stage][:, None]
            total = own + after
            later = after + shape.transfers_after(stage)
            fits = np.isfinite(total)
            for a, b in shape.paths(stage):
                fits &= b * own <= room if a == 0.0 else a * later + b * own <= room
            total = np.where(fits, total, np.inf)
            choice = total.argmin(axis=1)
            post[: runs.size] = total[self._rows, choice]
            choices.append(choice)
        if not np.isfinite(post[0]):
            return None
        path = [0]
        for choice in reversed(choices):
            path.append(path[-1] + 1 + int(choice[path[-1]]))
        return tuple(path)
