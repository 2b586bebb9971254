"""`plait schema`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def schema(
    kind: Annotated[
        Literal["plan", "profile", "model", "cluster", "failures", "runlog"],
        typer.Argument(help="Which file's schema."),
    ],
) -> dict[str, object]:
    """Print the JSON schema of a file that Plait reads or writes."""
    import json

    from reports.schemas import schema_of

    found = schema_of(kind)
    typer.echo(json.dumps(found, indent=1))
    return found
