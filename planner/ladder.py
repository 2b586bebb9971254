"""The ladder: the best layout under each freedom, every rung allowing all that the one before allows."""

from __future__ import annotations

import time
from dataclasses import dataclass

from planner.describe import describe
from planner.grid_search import Incumbent
from planner.layout import Layout
from planner.outcome import Outcome
from planner.search import FREEDOMS, TOLERANCE, Freedom, Searcher
from specs.plan import LadderRung, Prediction

NAMES: dict[Freedom, str] = {
    "uniform": "best uniform",
    "layers": "+ recompute per module, uneven stages",
    "stages": "+ degree per stage",
    "modules": "+ degree per module",
    "cuts": "+ stage cuts inside layers",
    "interleaved": "+ interleaved schedules",
}
# Gains below this fraction are called nothing.
NOTHING = 5e-4


@dataclass(frozen=True)
class Rung:
    """One freedom's best layout, or None when nothing fits under it."""

    freedom: Freedom
    layout: Layout | None
    seconds: float
    outcome: Outcome


def climb(searcher: Searcher, incumbent: Incumbent, last: Freedom, *, deadline: float) -> list[Rung]:
    """Search every freedom up to `last`, each starting from the best layout of the one before.

    The integer program takes longer for each, so only the first and the last are searched.
    """
    rungs = []
    if last == "interleaved" and not searcher.interleaved.possible:
        last = "cuts"
    freedoms = FREEDOMS[: FREEDOMS.index(last) + 1]
    if searcher.engine == "ilp":
        freedoms = tuple(dict.fromkeys((FREEDOMS[0], last)))
    # What is interleaved is searched last, and rules out most of what the rung before takes longest for.
    halfway = 0.5 * (time.monotonic() + deadline) if last == "interleaved" else deadline
    for freedom in freedoms:
        tolerance = TOLERANCE if freedom == last else NOTHING
        until = deadline if freedom == last else halfway
        outcome = searcher.search(freedom, incumbent, deadline=until, tolerance=tolerance)
        rungs.append(Rung(freedom, outcome.layout, outcome.seconds, outcome))
        # A grid point that loses even with the last freedom loses in every rung; a good incumbent finds most of them.
        if freedom == freedoms[min(1, len(freedoms) - 1)] != last and incumbent.layout is not None:
            searcher.discard(last, incumbent, deadline=until)
    return rungs


def as_ladder(rungs: list[Rung]) -> tuple[LadderRung, ...]:
    """The rungs as they stand in a plan."""
    ladder = []
    previous: float | None = None
    for rung in rungs:
        seconds = rung.seconds if rung.layout is not None else None
        gain = None if previous is None or seconds is None else max(0.0, 1.0 - seconds / previous)
        ladder.append(
            LadderRung(
                freedom=NAMES[rung.freedom],
                step_time_seconds=seconds,
                gain_over_previous=gain,
                layout="" if rung.layout is None else describe(rung.layout),
                reason=_reason(rung, gain),
            )
        )
        previous = seconds
    return tuple(ladder)


def goodput_rung(fastest: Prediction, chosen: Prediction, layout: Layout) -> LadderRung:
    """The rung above the fastest layout: the one that delivers most."""
    more = chosen.goodput_tokens_per_second / fastest.goodput_tokens_per_second - 1.0
    slower = chosen.step_time_seconds / fastest.step_time_seconds - 1.0
    return LadderRung(
        freedom="+ goodput objective",
        step_time_seconds=chosen.step_time_seconds,
        gain_over_previous=-slower if slower > 0.0 else 0.0,
        layout=describe(layout),
        reason=f"delivers {100.0 * more:.2f} % more" if more >= NOTHING else "the fastest delivers most",
    )


def memory_rung(fastest: Prediction, chosen: Prediction, layout: Layout) -> LadderRung:
    """The rung above the fastest layout: the one that needs least memory and is nearly as fast."""
    less = 1.0 - chosen.peak_memory_bytes / fastest.peak_memory_bytes
    slower = chosen.step_time_seconds / fastest.step_time_seconds - 1.0
    return LadderRung(
        freedom="+ memory objective",
        step_time_seconds=chosen.step_time_seconds,
        gain_over_previous=-slower if slower > 0.0 else 0.0,
        layout=describe(layout),
        reason=f"fills {100.0 * less:.1f} % less memory" if less >= NOTHING else "the fastest fills least",
    )


def _reason(rung: Rung, gain: float | None) -> str:
    if rung.layout is None:
        return "nothing of this kind fits"
    if not rung.outcome.complete:
        return "time limit: the best so far"
    if gain is None:
        return "" if rung.freedom == "uniform" else "the first that fits"
    if gain < NOTHING:
        return "buys nothing here"
    return ""
