"""`plait diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def diff(
    a: Annotated[Path, typer.Argument(help="A plan file.")],
    b: Annotated[Path, typer.Argument(help="Another plan file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how two plans differ: shape, modules, predicted time and memory."""
    import json

    from reports.explain import difference_json, render_difference
    from specs.base import load_document
    from specs.plan import Plan

    plans = load_document(Plan, a, "plan"), load_document(Plan, b, "plan")
    if as_json:
        typer.echo(json.dumps(difference_json(*plans), indent=1))
        return
    from rich.console import Console

    Console(highlight=False).print(render_difference(*plans))
