"""`plait sweep`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from commands.parse import one_or_several


def sweep(
    model: Annotated[str, typer.Option(help="Preset (llama-3-8b ...), model file or Hugging Face config.json.")],
    clusters: Annotated[str, typer.Option(help="Presets or cluster files, comma-separated: h100x8,h100x16,h200x8.")],
    global_batch: Annotated[int | None, typer.Option(min=1, help="Sequences per optimizer step.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence.")] = None,
    global_batches: Annotated[str | None, typer.Option(help="Several batches, comma-separated.")] = None,
    seq_lens: Annotated[str | None, typer.Option(help="Several sequence lengths, comma-separated.")] = None,
    dollars_per_hour: Annotated[str, typer.Option(help="Price per device: H100=2.5,H200=3.2.")] = "",
    profile: Annotated[Path | None, typer.Option(help="profile.json; without it shipped device data.")] = None,
    memory_cap: Annotated[str | None, typer.Option(help="Bytes a rank may fill, e.g. 64GiB.")] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp8"] | None, typer.Option(help="Default: bf16 on GPUs, fp32 on CPUs.")
    ] = None,
    freedom: Annotated[
        Literal["uniform", "layers", "stages", "modules", "cuts", "interleaved"],
        typer.Option(help="As for `plait plan`."),
    ] = "interleaved",
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds per point.")] = 20.0,
    plot: Annotated[Path | None, typer.Option(help="Also draw it into this png, svg or pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which cluster, sequence length or batch: the best plan at every point, its speed and what its tokens cost."""
    import json
    import shlex

    from planner.sweep import Sweep, parse_prices, run_sweep
    from reports.sweep import as_json as to_json
    from reports.sweep import draw, render
    from specs.errors import NoPlanFitsError

    points = list(
        run_sweep(
            Sweep(
                model=model,
                clusters=[part.strip() for part in clusters.split(",")],
                global_batches=one_or_several("--global-batch", global_batch, global_batches),
                seq_lens=one_or_several("--seq-len", seq_len, seq_lens),
                profile_path=profile,
                precision=precision,
                memory_cap=memory_cap,
                freedom=freedom,
                time_limit_seconds=time_limit,
                prices=parse_prices(dollars_per_hour),
                command=shlex.join(["plait", *sys.argv[1:]]),
            )
        )
    )
    if as_json:
        typer.echo(json.dumps(to_json(points), indent=1))
    else:
        from rich.console import Console

        Console(highlight=False).print(render(points))
    if all(point.plan is None for point in points):
        raise NoPlanFitsError(f"none of the {len(points)} points has a plan. The first: {points[0].problem}")
    if plot is not None:
        draw(points, plot)
        if not as_json:
            typer.echo(f"wrote {plot}")
