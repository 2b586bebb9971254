"""`plait estimate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def estimate(
    plan: Annotated[Path, typer.Argument(help="A plan file, from `plait plan` or written by hand.")],
    profile: Annotated[Path | None, typer.Option(help="profile.json; without it shipped device data.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Price any plan: step time by term, memory of the fullest rank, goodput."""
    import json

    from planner.start import estimate_plan

    layout, predicted = estimate_plan(plan, profile)
    if as_json:
        typer.echo(json.dumps(predicted.model_dump(mode="json"), indent=1))
        return
    from rich.console import Console, Group

    from reports.plan import render_prediction

    Console(highlight=False).print(Group(*render_prediction(layout, predicted, profiled=profile is not None)))
