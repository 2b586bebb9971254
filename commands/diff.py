"""`plait diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def diff(
    a: Annotated[Path, typer.Argument(help="A plan file.")],
    b: Annotated[Path, typer.Argument(help="Another plan file.")],
) -> None:
    """Show how two plans differ: shape, modules, predicted time and memory."""
    from rich.console import Console

    from reports.explain import render_difference
    from specs.base import load_document
    from specs.plan import Plan

    Console(highlight=False).print(render_difference(load_document(Plan, a, "plan"), load_document(Plan, b, "plan")))
