"""A pipeline's step as a picture: which stage computes which micro-batch when, and where it waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from reports.figures import new_figure, save_figure
from specs.plan import Schedule
from specs.schedule import Action, stage_actions
from specs.units import percent, seconds

FORWARD, BACKWARD = "#0072B2", "#56B4E9"


class Bar(NamedTuple):
    """An action on a stage, from `start` to `stop` seconds after the step began."""

    stage: int
    action: Action
    start: float
    stop: float


def bars_of(
    schedule: Schedule,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    num_micro_batches: int,
) -> list[Bar]:
    """Start and stop of every action; arguments as in `cost_models.pipeline.simulate`, whose makespan this has."""
    num_stages = len(forward_seconds)
    waiting = [
        list(stage_actions(schedule, stage=stage, num_stages=num_stages, num_micro_batches=num_micro_batches))
        for stage in range(num_stages)
    ]
    done: dict[tuple[int, Action], float] = {}
    free_at = [0.0] * num_stages
    bars: list[Bar] = []
    while any(waiting):
        before = len(bars)
        for stage, actions in enumerate(waiting):
            while actions:
                arrival = _arrival(actions[0], stage, num_stages, done, transfer_seconds)
                if arrival is None:
                    break
                action = actions.pop(0)
                start = max(free_at[stage], arrival)
                lasts = (forward_seconds if action.direction == "F" else backward_seconds)[stage]
                free_at[stage] = done[stage, action] = start + lasts
                bars.append(Bar(stage, action, start, start + lasts))
        assert len(bars) > before, "the schedule waits for itself"
    return bars


def _arrival(
    action: Action, stage: int, num_stages: int, done: dict[tuple[int, Action], float], transfer: Sequence[float]
) -> float | None:
    """When the input of an action is there; None while the neighbour has not made it."""
    if action.direction == "F":
        source, link = stage - 1, stage - 1
        if stage == 0:
            return 0.0
    elif stage == num_stages - 1:
        return done.get((stage, Action("F", action.micro_batch)))
    else:
        source, link = stage + 1, stage
    made = done.get((source, action))
    return None if made is None else made + transfer[link]


def draw(bars: Sequence[Bar], path: Path, *, title: str = "") -> None:
    """Write the picture; the format follows the file's ending.  Raises `BadInputError` when that cannot be done."""
    num_stages = 1 + max(bar.stage for bar in bars)
    makespan = max(bar.stop for bar in bars)
    figure, axes = new_figure(width=9.0, height=1.2 + 0.42 * num_stages)
    room = 0.018 * makespan  # a narrower bar has no room for its number
    for bar in bars:
        forward = bar.action.direction == "F"
        axes.barh(
            bar.stage,
            (bar.stop - bar.start) * 1e3,
            left=bar.start * 1e3,
            height=0.8,
            color=FORWARD if forward else BACKWARD,
            edgecolor="white",
            linewidth=0.5,
        )
        if bar.stop - bar.start > room:
            axes.text(
                (bar.start + bar.stop) / 2 * 1e3,
                bar.stage,
                str(bar.action.micro_batch),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if forward else "black",
            )
    busy = sum(bar.stop - bar.start for bar in bars)
    idle = 1 - busy / (num_stages * makespan)
    axes.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
    axes.invert_yaxis()
    axes.set_xlim(0, makespan * 1e3)
    axes.set_xlabel("milliseconds (dark: forward, light: backward, white: idle)")
    heading = f"One step's passes: {seconds(makespan)}, {percent(idle)} idle"
    axes.set_title(f"{title}: {heading}" if title else heading, loc="left", fontsize=10)
    save_figure(figure, path)
