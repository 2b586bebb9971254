"""`plait schema`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def schema(
    kind: Annotated[
        Literal["plan", "profile", "model", "cluster", "failures", "runlog"],
        typer.Argument(help="Which file's schema."),
    ],
) -> None:
    """Print the JSON schema of a file that Plait reads or writes."""
    import json

    from reports.schemas import schema_of

    typer.echo(json.dumps(schema_of(kind), indent=1))
