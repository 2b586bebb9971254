"""Published runs against predictions, as tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cost_models.validation import ErrorSummary, Quantity, Validation, ValidationRow
from specs.units import num_bytes, percent, seconds

QUANTITY_NAMES: dict[Quantity, str] = {
    "step_time_seconds": "step time",
    "peak_memory_bytes": "memory",
    "fits": "out of memory",
}


def render(validation: Validation) -> RenderableType:
    """Everything `plait validate` prints: each row, what was left out and why, and the errors by group."""
    predicted = [row for row in validation.rows if row.skipped is None]
    skipped = Counter(row.skipped for row in validation.rows if row.skipped is not None)
    parts: list[RenderableType] = [_row_table(predicted), Text()]
    by_row = [f"   {row.id}: {row.skipped}" for row in validation.rows if row.skipped is not None]
    if by_row:
        parts += [Text(f"Not predicted: {len(by_row)}", style="bold"), Text("\n".join(by_row)), Text()]
        parts += [Text("\n".join(f"   {count:4d}  {reason}" for reason, count in skipped.most_common())), Text()]
    parts += _summary_tables(validation.summary)
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        side, overflow = ("right", "ellipsis") if number else ("left", "fold")
        table.add_column(column, justify=side, header_style="dim", no_wrap=bool(number), overflow=overflow)  # type: ignore[arg-type]
    return table


def _value(row: ValidationRow, value: float | None) -> str:
    if value is None:
        return "-"
    return seconds(value) if row.quantity == "step_time_seconds" else num_bytes(value)


def _row_table(rows: Sequence[ValidationRow]) -> Table:
    table = _table("Published runs", "run", "quantity", "measured", "predicted", "error")
    for row in rows:
        error = "-" if row.relative_error is None else percent(row.relative_error, signed=True)
        if row.quantity == "fits" and row.relative_error is not None:
            error = "does not fit: right" if row.relative_error > 0 else "fits: wrong"
        table.add_row(
            row.id, QUANTITY_NAMES[row.quantity], _value(row, row.measured), _value(row, row.predicted), error
        )
    return table


def _summary_tables(summary: Sequence[ErrorSummary]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for quantity in dict.fromkeys(item.quantity for item in summary):
        columns = ("", "rows", "median", "mean", "90 %", "worst", "bias", "rank")
        table = _table(f"Errors: {QUANTITY_NAMES[quantity]}", *columns)
        for item in sorted(summary, key=lambda s: (s.group != "all", s.group)):
            if item.quantity == quantity:
                table.add_row(
                    item.group,
                    str(item.count),
                    percent(item.median_absolute_error),
                    percent(item.mean_absolute_error),
                    percent(item.percentile_90_absolute_error),
                    percent(item.worst_error, signed=True),
                    percent(item.bias, signed=True),
                    "-" if item.rank_correlation is None else f"{item.rank_correlation:.3f}",
                )
        parts += [table, Text()]
    return parts
