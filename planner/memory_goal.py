"""The objective memory: least bytes on the fullest rank, of all layouts nearly as fast as the fastest.

    minimise    peak bytes
    subject to  step seconds <= (1 + slowdown) x step seconds of the fastest layout found

Whether any layout is fast enough within a cap is a search like every other, which ends with the first; bisection finds
the least such cap.  A cap within which the search proves that nothing is fast enough is a bound of the peak.
"""

from __future__ import annotations

import time

from planner.feasible import FirstWithin
from planner.layout import Layout
from planner.outcome import Outcome
from planner.problem import Pricer
from planner.search import TOLERANCE, Freedom, Searcher

# Relative distance between bound and peak at which bisection stops and calls the layout optimal.
MEMORY_TOLERANCE = 2e-3


def least_memory(
    searcher: Searcher, pricer: Pricer, freedom: Freedom, *, limit_seconds: float, deadline: float
) -> Outcome:
    """The layout of least peak memory within `limit_seconds`, of a step-time search's outcome.

    `seconds` and `bound` of the outcome are bytes.
    """
    fast = [
        (prediction.peak_memory_bytes, layout)
        for layout, prediction in pricer.predictions.items()
        if pricer.fits(prediction) and prediction.step_time_seconds <= limit_seconds
    ]
    high, best = min(fast, key=lambda pair: pair[0])
    low = proven = 0
    found = Outcome(best, high, 0.0, complete=True)
    while high - low > MEMORY_TOLERANCE * high:
        if time.monotonic() > deadline:
            found.complete = False
            break
        cap = (low + high) // 2
        layout, trial = _within(searcher, pricer, freedom, cap, limit_seconds, deadline)
        found.labels, found.nodes = found.labels + trial.labels, found.nodes + trial.nodes
        found.evaluated += trial.evaluated
        if layout is not None:
            high, best = pricer.predicted(layout).peak_memory_bytes, layout
        else:
            low = cap
            if trial.complete and trial.bound >= limit_seconds * (1.0 - TOLERANCE):
                proven, found.pruned = cap, trial.pruned
    found.layout, found.seconds, found.bound = best, high, proven
    return found


def _within(
    searcher: Searcher, pricer: Pricer, freedom: Freedom, cap: int, limit_seconds: float, deadline: float
) -> tuple[Layout | None, Outcome]:
    """Some layout within a cap of bytes that is fast enough, and what the search for it says."""

    def seconds(layout: Layout) -> float:
        prediction = pricer.predicted(layout)
        return prediction.step_time_seconds if prediction.peak_memory_bytes <= cap else float("inf")

    trial = searcher.within(cap - searcher.source.costs.reserved_bytes)
    incumbent = FirstWithin(seconds, limit_seconds * (1.0 + 1e-12))
    outcome = trial.search(freedom, incumbent, deadline=deadline)
    return incumbent.layout, outcome
