"""`plait chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

_AT = "rank@step"
_MOMENT = f"{_AT}, or {_AT}:MOMENT with a moment of begin, forward, sync, update, gather, save, recovery."


def chaos(
    source: Annotated[
        Path, typer.Argument(help="plan.json, or a run folder whose plan and options the drill repeats.")
    ],
    out: Annotated[Path, typer.Option(help="Run folder of the drill.")],
    kill: Annotated[list[str] | None, typer.Option(help=f"End a worker: {_MOMENT}")] = None,
    stop: Annotated[list[str] | None, typer.Option(help=f"Freeze a worker (SIGSTOP): {_AT}.")] = None,
    hang: Annotated[list[str] | None, typer.Option(help=f"Let a worker wait for ever: {_AT}.")] = None,
    slow: Annotated[list[str] | None, typer.Option(help=f"Slow a worker down: {_AT}:FACTOR.")] = None,
    partition: Annotated[list[str] | None, typer.Option(help=f"Cut a worker off its supervisor: {_AT}.")] = None,
    full_disk: Annotated[list[str] | None, typer.Option(help=f"Let a worker's disk be full: {_AT}.")] = None,
    back: Annotated[list[str] | None, typer.Option("--return", help=f"A lost device comes back: {_AT}.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps in all (100).")] = None,
    data: Annotated[str | None, typer.Option(help="As in `plait train`.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(min=0, help="As in `plait train`.")] = None,
    on_loss: Annotated[Literal["shrink", "restart", "stop"] | None, typer.Option(help="As in `plait train`.")] = None,
    hang_seconds: Annotated[float | None, typer.Option(min=1, help="As in `plait train`.")] = None,
    rebalance: Annotated[bool | None, typer.Option("--rebalance/--no-rebalance", help="As in `plait train`.")] = None,
    profile: Annotated[Path | None, typer.Option(help="As in `plait train`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the interruptions as JSON.")] = False,
) -> None:
    """Drill: train with faults on purpose, and show what each cost and whether the losses stayed what they are.

    With a run folder as source, every loss is held against that run's: plait chaos runs/a --out runs/drill --kill 1@20
    """
    import json

    from recovery.drill import run_drill
    from reports.incidents import render
    from specs.errors import BadInputError
    from specs.faults import Fault, FaultKind, parse_fault

    named: dict[FaultKind, list[str] | None] = {
        "kill": kill,
        "stop": stop,
        "hang": hang,
        "slow": slow,
        "partition": partition,
        "full-disk": full_disk,
    }
    faults: list[Fault] = [parse_fault(kind, text) for kind, texts in named.items() for text in texts or ()]
    returns = {fault.rank: fault.step for fault in (parse_fault("kill", text) for text in back or ())}
    if not faults:
        raise BadInputError("no fault is named. Give at least one, such as --kill 1@20 (rank 1 in step 20).")
    given = {
        "num_steps": steps,
        "data": data,
        "checkpoint_every": checkpoint_every,
        "on_loss": on_loss,
        "hang_seconds": hang_seconds,
        "rebalance": rebalance,
        "profile": None if profile is None else profile.resolve(),
    }
    report = run_drill(source, out, given, faults=faults, returns=returns)
    if as_json:
        typer.echo(json.dumps([incident.model_dump(mode="json") for incident in report.incidents], indent=1))
        return
    from rich.console import Console

    Console(highlight=False).print(render(report.incidents))
    if report.worst is not None:
        typer.echo(f"losses of {report.num_steps} steps within {report.worst:.1e} of the run without faults")
