"""`plait dry-run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dry_run(
    plan: Annotated[Path, typer.Argument(help="A plan file, of any size.")],
    rank: Annotated[int | None, typer.Option(help="The rank to play; without it the fullest of each stage.")] = None,
    all_classes: Annotated[bool, typer.Option("--all-classes", help="Every rank that is unlike the others.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play single ranks of a plan with fake tensors: bytes held, operations, bytes sent, beside the formulas'."""
    import json
    from dataclasses import asdict

    from cost_models.rank_work import PlanWork, seat_of
    from specs.base import load_document
    from specs.plan import Plan

    layout = load_document(Plan, plan, "plan")
    formulas = PlanWork(layout)
    if rank is not None:
        seats = [seat_of(layout, rank)]
    else:
        seats = formulas.unlike_seats() if all_classes else formulas.fullest_seats()

    from executor.dry_run import dry_run as play
    from reports.dry_run import render

    results = [(seat, play(layout, seat.process), formulas.of(seat)) for seat in seats]
    if as_json:
        rows = [{**seat._asdict(), "played": asdict(one), "formulas": asdict(two)} for seat, one, two in results]
        typer.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console

    Console(highlight=False).print(render(results))
