"""`plait trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def trace(
    source: Annotated[Path, typer.Argument(help="Run folder that `plait train --out` made, or a plan file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace.")] = Path("trace.json"),
    profile: Annotated[Path | None, typer.Option(help="The profile that the plan was made with, if any.")] = None,
) -> dict[str, object]:
    """Write one step, predicted and (of a run) measured, for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    import json

    from commands.sources import trace_of
    from specs.base import write_whole

    document, notes = trace_of(source, profile)
    write_whole(out, json.dumps(document))
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"wrote {out}")
    return {"wrote": str(out), "num_events": len(document["traceEvents"]), "not_shown": notes}
