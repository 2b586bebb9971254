"""A sweep as a table, as JSON and as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cost_models.sweep_point import SweepPoint
from reports.figures import new_figure, save_figure
from specs.errors import BadInputError
from specs.units import num_bytes

NAMES = {"global_batch": "batch", "seq_len": "seq len"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe-Ito


def render(points: Sequence[SweepPoint]) -> RenderableType:
    """One line a point; below it what does not fit, and why.  Batch and sequence length are columns if they vary."""
    priced = any(point.dollars_per_million_tokens is not None for point in points)
    varied = [axis for axis in ("global_batch", "seq_len") if len({getattr(point, axis) for point in points}) > 1]
    fixed = [f"{NAMES[axis]} {getattr(points[0], axis)}" for axis in NAMES if axis not in varied]
    table = Table(title=", ".join(fixed) or None, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("cluster", header_style="dim")
    columns = [NAMES[axis] for axis in varied]
    columns += ["tokens/s", "per device", *(["$ per M tokens"] if priced else []), "peak memory"]
    for name in columns:
        table.add_column(name, justify="right", header_style="dim")
    table.add_column("stages x ranks x replicas", header_style="dim")
    best = _cheapest(points) if priced else None
    for point in points:
        row = [point.cluster, *(str(getattr(point, axis)) for axis in varied), *_figures(point)]
        if priced:
            dollars = point.dollars_per_million_tokens
            row.append("" if dollars is None else f"{dollars:.4g}{'*' if point is best else ''}")
        memory = point.peak_memory_bytes
        row += ["" if memory is None else num_bytes(memory), point.layout or "no plan"]
        table.add_row(*row)
    parts: list[RenderableType] = [table]
    problems = [point for point in points if point.problem]
    if problems:
        parts.append(Text())
    parts += [Text(f"{_name(point)}: {point.problem}") for point in problems]
    if len(problems) < len(points):
        parts += [Text(), Text(_footnote(points, priced))]
    return Group(*parts)


def _figures(point: SweepPoint) -> list[str]:
    speed = point.tokens_per_second
    if speed is None:
        return ["", ""]
    return [f"{speed:,.0f}", f"{speed / point.num_devices:,.0f}"]


def _name(point: SweepPoint) -> str:
    return f"{point.cluster}, batch {point.global_batch} x {point.seq_len}"


def _cheapest(points: Sequence[SweepPoint]) -> SweepPoint | None:
    known = [point for point in points if point.dollars_per_million_tokens is not None]
    return min(known, key=lambda point: point.dollars_per_million_tokens or 0.0, default=None)


def _footnote(points: Sequence[SweepPoint], priced: bool) -> str:
    estimated = any(p.plan is not None and p.plan.predicted is not None and p.plan.predicted.estimated for p in points)
    source = "estimated: no profile; datasheets and published curves" if estimated else "measured costs"
    if priced:
        return f"{source}. Dollars are for kept tokens (goodput: checkpoints, failures). * the cheapest."
    return f"{source}. For dollars per million tokens give --dollars-per-hour DEVICE=PRICE."


def as_json(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """The table's numbers without rounding; absent ones are null."""
    return [
        {
            "cluster": point.cluster,
            "device": point.device,
            "num_devices": point.num_devices,
            "global_batch": point.global_batch,
            "seq_len": point.seq_len,
            "tokens_per_second": point.tokens_per_second,
            "goodput_tokens_per_second": point.goodput_tokens_per_second,
            "dollars_per_million_tokens": point.dollars_per_million_tokens,
            "peak_memory_bytes": point.peak_memory_bytes,
            "gap": None if point.plan is None or point.plan.certificate is None else point.plan.certificate.gap,
            "layout": point.layout or None,
            "problem": point.problem or None,
        }
        for point in points
    ]


def draw(points: Sequence[SweepPoint], path: Path) -> None:
    """Tokens per second with the straight line of perfect scaling, and beside it the cost (or rate) per device.

    Raises `BadInputError` when no point has a plan or the picture cannot be written.
    """
    known = [point for point in points if point.tokens_per_second is not None]
    if not known:
        raise BadInputError(f"no picture {path}: none of the points has a plan.")
    axis, label = _axis(points)
    figure, _ = new_figure(width=10.0, height=3.8)
    figure.clear()
    left, right = figure.subplots(1, 2)
    priced = all(point.dollars_per_million_tokens is not None for point in known)
    for colour, (name, line) in zip(COLOURS * len(known), _lines(known, axis).items(), strict=False):
        xs = [getattr(point, axis) for point in line]
        speeds = [point.tokens_per_second or 0.0 for point in line]
        left.plot(xs, speeds, "o-", color=colour, label=name)
        if axis == "num_devices":
            left.plot(xs, [speeds[0] * x / xs[0] for x in xs], ":", color=colour, linewidth=1.0)
        per_device = [s / point.num_devices for s, point in zip(speeds, line, strict=True)]
        right.plot(xs, [p.dollars_per_million_tokens for p in line] if priced else per_device, "o-", color=colour)
    left.set_ylabel("tokens/s" + (" (dotted: perfect scaling)" if axis == "num_devices" else ""))
    right.set_ylabel("dollars per million kept tokens" if priced else "tokens/s per device")
    ticks = sorted({getattr(point, axis) for point in known})
    for axes in (left, right):
        axes.set_xlabel(label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(0.0, 1.08 * axes.get_ylim()[1])
        axes.spines[["top", "right"]].set_visible(False)
    if axis == "num_devices":
        left.set_yscale("log", base=2)
        left.autoscale(axis="y")
        left.yaxis.set_major_formatter("{x:,.0f}")
    left.legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def _axis(points: Sequence[SweepPoint]) -> tuple[str, str]:
    """What varies: devices before sequence length before batch."""
    for axis, label in (("num_devices", "devices"), ("seq_len", "tokens per sequence")):
        if len({getattr(point, axis) for point in points}) > 1:
            return axis, label
    return "global_batch", "sequences per step"


def _lines(points: Sequence[SweepPoint], axis: str) -> dict[str, list[SweepPoint]]:
    """Points that differ in the axis only, ascending, by their name in the legend."""
    lines: defaultdict[str, list[SweepPoint]] = defaultdict(list)
    for point in sorted(points, key=lambda point: int(getattr(point, axis))):
        parts = [point.device if axis == "num_devices" else point.cluster]
        if axis != "global_batch":
            parts.append(f"batch {point.global_batch}")
        if axis != "seq_len":
            parts.append(f"{point.seq_len} tokens")
        lines[", ".join(parts)].append(point)
    return dict(lines)
