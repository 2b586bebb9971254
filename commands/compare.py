"""`plait compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    run: Annotated[Path, typer.Argument(help="Run folder that `plait train --out` made.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the step's terms into this png, svg or pdf.")] = None,
) -> None:
    """Show predicted and measured side by side: step time by term, memory, goodput, every second of the run."""
    import json

    from recovery.policy import Policy
    from reports.compare import compare_run
    from reports.failure_trace import compare_failures
    from reports.failure_trace import render as render_failures

    comparison = compare_run(run)
    failures = compare_failures(run, lambda plan, options, lost: Policy(plan, options).way_on(lost).plan)
    if plot is not None:
        from reports.comparison_plot import draw

        draw(comparison, plot)
    if as_json:
        with_failures = None if failures is None else failures.as_json()
        typer.echo(json.dumps({**comparison.as_json(), "with_failures": with_failures}, indent=1))
        return
    from rich.console import Console

    from reports.comparison_table import render

    console = Console(highlight=False)
    console.print(render(comparison))
    if failures is not None:
        console.print(render_failures(failures))
    if plot is not None:
        typer.echo(f"wrote {plot}")
