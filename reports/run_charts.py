"""A run as pictures: its loss, and what happened when: steps, checkpoints, losses of devices, restarts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reports.account import Attempt
from reports.svg import BLUE, FAINT, GREEN, INK, ORANGE, PINK, RED, SKY, Chart, is_narrow
from specs.runlog import IncidentRecord, Record, SlowRecord

MAX_POINTS = 1500  # of a curve: more than a screen has columns


def loss_chart(attempts: Sequence[Attempt]) -> Chart:
    """Training and held-out loss by step."""
    steps = {step.step: step.loss for attempt in attempts for step in attempt.steps}
    held_out = {record.step: record.loss for attempt in attempts for record in attempt.evaluations}
    every = max(1, len(steps) // MAX_POINTS)
    thinned = sorted(steps.items())[::every]

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.plot(*zip(*thinned, strict=True), color=BLUE, linewidth=1, label="training")
        if held_out:
            axes.plot(*zip(*sorted(held_out.items()), strict=True), "o-", color=RED, markersize=4, label="held out")
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats per token")
        axes.grid(axis="y")
        axes.legend()

    return Chart(draw, (2.8, 2.8), f"Loss over {len(steps)} steps, from {thinned[0][1]:.3g} to {thinned[-1][1]:.3g}")


def history_chart(attempts: Sequence[Attempt], records: Sequence[Record]) -> Chart:
    """The run on a time axis: step times below, what happened above."""
    origin = attempts[0].began
    length = attempts[-1].stopped - origin
    scale, unit = next(
        (size, name)
        for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
        if length >= 2 * size or size == 1
    )
    incidents = [record for record in records if isinstance(record, IncidentRecord)]
    slow = [record for record in records if isinstance(record, SlowRecord)]
    checkpoints = [record for attempt in attempts for record in attempt.checkpoints]
    steps = [step for attempt in attempts for step in attempt.steps]

    def at(time: float) -> float:
        return (time - origin) / scale

    def draw(figure: Any) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
        for attempt in attempts:
            upper.axvspan(at(attempt.began), at(attempt.start.time), color=ORANGE, alpha=0.5, linewidth=0)
            upper.axvspan(at(attempt.start.time), at(attempt.stopped), color=SKY, alpha=0.35, linewidth=0)
        upper.plot([], [], color=ORANGE, linewidth=6, alpha=0.5, label="starting")
        upper.plot([], [], color=SKY, linewidth=6, alpha=0.5, label="training")
        _marks(upper, [at(r.time) for r in checkpoints], 0.3, "|", GREEN, f"checkpoint ({len(checkpoints)})")
        broken = [attempt.stopped for attempt in attempts if attempt.end is None]
        _marks(upper, [at(time) for time in broken], 0.5, "x", RED, f"broke off ({len(broken)})")
        for record in incidents:
            upper.axvspan(at(record.time - sum(record.seconds.values())), at(record.time), color=PINK, linewidth=0)
        _marks(upper, [at(r.time) for r in incidents if r.lost], 0.7, "v", RED, "devices lost")
        _marks(upper, [at(r.time) for r in incidents if r.returned], 0.7, "^", GREEN, "devices back")
        _marks(upper, [at(r.time) for r in slow], 0.5, "d", ORANGE, "slow device")
        upper.set_ylim(0, 1)
        upper.set_yticks([])
        every = max(1, len(steps) // MAX_POINTS)
        longest = max(step.seconds for step in steps)
        factor, name = (1.0, "seconds") if longest >= 1 else (1e3, "milliseconds")
        lower.plot(
            [at(step.time) for step in steps[::every]],
            [step.seconds * factor for step in steps[::every]],
            ".",
            color=BLUE,
            markersize=3,
        )
        lower.set_ylim(bottom=0)
        lower.set_ylabel(f"{name} per step" if not is_narrow(figure) else name)
        lower.set_xlabel(f"{unit} since the start")
        lower.grid(axis="y")
        figure.legend(loc="outside lower left", ncols=2 if is_narrow(figure) else 8, fontsize=8)

    words = f"{len(attempts)} starts, {len(checkpoints)} checkpoints, {len(incidents)} incidents"
    return Chart(draw, (3.0, 3.6), words)


def _marks(axes: Any, times: Sequence[float], height: float, marker: str, colour: str, label: str) -> None:
    if times:
        axes.plot(times, [height] * len(times), marker, color=colour, markersize=7, label=label)


def seconds_chart(seconds: dict[str, float]) -> Chart:
    """Every second of the run by what it went to."""
    parts = sorted(((name, value) for name, value in seconds.items() if value > 0), key=lambda item: -item[1])
    total = sum(value for _, value in parts)

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.barh(
            range(len(parts)),
            [100 * value / total for _, value in parts],
            0.7,
            color=[GREEN if name == "step" else FAINT for name, _ in parts],
        )
        for place, (_, value) in enumerate(parts):
            axes.text(100 * value / total, place, f" {100 * value / total:.1f} %", va="center", color=INK)
        axes.set_yticks(range(len(parts)), [name.replace("_", " ") for name, _ in parts])
        axes.invert_yaxis()
        axes.set_xlim(0, 112)
        axes.set_xlabel("% of the run's wall clock")

    words = ", ".join(f"{name} {100 * value / total:.1f} %" for name, value in parts)
    return Chart(draw, (0.8 + 0.26 * len(parts),) * 2, f"Where the run's time went: {words}")
