"""`plait report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    source: Annotated[Path, typer.Argument(help="Run folder that `plait train --out` made, or a plan file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    profile: Annotated[Path | None, typer.Option(help="The profile that the plan was made with, if any.")] = None,
    days: Annotated[
        float, typer.Option(min=0.01, max=3650.0, help="Of failures to play; see `plait simulate`.")
    ] = 30.0,
    trials: Annotated[int, typer.Option(min=2, max=100_000, help="Histories to play.")] = 20,
) -> dict[str, object]:
    """Draw a plan, or a run beside its plan, on one page that opens offline in any browser."""
    from commands.sources import gather
    from reports.page import page
    from specs.base import write_whole

    inputs = gather(source, profile=profile, days=days, trials=trials)
    write_whole(out, page(inputs, source=str(source)))
    for reason in inputs.missing:
        typer.echo(f"note: {reason}", err=True)
    typer.echo(f"wrote {out}")
    return {
        "wrote": str(out),
        "size_bytes": out.stat().st_size,
        "model": inputs.plan.model.name,
        "cluster": inputs.plan.cluster.name,
        "not_shown": list(inputs.missing),
    }
