"""Cut the chain into stages: least (m - 1) x slowest stage + sum of stages, over all contiguous partitions.

    minimise    (m - 1) C + sum over stages s of v[s][i_s, i_(s+1)]
    subject to  0 = i_0 < i_1 < ... < i_P = end                          stages are runs of the chain, none empty
                C >= v[s][i_s, i_(s+1)]                for every s       C is the steady pace
                C >= (sum of stages + 2 X) / P                           and never below the mean round trip

Values v may be lower bounds (`inf` where a stage cannot exist); the result is then a bound too.  For every pace C
in ascending order the least sum is found by dynamic programming over (stage, position); the loop ends when
even the least sum of all cannot pay for a slower pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_PACES = 400


@dataclass(frozen=True)
class Partition:
    """Best partition under the values given.  `path` holds P + 1 positions; `bound` <= `seconds` (equal: optimal)."""

    path: tuple[int, ...]
    seconds: float
    bound: float


def best_partition(
    values: Sequence[Floats], num_micro_batches: int, transfers: float, *, stop_at: float = np.inf
) -> Partition | None:
    """None when no partition is finite.  `transfers` is X, the sum of the seconds between neighbouring stages.

    A search whose bound reaches `stop_at` ends early with what it has.
    """
    num_stages, after = len(values), num_micro_batches - 1
    pace = slowest_at_least(values)
    if not np.isfinite(pace):
        return None
    least, _ = _least_sum(values, np.inf)

    def total(stage_sum: float, slowest: float) -> float:
        return stage_sum + 2.0 * transfers + after * max(slowest, (stage_sum + 2.0 * transfers) / num_stages)

    def at_pace(limit: float) -> tuple[float, tuple[int, ...]]:
        stage_sum, path = _least_sum(values, limit)
        slowest = max(float(v[i, j]) for v, i, j in zip(values, path, path[1:], strict=False))
        return total(stage_sum, slowest), path

    best = at_pace(pace)
    slower = np.concatenate([v[(v > pace) & (v < np.inf)] for v in values])
    slower = np.unique(slower[least + 2.0 * transfers + after * slower < best[0]])
    for tried, limit in enumerate(slower.tolist()):
        bound = total(least, limit)
        if bound >= best[0]:
            break
        if bound >= stop_at or tried >= MAX_PACES:
            return Partition(best[1], best[0], bound)
        best = min(best, at_pace(limit))
    return Partition(best[1], best[0], best[0])


def slowest_at_least(values: Sequence[Floats]) -> float:
    """The least possible slowest stage."""
    reach = np.full(values[0].shape[0], np.inf)
    reach[0] = 0.0
    for v in values:
        reach = np.maximum(reach[:, None], v).min(axis=0)
    return float(reach[-1])


def _least_sum(values: Sequence[Floats], limit: float) -> tuple[float, tuple[int, ...]]:
    """Least sum of stages none of which exceeds `limit`, with its path."""
    reach = np.full(values[0].shape[0], np.inf)
    reach[0] = 0.0
    origins = []
    columns = np.arange(reach.size)
    for v in values:
        sums = reach[:, None] + np.where(v <= limit, v, np.inf)
        origin = sums.argmin(axis=0)
        reach = sums[origin, columns]
        origins.append(origin)
    path = [reach.size - 1]
    for origin in reversed(origins):
        path.append(int(origin[path[-1]]))
    return float(reach[-1]), tuple(reversed(path))
