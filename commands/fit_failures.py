"""`plait fit-failures`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def fit_failures(
    log: Annotated[Path, typer.Argument(help="CSV with a column class; repair_hours, detect_seconds, count if known.")],
    devices: Annotated[int, typer.Option(min=1, help="Devices that were watched.")],
    days: Annotated[float, typer.Option(min=0.01, help="For how long.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the failure model here.")] = None,
    base: Annotated[Path | None, typer.Option(help="Failure model with the classes and all else.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate failure rates with 95 % intervals from your own list of incidents."""
    from cost_models.failure_fit import fit, read_incidents
    from cost_models.failures import load_failure_model
    from reports.failures import render

    model = fit(read_incidents(log), load_failure_model(base), num_devices=devices, days=days, source=log.name)
    if out is not None:
        model.save(out)
    if as_json:
        typer.echo(model.model_dump_json(indent=1))
        return
    from rich.console import Console

    Console(highlight=False).print(render(model))
    if out is not None:
        typer.echo(f"wrote {out}")
