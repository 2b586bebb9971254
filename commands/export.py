"""`plait export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    plan: Annotated[Path, typer.Argument(help="plan.json from `plait plan`.")],
    to: Annotated[
        Literal["megatron", "torchtitan", "slurm", "torchrun"],
        typer.Option(
            help="Megatron-LM arguments, a torchtitan configuration, or a Slurm batch file or torchrun lines that run "
            "the plan with `plait train`."
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write it here; default: print it.")] = None,
    nearest: Annotated[
        bool,
        typer.Option(
            "--nearest", help="Of what the engine cannot run, take the best plan that it can, and say its cost."
        ),
    ] = False,
    profile: Annotated[Path | None, typer.Option(help="The profile that the plan was made with, if any.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds to look for the nearest plan.")] = 30.0,
) -> dict[str, object]:
    """Write a plan for the engine or launcher that you use. What an engine cannot run is refused, with an offer."""
    from specs.base import load_document, write_whole
    from specs.plan import Plan

    found = load_document(Plan, plan, "plan")
    if to in ("megatron", "torchtitan"):
        from commands.engines import export_to_engine

        text, remark = export_to_engine(
            found, plan, to, profile=profile, take_nearest=nearest, time_limit_seconds=time_limit
        )
    else:
        from exports.launch import write_slurm, write_torchrun

        text, remark = (write_slurm if to == "slurm" else write_torchrun)(found, str(plan)), ""
    if remark:
        typer.echo(remark, err=True)
    if out is None:
        typer.echo(text, nl=False)
        return {"to": to, "remark": remark, "wrote": None, "text": text}
    write_whole(out, text)
    typer.echo(f"wrote {out}", err=True)
    return {"to": to, "remark": remark, "wrote": str(out)}
