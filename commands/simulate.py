"""`plait simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def simulate(
    plan: Annotated[Path, typer.Argument(help="plan.json from `plait plan`.")],
    days: Annotated[float, typer.Option(min=0.01, max=3650.0, help="Length of the run.")] = 30.0,
    policy: Annotated[
        Literal[
            "drop",
            "drop-in-place",
            "wait",
            "resplit",
            "ntp",
            "composed",
            "ntp-boost",
            "composed-boost",
            "all",
        ],
        typer.Option(
            metavar="<policy>",
            help="For a replica that lost a device: drop, drop-in-place, wait, resplit, ntp, composed, ntp-boost, "
            "composed-boost; [bold]all[/bold] compares them.",
        ),
    ] = "drop",
    spares: Annotated[
        int | None, typer.Option(min=0, max=100_000, help="Spare nodes (default: those the plan leaves unused).")
    ] = None,
    keep_batch: Annotated[
        bool, typer.Option("--keep-batch", help="Others take over lost sequences; else the batch shrinks.")
    ] = False,
    tokens: Annotated[float | None, typer.Option(min=1.0, help="Goal, for days and device-hours to it.")] = None,
    target: Annotated[
        float, typer.Option(min=0.01, max=0.9999, help="Speed share that spares should secure while devices are out.")
    ] = 0.99,
    failures: Annotated[Path | None, typer.Option(help="Failure model, e.g. from `plait fit-failures`.")] = None,
    trials: Annotated[int, typer.Option(min=2, max=100_000, help="Histories to play.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Of the histories.")] = 0,
    profile: Annotated[Path | None, typer.Option(help="profile.json, for the spread between ranks.")] = None,
    against: Annotated[Path | None, typer.Option(help="Another plan: which one delivers more, and when.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it into this png, svg or pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play days of failures: what the plan really delivers, under each policy, and what to improve first."""
    import json

    from cost_models.simulation import compare_plans, simulate_plan
    from reports.goodput import as_json as to_json
    from reports.goodput import render

    delivery = simulate_plan(
        plan,
        failures=failures,
        policy=policy,
        days=days,
        spares=spares,
        keep_batch=keep_batch,
        trials=trials,
        seed=seed,
        target=target,
        profile=profile,
    )
    rivalry = compare_plans(plan, against, failures=failures) if against is not None else None
    if plot is not None:
        from reports.goodput_plot import draw

        draw(delivery, plot)
    if as_json:
        typer.echo(json.dumps(to_json(delivery, tokens, rivalry), indent=1))
        return
    from rich.console import Console

    Console(highlight=False).print(render(delivery, tokens, rivalry))
    if plot is not None:
        typer.echo(f"wrote {plot}")
