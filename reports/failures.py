"""A failure model as a table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specs.failures import FailureModel
from specs.units import seconds


def render(model: FailureModel) -> RenderableType:
    """Rates by class with their intervals, repair and detection."""
    table = Table(
        title=f"Failures per 1,000 device-days: {model.name}",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for number, column in enumerate(("class", "count", "rate", "95 %", "takes", "repair", "detect")):
        table.add_column(column, justify="right" if number else "left", header_style="dim", no_wrap=bool(number))
    for item in model.classes:
        interval = "-"
        if item.rate_interval is not None:
            interval = " .. ".join(f"{1e3 * end:.3g}" for end in item.rate_interval)
        table.add_row(
            item.name,
            "-" if item.count is None else str(item.count),
            f"{1e3 * item.failures_per_device_day:.3g}",
            interval,
            item.blast_radius,
            f"{item.repair_hours:g} h" if item.repair_hours else "-",
            seconds(item.detect_seconds),
        )
    total = model.failures_per_device_day
    every = f"a device fails once in {1.0 / total:,.0f} days" if total else "nothing fails"
    return Group(table, Text(f"in all {1e3 * total:.3g}: {every}"))
