"""A pipeline's step as a picture: which stage computes which micro-batch when, and where it waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cost_models.pipeline import Span
from reports.figures import new_figure, save_figure
from specs.schedule import Kind
from specs.units import percent, seconds

COLOURS: dict[Kind, str] = {"F": "#0072B2", "B": "#56B4E9", "I": "#56B4E9", "W": "#009E73"}
NEXT_COLOURS: dict[Kind, str] = {"F": "#E69F00", "B": "#F0E442", "I": "#F0E442", "W": "#009E73"}  # odd virtual stages


AFTER = "#BBBBBB"
# A step with more micro-batches than this also has a picture of its beginning: its bars are too narrow to tell apart.
MANY = 24


def draw(bars: Sequence[Span], path: Path, *, title: str = "", step_seconds: float | None = None) -> None:
    """Write the picture; the format follows the file's ending.  Raises `BadInputError` when that cannot be done.

    `step_seconds`: when the step ends; from a stage's last pass until then are gradient sync and optimizer.
    """
    num_stages = 1 + max(bar.stage for bar in bars)
    makespan = max(bar.stop for bar in bars)
    many = 1 + max(bar.action.micro_batch for bar in bars) > MANY
    width, height = 9.0, 1.2 + 0.42 * num_stages
    figure, axes = new_figure(width=width, height=2.0 * height if many else height)
    busy = sum(bar.stop - bar.start for bar in bars)
    idle = 1 - busy / (num_stages * makespan)
    words = ["dark: forward", "light: backward", "white: idle"]
    if any(bar.action.kind == "W" for bar in bars):
        words.insert(2, "green: weight gradients")
    if step_seconds is not None:
        words.append("grey: gradient sync and optimizer")
    lanes = [(makespan if step_seconds is None else step_seconds, step_seconds)]
    if many:
        lanes.append((_first(bars), None))
    axes.remove()
    parts = figure.subplots(len(lanes), 1, squeeze=False)[:, 0]
    for part, (end, after) in zip(parts, lanes, strict=True):
        _lanes(part, bars, end, after)
    parts[-1].set_xlabel(f"milliseconds{', the beginning' if many else ''} ({', '.join(words)})", fontsize=8)
    heading = f"One step's passes: {seconds(makespan)}, {percent(idle)} idle"
    parts[0].set_title(f"{title}: {heading}" if title else heading, loc="left", fontsize=10)
    save_figure(figure, path)


def _first(bars: Sequence[Span]) -> float:
    """When the last stage has done its first few micro-batches."""
    last = max(bar.stage for bar in bars)
    return sorted(bar.stop for bar in bars if bar.stage == last)[:MANY][-1]


def _lanes(axes: Any, bars: Sequence[Span], end: float, step_seconds: float | None) -> None:
    """A lane per stage, up to `end`."""
    num_stages = 1 + max(bar.stage for bar in bars)
    by_colour: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for bar in bars:
        if bar.start >= end:
            continue
        kind, number, virtual = bar.action
        colour = (NEXT_COLOURS if virtual % 2 else COLOURS)[kind]
        by_colour.setdefault((bar.stage, colour), []).append((bar.start * 1e3, (bar.stop - bar.start) * 1e3))
        if bar.stop - bar.start > 0.018 * end and bar.stop <= end:  # a narrower bar has no room for its number
            axes.text(
                (bar.start + bar.stop) / 2 * 1e3,
                bar.stage,
                str(number),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if kind in "FW" else "black",
            )
    for (stage, colour), spans in by_colour.items():
        narrow = max(length for _, length in spans) < 4e-3 * end * 1e3
        axes.broken_barh(
            spans, (stage - 0.4, 0.8), facecolor=colour, edgecolor="none" if narrow else "white", linewidth=0.5
        )
    if step_seconds is not None:
        for stage in range(num_stages):
            finish = max(bar.stop for bar in bars if bar.stage == stage)
            axes.broken_barh(
                [(finish * 1e3, (step_seconds - finish) * 1e3)], (stage - 0.15, 0.3), facecolor=AFTER, linewidth=0
            )
    axes.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.set_xlim(0, end * 1e3)
    axes.spines[["top", "right"]].set_visible(False)
