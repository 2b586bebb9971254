"""The ladder: the best layout under each freedom, every rung allowing all that the one before allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.beside import Beside
from planner.describe import describe
from planner.grid_search import Incumbent
from planner.layout import Layout
from planner.outcome import Outcome
from planner.problem import Pricer
from planner.search import FREEDOMS, TOLERANCE, Freedom, Searcher, WithoutChance
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
# Seconds of the first searches below which the others are not worth a second process.
SMALL = 0.05


@dataclass(frozen=True)
class Rung:
    """One freedom's best layout, or None when nothing fits under it."""

    freedom: Freedom
    layout: Layout | None
    seconds: float
    outcome: Outcome

    @classmethod
    def of(cls, freedom: Freedom, outcome: Outcome) -> Rung:
        return cls(freedom, outcome.layout, outcome.seconds, outcome)


@dataclass(frozen=True)
class _Between:
    """What a search of the freedoms between the first and the last brings back."""

    rungs: list[Rung]
    priced: dict[Layout, float]
    predictions: dict[Layout, Prediction]


class Climb:
    """A search of every freedom up to `last`: `top` is the answer, what is between shows how it comes about.

    The freedoms between the first and the last are searched beside (`planner.beside`) and waited for by `rungs` alone.
    The integer program takes longer for each, so only the first and the last are searched.  `incumbent`: all that was
    priced here.
    """

    def __init__(
        self, searcher: Searcher, pricer: Pricer, last: Freedom, *, deadline: float, tolerance: float = TOLERANCE
    ) -> None:
        """`tolerance`: of the top."""
        if last == "interleaved" and not searcher.interleaved.possible:
            last = "cuts"
        self._pricer = pricer
        self.incumbent = Incumbent(pricer.seconds)
        freedoms = FREEDOMS[: FREEDOMS.index(last) + 1]
        start = time.monotonic()
        halfway = 0.5 * (start + deadline)
        outcome = searcher.search("uniform", self.incumbent, deadline=deadline if last == "uniform" else halfway)
        self.first = self.top = Rung.of("uniform", outcome)
        hopeless: Callable[[], WithoutChance] | None = None
        self._between: Beside[WithoutChance, _Between, _Between] | None = None
        if len(freedoms) > 2 and searcher.engine == "dp":
            searcher.begin("layers", self.incumbent, deadline=halfway)
            below = _Below(last, searcher.branch(), pricer, self.incumbent)
            whole, parts = freedoms[1:-1][:2], freedoms[3:-1]
            self._between = Beside(
                partial(below.hopeless, deadline=halfway),
                partial(below.search, parts, deadline=deadline),
                partial(below.search, whole, deadline=deadline),
                small=time.monotonic() - start < SMALL,
            )
            hopeless = partial(self._hopeless, self._between, below)
        if last != "uniform":
            outcome = searcher.search(last, self.incumbent, deadline=deadline, tolerance=tolerance, hopeless=hopeless)
            self.top = Rung.of(last, outcome)

    @staticmethod
    def _hopeless(between: Beside[WithoutChance, _Between, _Between], below: _Below) -> WithoutChance:
        found = between.first()
        below.leave_out(found)  # for what is done here of it
        return found

    def rungs(self) -> list[Rung]:
        """Of every freedom, in order; all that was priced for them is then with what was priced here."""
        between: list[Rung] = []
        if self._between is not None:
            parts, whole = self._between.rest()
            self._between = None
            for found in (whole, parts):
                between += found.rungs
                self._pricer.predictions.update(found.predictions)
                for layout, seconds in found.priced.items():
                    self.incumbent.priced.setdefault(layout, seconds)
        return [self.first, *between, *([self.top] if self.top is not self.first else [])]


class _Below:
    """The searches of freedoms between the first and the last, from the best layout of the first."""

    def __init__(self, last: Freedom, searcher: Searcher, pricer: Pricer, incumbent: Incumbent) -> None:
        self._last = last
        self._searcher = searcher
        self._pricer = pricer
        self._incumbent = incumbent.copy()

    def hopeless(self, *, deadline: float) -> WithoutChance:
        """What loses even with the last of them loses in every one; a good incumbent finds most."""
        if self._incumbent.layout is None:
            return WithoutChance(self._last, {}, {})
        found = self._searcher.without_chance(self._last, self._incumbent, deadline=deadline)
        self.leave_out(found)
        return found

    def leave_out(self, found: WithoutChance) -> None:
        self._searcher.leave_out(found)

    def search(self, freedoms: Sequence[Freedom], *, deadline: float) -> _Between:
        """Each from the best layout of the one before; whatever else was searched, with the same result."""
        searcher, incumbent = self._searcher.branch(), self._incumbent.copy()
        known, rungs = set(self._pricer.predictions), []
        for freedom in freedoms:
            outcome = searcher.search(freedom, incumbent, deadline=deadline, tolerance=NOTHING)
            rungs.append(Rung.of(freedom, outcome))
        predictions = {layout: p for layout, p in self._pricer.predictions.items() if layout not in known}
        return _Between(rungs, incumbent.priced, predictions)


def as_ladder(rungs: list[Rung]) -> tuple[LadderRung, ...]:
    """The rungs as they stand in a plan.  What a freedom allows, those after it allow too: each has the best so far."""
    ladder = []
    previous: float | None = None
    best: Rung | None = None
    for rung in rungs:
        if best is not None and best.seconds < rung.seconds:
            rung = replace(rung, layout=best.layout, seconds=best.seconds)
        best = rung
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
