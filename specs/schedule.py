"""Pipeline schedules as lists of actions per stage, printable and parseable: `F0 F1 B0 F2 B1 B2`.

The executor runs these lists and the cost model simulates the same ones.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from specs.plan import Schedule

Direction = Literal["F", "B"]


class Action(NamedTuple):
    """Forward (`F`) or backward (`B`) of one micro-batch on a stage."""

    direction: Direction
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.direction}{self.micro_batch}"


def stage_actions(schedule: Schedule, *, stage: int, num_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    """What a stage does in one step, in order.

    gpipe: all forwards, then all backwards.  1f1b (PipeDream-flush, arXiv 2006.09503): P - 1 - stage forwards to
    warm up, then one forward and one backward in turn, so that at most P - stage micro-batches are in flight.
    """
    forwards = [Action("F", i) for i in range(num_micro_batches)]
    backwards = [Action("B", i) for i in range(num_micro_batches)]
    if schedule == "gpipe":
        return (*forwards, *backwards)
    warm_up = min(num_stages - 1 - stage, num_micro_batches)
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return (*actions, *backwards[num_micro_batches - warm_up :])


def num_in_flight(actions: tuple[Action, ...]) -> int:
    """Largest number of micro-batches whose activations a stage holds at once."""
    held = peak = 0
    for action in actions:
        held += 1 if action.direction == "F" else -1
        peak = max(peak, held)
    return peak


def format_actions(actions: tuple[Action, ...]) -> str:
    """`F0 F1 B0 B1`."""
    return " ".join(map(str, actions))


def parse_actions(text: str) -> tuple[Action, ...]:
    """Inverse of `format_actions`.  Raises `ValueError` for a word that is no action."""
    actions = []
    for word in text.split():
        direction, number = word[:1], word[1:]
        if direction not in ("F", "B") or not number.isdigit():
            raise ValueError(f"{word!r} is not an action such as F0 or B12")
        actions.append(Action("F" if direction == "F" else "B", int(number)))
    return tuple(actions)
