"""A comparison as tables for the terminal, at most 80 columns wide."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.account import DOWN
from reports.compare import TERM_NAMES, Comparison, Row, Spread
from specs.units import num_bytes, percent, rate, seconds


def render(comparison: Comparison) -> RenderableType:
    """Everything `plait compare` prints."""
    parts: list[RenderableType] = [
        _step_table(comparison),
        Text(),
        Text(comparison.explanation),
        Text(),
        _memory_table(comparison),
        _throughput_table(comparison),
        _account_table(comparison),
    ]
    notes = comparison.notes
    if comparison.estimated:
        notes = ("At least one predicted number is an estimate, not measured on this cluster.", *notes)
    parts += [Text(f"note: {note}", style="yellow") for note in notes]
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", header_style="dim", no_wrap=bool(number))
    return table


def _error(row: Row) -> str:
    return "-" if row.error is None else percent(row.error, signed=True)


def _range(spread: Spread) -> str:
    return f"{seconds(spread.p10)} .. {seconds(spread.p90)}"


def _step_table(comparison: Comparison) -> Table:
    table = _table(
        f"Step time, median of {comparison.num_steps} steps", "", "predicted", "measured", "10 % .. 90 %", "error"
    )
    for name, row in comparison.terms.items():
        if row.predicted or row.measured.p90:
            table.add_row(
                TERM_NAMES[name],
                seconds(row.predicted),
                seconds(row.measured.median),
                _range(row.measured),
                _error(row),
            )
    row = comparison.step_time
    table.add_row(
        "step",
        seconds(row.predicted),
        seconds(row.measured.median),
        _range(row.measured),
        _error(row),
        style="bold",
    )
    return table


def _memory_table(comparison: Comparison) -> RenderableType:
    if not comparison.memory:
        return Text()
    table = _table(f"Memory of the fullest rank ({comparison.memory_method})", "", "predicted", "measured", "error")
    for name, row in comparison.memory.items():
        table.add_row(name, num_bytes(row.predicted), num_bytes(row.measured.median), _error(row))
    return Group(table, Text())


def _throughput_table(comparison: Comparison) -> RenderableType:
    table = _table("Throughput and goodput", "", "predicted", "measured")
    row = comparison.tokens_per_second
    table.add_row("throughput of a step", rate(row.predicted, "tokens"), rate(row.measured.median, "tokens"))
    table.add_row(
        "goodput, steady state", rate(comparison.predicted_goodput, "tokens"), rate(comparison.steady_goodput, "tokens")
    )
    table.add_row("goodput, whole run", "", rate(comparison.account.goodput_tokens_per_second, "tokens"))
    return Group(table, Text())


def _account_table(comparison: Comparison) -> RenderableType:
    account = comparison.account
    table = _table(f"Where {seconds(account.wall_seconds)} of wall clock went", "", "time", "share")
    for bucket, spent in sorted(account.seconds.items(), key=lambda item: -item[1]):
        if spent > 0:
            name = "between attempts" if bucket == DOWN else bucket.replace("_", " ")
            table.add_row(name, seconds(spent), percent(spent / account.wall_seconds))
    return Group(table, Text())
