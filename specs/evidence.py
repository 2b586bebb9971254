"""What was found out about a plan: what the solver proved, what each freedom buys, what was not taken and why."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from specs.base import Spec

Objective = Literal["goodput", "step-time", "tokens-per-dollar", "memory"]


class Certificate(Spec):
    """What the solver proved.  `gap` = (objective - bound) / objective, both in seconds of step time per unit (bytes
    for the objective memory).  `freedom` is the ladder's last rung that was searched, `constraints` are the user's.
    """

    engine: str
    objective: Objective
    status: Literal["optimal", "feasible", "given"]
    objective_value: float
    bound: float
    gap: NonNegativeFloat
    seconds: NonNegativeFloat
    labels: NonNegativeInt = 0
    nodes: NonNegativeInt = 0  # of branch and bound
    evaluated: NonNegativeInt = 0
    freedom: str = ""
    constraints: tuple[str, ...] = ()
    pruned: dict[str, int] = Field(default_factory=dict)


class LadderRung(Spec):
    """Best plan of one freedom; every rung allows all that the one before allows, priced by one model."""

    freedom: str
    step_time_seconds: PositiveFloat | None  # None: nothing of this kind fits
    gain_over_previous: float | None  # fraction of step time saved
    layout: str
    reason: str = ""


class Alternative(Spec):
    """A plan that was not taken, and why."""

    layout: str
    step_time_seconds: PositiveFloat | None
    peak_memory_bytes: PositiveInt | None
    reason: str


class RateChoice(Spec):
    """The layout, of those that were priced, that delivers most over a range of failure rates.

    It does while a device fails less often than once in `until_days` (None: at every higher rate too); choices follow
    each other from rare failures to frequent ones.
    """

    layout: str
    chosen: bool
    step_time_seconds: PositiveFloat
    until_days: PositiveFloat | None
