"""How the choice of a plan changes with the failure rate, as one table."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cost_models.failures import default_failure_model
from specs.plan import Plan
from specs.units import seconds


def rate_choices_table(plan: Plan) -> RenderableType:
    """One line per layout that is best over a range of rates; one sentence where that is always the plan."""
    usual = days(1.0 / default_failure_model().failures_per_device_day)
    if len(plan.rate_choices) == 1 and plan.rate_choices[0].chosen:
        return Text(
            "Of the layouts that were priced this one delivers most at every failure rate, from a hundredth of the "
            f"usual one (a device fails once in {usual}) to a hundred times it"
        )
    table = Table(
        title=f"Which plan wins when a device fails once in ... (usual: {usual})",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for name in ("days", "step", "layout"):
        table.add_column(name, header_style="dim", justify="right" if name == "step" else "left")
    above: float | None = None
    for choice in plan.rate_choices:
        if choice.until_days is None:
            span = "any" if above is None else f"under {days(above)}"
        elif above is None:
            span = f"over {days(choice.until_days)}"
        else:
            span = f"{days(choice.until_days)} to {days(above)}"
        layout = "this plan" if choice.chosen else choice.layout
        table.add_row(span, seconds(choice.step_time_seconds), layout)
        above = choice.until_days
    return table


def days(number: float) -> str:
    """`1,811 days`, `2.4 days`."""
    return f"{number:,.0f} days" if number >= 10.0 else f"{number:.2g} days"
