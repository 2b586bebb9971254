"""What a rank holds, computes and sends: counted in the executor's code, beside the formulas."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from cost_models.rank_work import RankWork, Seat
from specs.units import num_bytes, percent

_HELD_NAMES = {
    "weight": "weights held",
    "gradient": "gradients held",
    "optimizer": "optimizer states held",
    "activation": "activations held",
    "peak": "at the most",
}


def render(results: Sequence[tuple[Seat, RankWork, RankWork]]) -> Group:
    """A table for each rank: played, by formula, and how far they are apart."""
    return Group(*(_table(*result) for result in results))


def _table(seat: Seat, played: RankWork, formulas: RankWork) -> Table:
    title = f"rank {seat.rank} (replica {seat.replica}, stage {seat.stage}, position {seat.position}), one step"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(("", "played", "formulas", "apart")):
        table.add_column(column, justify="right" if number else "left", header_style="dim")
    for name in _HELD_NAMES:
        one, two = (getattr(work, f"{name}_bytes") for work in (played, formulas))
        table.add_row(_HELD_NAMES[name], *_bytes(one, two))
    operations = (f"{work.flop / 1e12:,.2f} TFLOP" for work in (played, formulas))
    table.add_row("operations", *operations, _apart(played.flop, formulas.flop))
    for op in sorted({*played.sent_bytes, *formulas.sent_bytes}):
        one, two = (work.sent_bytes.get(op, 0.0) for work in (played, formulas))
        table.add_row(f"{op.replace('_', ' ')} sent", *_bytes(one, two))
    return table


def _bytes(one: float, two: float) -> tuple[str, str, str]:
    return num_bytes(one), num_bytes(two), _apart(one, two)


def _apart(one: float, two: float) -> str:
    if one == two:
        return "0"
    return percent(one / two - 1.0, signed=True) if two else "not in the formulas"
