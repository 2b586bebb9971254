"""A pipeline's step as a picture: which stage computes which micro-batch when, and where it waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cost_models.pipeline import Span
from reports.figures import new_figure, save_figure
from specs.schedule import Kind
from specs.units import percent, seconds

COLOURS: dict[Kind, str] = {"F": "#0072B2", "B": "#56B4E9", "I": "#56B4E9", "W": "#009E73"}
NEXT_COLOURS: dict[Kind, str] = {"F": "#E69F00", "B": "#F0E442", "I": "#F0E442", "W": "#009E73"}  # odd virtual stages


def draw(bars: Sequence[Span], path: Path, *, title: str = "") -> None:
    """Write the picture; the format follows the file's ending.  Raises `BadInputError` when that cannot be done."""
    num_stages = 1 + max(bar.stage for bar in bars)
    makespan = max(bar.stop for bar in bars)
    figure, axes = new_figure(width=9.0, height=1.2 + 0.42 * num_stages)
    room = 0.018 * makespan  # a narrower bar has no room for its number
    for bar in bars:
        kind, _, virtual = bar.action
        axes.barh(
            bar.stage,
            (bar.stop - bar.start) * 1e3,
            left=bar.start * 1e3,
            height=0.8,
            color=(NEXT_COLOURS if virtual % 2 else COLOURS)[kind],
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
                color="white" if kind in "FW" else "black",
            )
    busy = sum(bar.stop - bar.start for bar in bars)
    idle = 1 - busy / (num_stages * makespan)
    axes.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
    axes.invert_yaxis()
    axes.set_xlim(0, makespan * 1e3)
    axes.set_xlabel("milliseconds (dark: forward, light: backward, green: weight gradients, white: idle)")
    heading = f"One step's passes: {seconds(makespan)}, {percent(idle)} idle"
    axes.set_title(f"{title}: {heading}" if title else heading, loc="left", fontsize=10)
    save_figure(figure, path)
