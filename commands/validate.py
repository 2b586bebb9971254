"""`plait validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def validate(
    runs: Annotated[Path, typer.Argument(help="Table (CSV) of published training runs, one per row.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: rows and summary.")] = False,
) -> None:
    """Predict published training runs and print the error of each, and by source, GPU and software stack."""
    import json

    from cost_models.validation import validate as validate_runs

    validation = validate_runs(runs)
    if as_json:
        typer.echo(json.dumps(validation.as_dict(), indent=1))
        return
    from rich.console import Console

    from reports.validation import render

    Console(highlight=False).print(render(validation))
