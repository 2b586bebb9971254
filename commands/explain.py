"""`plait explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    plan: Annotated[Path, typer.Argument(help="plan.json from `plait plan`.")],
    module: Annotated[str | None, typer.Option(help="One module, e.g. layer.3.mlp; default: one of each kind.")] = None,
    profile: Annotated[Path | None, typer.Option(help="The profile that the plan was made with, if any.")] = None,
    time_limit: Annotated[
        float, typer.Option(min=0.0, help="Seconds for each shadow price; 0 leaves them out.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why every module runs as it does, what else would cost, and what one more GiB or faster links would buy."""
    import json
    from dataclasses import asdict

    from planner.start import explain_plan
    from reports.explain import render_explanation

    found = explain_plan(plan, profile, module, time_limit)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
        return
    from rich.console import Console

    rows = [(item.module, item.count, item.stage, item.neighbours) for item in found.modules]
    Console(highlight=False).print(render_explanation(found.free_bytes, rows, found.prices, found.schedules))
