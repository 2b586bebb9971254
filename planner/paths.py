"""Paths through the actions of a schedule: how long a step takes at least, linear in the stages' seconds.

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
                                                      n = (m - 2 - w) // (v + 1), for every v

and (gpipe: exactly sum of T and 2 x + (m - 1) (max f + max b))

    either    pre + post + m T                        the slowest stage of both passes
    forward   pre + post + m f + b + (m - 1) B        the slowest of the forward passes; B <= max b of any partition
    backward  pre + post + f + m b + (m - 1) F

(zb-h1) the paths of 1f1b, with the part of b for the input in place of b everywhere.  In its own actions a stage has
the weights' parts w too: k = min(s + 1, m) of the m come after its last input gradient, and the last forward waits
for max(0, m - P) of them:

    stay, first   + (m - k) w       last, both   + max(0, m - P) w       visit   + max(0, m - P - n v) w
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

# Kinds of round trips that are looked at, by how many stages before the last they turn.
MOST_SHORTS = 32
# Kinds of round trips of a stage that are weighed with all that the stage does, those that visit most.
MOST_WEIGHED = 2


class Path(NamedTuple):
    """pre + `returns` x post + `turns` x (post without the last shorts[row] stages) + `forward` x f + `backward` x b
    + `weight` x w.
    """

    returns: int
    forward: float
    backward: float
    weight: float = 0.0
    turns: float = 0.0
    row: int = 0


class Trips(NamedTuple):
    """The paths of a stage with round trips in between, by how many stages before the last they turn:

    pre + 2 post + `turns` x (post without the last shorts[row] stages) + `stays` x T + `weight` x w
    """

    rows: Ints
    turns: Floats
    stays: Floats
    weight: Floats


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

    @property
    def steady(self) -> float:
        """Weight gradients of a stage before its last forward, where the backward pass is split."""
        return max(0.0, float(self.num_micro_batches - self.num_stages)) if self.schedule == "zb-h1" else 0.0

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
        paths = [Path(0, m, m, weight=early)]
        if not ahead:
            return paths
        paths += [Path(1, m - ahead, m, weight=early), Path(1, m, m - ahead, weight=self.steady)]
        if self.num_micro_batches - 2 >= ahead:
            paths.append(Path(2, m - ahead, m - ahead, weight=self.steady))
        trips = self.trips[stage]
        for trip in np.argsort(trips.stays, kind="stable")[:MOST_WEIGHED].tolist():
            stays = float(trips.stays[trip])
            more = float(trips.weight[trip]), float(trips.turns[trip]), int(trips.rows[trip])
            paths.append(Path(2, stays, stays, *more))
        return paths

    @cached_property
    def trips(self) -> list[Trips]:
        """Of every stage."""
        return [self._trips_of(stage) for stage in range(self.num_stages)]

    def _trips_of(self, stage: int) -> Trips:
        ahead = self.ahead(stage)
        span = ahead - self.shorts  # stages that a trip visits
        turns = np.where(span > 0, (self.num_micro_batches - 2 - ahead) // np.maximum(span + 1, 1), 0)
        if self.schedule == "gpipe":
            turns = np.zeros_like(turns)
        rows = np.flatnonzero(turns > 0)
        visits = (turns * span)[rows]
        stays, weight = self.num_micro_batches - ahead - visits, np.maximum(self.steady - visits, 0.0)
        return Trips(rows, turns[rows].astype(np.float64), stays.astype(np.float64), weight)

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
            along = self.transfers_after(stage, int(self.shorts[path.row]))
            found = found + path.turns * (posts[1 + path.row] + along)
        return found

    def after_trips(self, stage: int, posts: Floats) -> Floats:
        """What the paths with round trips have after a stage before their last trip, by trip first; `posts` as for
        `after`.
        """
        trips = self.trips[stage]
        beside = posts[1] + self.transfers_after(stage)
        along = self.along[self.num_stages - 1 - self.shorts[trips.rows]] - self.along[stage]
        shape = (-1,) + (1,) * (posts.ndim - 1)
        found: Floats = trips.turns.reshape(shape) * (posts[1:][trips.rows] + along.reshape(shape)) + beside
        return found

    def add(self, stage: int, posts: Floats, total: Floats | float, alone: Floats | float) -> None:
        """Add a stage's seconds to `posts`, which may have fewer rows."""
        posts[0] += total
        beyond = int(np.searchsorted(self.shorts, self.num_stages - stage))
        posts[1 : 1 + beyond] += alone

    @cached_property
    def shorts(self) -> Ints:
        """How many stages before the last the paths turn, ascending from 0."""
        most = self.num_stages - 1 if self.schedule != "gpipe" else 1
        if most <= MOST_SHORTS:
            return np.arange(max(most, 1))
        return np.array(sorted({round(short) for short in np.linspace(0, most - 1, MOST_SHORTS).tolist()}))


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
    posts = np.zeros(1 + len(shape.shorts))
    longest = 0.0
    for s in reversed(range(shape.num_stages)):
        paths = [
            float(shape.after(s, p, posts) + p.forward * f[s] + p.backward * b[s] + p.weight * w[s])
            for p in shape.paths(s)
        ]
        trips = shape.trips[s]
        if trips.rows.size:
            visiting = shape.after_trips(s, posts) + trips.stays * own[s] + trips.weight * w[s]
            paths.append(float(visiting.max() + posts[0]) + shape.transfers_after(s))
        longest = max(longest, float(pre[s]) + max(paths))
        shape.add(s, posts, own[s], own[s])
    return longest + float(w[0])
