"""Who does how much of a step: whole micro-batches to unlike replicas, modules to unlike stages, so that the slowest
ends as early as can be.

minimise    max over replicas r of  fill_r + m_r seconds_r          m_r whole micro-batches of b_r sequences
subject to  sum over r of  m_r b_r = batch,  m_r >= 1
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

# Finish times looked at beyond the first at which all replicas together could do the batch; sizes of micro-batches
# have small common multiples, after which nothing new comes.
MOST_STEPS = 256
# Relative difference of works that are equal on paper.
ROUNDING = 4e-12


@dataclass(frozen=True, slots=True)
class Worker:
    """`count` equal replicas: `micro_batch` sequences take `seconds` each, after `fill_seconds` once a step."""

    count: int
    micro_batch: int
    seconds: float
    fill_seconds: float = 0.0

    def most(self, finish: float) -> int:
        """Micro-batches of one of them within `finish` seconds."""
        return math.floor((finish - self.fill_seconds) / self.seconds * (1.0 + 1e-12))


def deal(batch: int, workers: Sequence[Worker]) -> list[list[int]] | None:
    """Micro-batches of every replica, by worker; None when no shares add up to `batch` exactly.

    Only a common multiple of the micro-batches decides whether shares exist; among those that do the slowest replica
    ends as early as any shares allow.
    """
    if sum(worker.count * worker.micro_batch for worker in workers) > batch:
        return None
    if batch % math.gcd(*(worker.micro_batch for worker in workers)):
        return None
    finish = _first_finish(batch, workers)
    for _ in range(MOST_STEPS):
        most = [max(worker.most(finish), 1) for worker in workers]
        spare = sum(m * w.count * w.micro_batch for m, w in zip(most, workers, strict=True)) - batch
        given_up = _take(spare, [(w.micro_batch, (m - 1) * w.count) for m, w in zip(most, workers, strict=True)])
        if given_up is not None:
            return [_spread(m, w.count, less) for m, w, less in zip(most, workers, given_up, strict=True)]
        finish = min(w.fill_seconds + (m + 1) * w.seconds for m, w in zip(most, workers, strict=True))
    return None


def least_seconds(workers: Sequence[Worker], shares: Sequence[Sequence[int]]) -> float:
    """When it is done at the earliest, in any schedule: a replica's slowest stage works on each of its micro-batches,
    and one of them passes all stages.
    """
    return max(
        max(m * worker.seconds, worker.fill_seconds + worker.seconds)
        for worker, own in zip(workers, shares, strict=True)
        for m in own
    )


def finish_seconds(workers: Sequence[Worker], shares: Sequence[Sequence[int]]) -> float:
    """When the last replica is done."""
    return max(w.fill_seconds + max(own) * w.seconds for w, own in zip(workers, shares, strict=True))


def _first_finish(batch: int, workers: Sequence[Worker]) -> float:
    """Least finish time at which all replicas together could do the batch, at least one micro-batch each."""

    def done(finish: float) -> int:
        return sum(max(worker.most(finish), 1) * worker.count * worker.micro_batch for worker in workers)

    low = max(worker.fill_seconds + worker.seconds for worker in workers)
    if done(low) >= batch:
        return low
    high = max(worker.fill_seconds for worker in workers) + max(
        worker.seconds * math.ceil(batch / worker.micro_batch) for worker in workers
    )
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (low, middle) if done(middle) >= batch else (middle, high)
    return high


def _take(amount: int, coins: Sequence[tuple[int, int]]) -> list[int] | None:
    """How often to take each (size, most) so that they add up to `amount`; the last sizes as little as can be."""
    if amount < 0:
        return None
    if not coins:
        return [] if amount == 0 else None
    (size, most), rest = coins[0], coins[1:]
    highest = min(most, amount // size)
    # Fewer than `repeat` choices matter: beyond, the rest sees the same remainders again.
    repeat = math.lcm(size, *(other for other, _ in rest)) // size
    for number in range(highest, max(highest - repeat, -1), -1):
        found = _take(amount - number * size, rest)
        if found is not None:
            return [number, *found]
    return None


def _spread(most: int, count: int, less: int) -> list[int]:
    """`most` for each of `count`, minus `less` in all, as evenly as can be; the larger ones first."""
    total = most * count - less
    return [total // count + (index < total % count) for index in range(count)]


@lru_cache(maxsize=64)
def deal_modules(work: tuple[float, ...], sizes: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """Runs of modules for stages of so many ranks, with the least largest work per rank; None with fewer modules than
    stages.  `work` of every module, in any unit.
    """
    if len(sizes) > len(work):
        return None
    before = [0.0, *accumulate(work)]
    low, high = before[-1] / sum(sizes), before[-1] / min(sizes)
    if _filled(before, sizes, high) is None:
        return None
    while high > low * (1.0 + ROUNDING):
        middle = (low + high) / 2.0
        found = _filled(before, sizes, middle)
        if found is None:
            low = middle
            continue
        # What was found may be well within the limit that was asked for, and then is often the best already.
        runs = zip(pairwise(found), sizes, strict=True)
        high = max((before[stop] - before[start]) / size for (start, stop), size in runs)
        if _filled(before, sizes, high * (1.0 - ROUNDING)) is None:
            break
    bounds = _filled(before, sizes, high)
    return None if bounds is None else [tuple(range(start, stop)) for start, stop in pairwise(bounds)]


def _filled(before: Sequence[float], sizes: Sequence[int], most: float) -> tuple[int, ...] | None:
    """Boundaries with at most `most` work per rank and a module for every stage; None when there are none.

    `before[i]`: work of the first i modules.
    """
    number, came_from = len(before) - 1, [{0: 0}]  # of every stage: where it may end, and where it then began
    left = sum(sizes)
    for stage, size in enumerate(sizes):
        limit, ends = most * size * (1.0 + ROUNDING / 4.0), {}
        last = number - (len(sizes) - stage - 1)
        left -= size
        # Later stages can do no more than this; starts ascend, and so does how far they reach.
        covered = furthest = bisect_left(before, before[-1] - left * most * (1.0 + ROUNDING)) - 1
        for start in came_from[-1]:
            reach = before[start] + limit
            while furthest < last and before[furthest + 1] <= reach:
                furthest += 1
            if furthest > max(start, covered):
                ends.update(dict.fromkeys(range(max(start, covered) + 1, furthest + 1), start))
                covered = furthest
            if covered == last:
                break
        came_from.append(ends)
    if number not in came_from[-1]:
        return None
    bounds = [number]
    for ends in reversed(came_from[1:]):
        bounds.append(ends[bounds[-1]])
    return tuple(reversed(bounds))
