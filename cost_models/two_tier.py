"""Two tiers of checkpoints: often to the memory of other hosts, seldom to storage.

    segment = work tau, then a save to memory (stall s); after every n-th segment also one to storage (stall S more)

A failure of kind A (the memory copy survives, probability a) goes back to the last segment whose memory copy is
complete (lag l after its stall); one of kind B goes back to the last storage save that is durable, which it is once
m more segments are done (the drain runs beside training).  After that the segments since it are done again, with
their saves.  Exact for Poisson failures, which also strike during restarts:

    V(i)  expected seconds from "segment i since the durable base is next" to base + n + m, i = 0 .. n + m - 1
    G     = n tau / V(m)

A run that just restarted gets its next memory copy the lag later than one that runs on, so each i has two values;
all are linear in the one unknown V after a restart from storage, which the recursion from the end carries along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cost_models.renewal import exact_interval


@dataclass(frozen=True, slots=True)
class TwoTier:
    """Inputs, in seconds.  `restart_memory` and `restart_storage` are detection + restart + load from each tier."""

    rate_per_second: float
    memory_survives: float
    memory_stall: float
    memory_lag: float
    storage_stall: float
    storage_lag: float
    restart_memory: float
    restart_storage: float


@dataclass(frozen=True, slots=True)
class TwoTierOptimum:
    """Best work per segment, segments per storage save, and the renewal factor they reach."""

    work_seconds: float
    segments: int
    factor: float


def drain_segments(case: TwoTier, work_seconds: float) -> int:
    """Whole segments that pass until a storage save is durable."""
    return math.ceil(case.storage_lag / (work_seconds + case.memory_stall))


def two_tier_factor(case: TwoTier, work_seconds: float, segments: int) -> float:
    """G for `segments` memory saves of `work_seconds` of work each per storage save."""
    rate = case.rate_per_second
    drain = drain_segments(case, work_seconds)
    last = segments + drain
    if rate == 0.0:
        cycle = segments * (work_seconds + case.memory_stall) + case.storage_stall
        return segments * work_seconds / cycle
    if rate * (work_seconds + case.memory_stall + case.storage_stall + case.memory_lag) > 300.0:
        return 0.0
    survives = case.memory_survives
    # Expected seconds until work resumes, and whether it resumes from storage: restart_storage has to be got
    # through whole; a memory restart is tried again by kind A and turns into a storage restart by kind B.
    from_storage = math.expm1(rate * case.restart_storage) / rate
    passes = math.exp(-rate * case.restart_memory)
    leaves = 1.0 - survives * (1.0 - passes)
    to_storage = (1.0 - survives) * (1.0 - passes) / leaves
    from_memory = (1.0 - passes) / (rate * leaves) + to_storage * from_storage

    def attempt(seconds: float) -> tuple[float, float]:
        """Probability of no failure in `seconds`, and the mean time spent in it."""
        survival = math.exp(-rate * seconds)
        return survival, (1.0 - survival) / rate

    # fresh: just restarted, the memory copy of the segment counts `memory_lag` later; running: it counts one cycle on.
    # Each value is constant + slope * V with V = seconds from a storage restart to the end (base position 0, fresh).
    fresh, running = (0.0, 0.0), (0.0, 0.0)
    at_drain = (0.0, 0.0)
    for position in reversed(range(last)):
        stall = case.memory_stall
        if position % segments == segments - 1:
            stall += case.storage_stall
        cycle = work_seconds + stall
        # a failure of either kind from position i: back to fresh(i) by A, to V by B
        fail_constant = survives * from_memory + (1.0 - survives) * from_storage
        by_memory = survives * (1.0 - to_storage)
        by_storage = 1.0 - by_memory
        success, spent = attempt(cycle + case.memory_lag)
        failed = 1.0 - success
        share = 1.0 - failed * by_memory
        fresh_here = (
            (spent + success * running[0] + failed * fail_constant) / share,
            (success * running[1] + failed * by_storage) / share,
        )
        success, spent = attempt(cycle)
        failed = 1.0 - success
        running_here = (
            spent + success * running[0] + failed * (fail_constant + by_memory * fresh_here[0]),
            success * running[1] + failed * (by_storage + by_memory * fresh_here[1]),
        )
        fresh, running = fresh_here, running_here
        if position == drain:
            at_drain = running
    restart = fresh[0] / (1.0 - fresh[1])
    return segments * work_seconds / (at_drain[0] + at_drain[1] * restart)


def best_two_tier(case: TwoTier, *, shortest_seconds: float = 0.0, most_segments: int = 256) -> TwoTierOptimum:
    """Best work per segment (at least `shortest_seconds`) and number of segments per storage save.

    No save of a tier begins before the last one is complete.  Golden section in log(work) for n = 1, 2, 4, ..., then
    from the best of these to ever better neighbours.
    """

    def best_work(segments: int) -> TwoTierOptimum:
        stall = case.memory_stall + case.storage_stall / segments
        floor = max(
            shortest_seconds,
            case.memory_lag - case.memory_stall,
            case.storage_lag / segments - case.memory_stall,
            1e-3,
        )
        guess = max(exact_interval(case.rate_per_second, stall), floor)
        low, high = max(math.log(guess) - 3.0, math.log(floor)), math.log(guess) + 3.0
        ratio = (math.sqrt(5.0) - 1.0) / 2.0
        for _ in range(30):
            left, right = high - ratio * (high - low), low + ratio * (high - low)
            if two_tier_factor(case, math.exp(left), segments) < two_tier_factor(case, math.exp(right), segments):
                low = left
            else:
                high = right
        work = math.exp((low + high) / 2.0)
        return TwoTierOptimum(work, segments, two_tier_factor(case, work, segments))

    tried = {n: best_work(n) for n in (2**power for power in range(most_segments.bit_length()))}
    centre = max(tried, key=lambda n: tried[n].factor)
    step = max(centre // 4, 1)
    while step:
        for n in (centre - step, centre + step):
            if 1 <= n <= most_segments and n not in tried:
                tried[n] = best_work(n)
        best = max(tried, key=lambda n: tried[n].factor)
        step = step if best != centre else step // 2
        centre = best
    return tried[centre]
