"""Schedules of what takes a damaged replica's place, and what their stages hold."""

from __future__ import annotations

from specs.plan import Pipeline
from specs.schedule import Schedule


def schedule_after(old: Pipeline | None) -> Schedule:
    """A given schedule is of one number of micro-batches, so it does not outlive a change of shares."""
    if old is None:
        return "1f1b"
    if old.schedule != "given":
        return old.schedule
    return "1f1b" if old.num_virtual == 1 else "interleaved"


def most_kept(schedule: Schedule, stage: int, num_stages: int, num_virtual: int) -> int | None:
    """Micro-batches that a stage holds where there are enough of them (None: all), rounded up."""
    if schedule == "gpipe":
        return None
    if schedule == "zb-h1":  # what waits for its weight gradients counted whole
        return num_stages
    ahead = 2 * (num_stages - 1 - stage) + (num_virtual - 1) * num_stages if num_virtual > 1 else num_stages - 1 - stage
    return -(-(ahead + 1) // num_virtual)
