"""`plait plan`."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: a search makes millions of objects and next to no cycles, so looking for them
    frees nothing and takes up to a tenth of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def plan(
    model: Annotated[str, typer.Option(help="Preset (llama-3-8b ...), model file or Hugging Face config.json.")],
    global_batch: Annotated[int, typer.Option(min=1, help="Sequences per optimizer step.")],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")],
    cluster: Annotated[
        str | None, typer.Option(help="Preset (h100x64 ...) or cluster file; default: what the profile saw.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="profile.json of this cluster; without it shipped device data, estimated.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the step's timeline, a lane per stage (.png, .svg, .pdf).")
    ] = None,
    memory_cap: Annotated[str | None, typer.Option(help="Bytes a rank may fill, e.g. 64GiB.")] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp8"] | None, typer.Option(help="Default: bf16 on GPUs, fp32 on CPUs.")
    ] = None,
    objective: Annotated[
        Literal["goodput", "step-time", "tokens-per-dollar", "memory"],
        typer.Option(help="What to maximise (or minimise)."),
    ] = "goodput",
    max_slowdown: Annotated[
        float, typer.Option(min=0.0, help="Percent of step time that `--objective memory` may give up.")
    ] = 5.0,
    freedom: Annotated[
        Literal["uniform", "layers", "stages", "modules", "cuts", "interleaved"],
        typer.Option(
            help="How unlike modules may be: everything uniform ... stages that begin inside layers, or interleaved."
        ),
    ] = "interleaved",
    engine: Annotated[
        Literal["dp", "ilp"],
        typer.Option(help="Labels and dynamic programming, or an integer program (slower, independent)."),
    ] = "dp",
    pin: Annotated[
        list[str] | None, typer.Option(help="layer.3.mlp.tp=4, layer.*.mlp.recompute=full; may be repeated.")
    ] = None,
    forbid: Annotated[list[str] | None, typer.Option(help="The same, forbidden; may be repeated.")] = None,
    equal: Annotated[
        list[str] | None, typer.Option(help="layer.*.attention,layer.*.mlp: one degree for all; may be repeated.")
    ] = None,
    max_degrees: Annotated[int | None, typer.Option(min=1, help="Most distinct degrees in the plan.")] = None,
    stages: Annotated[str | None, typer.Option(help="Layers of each stage, e.g. 0-15,16-31.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds; then the best so far, with its gap.")] = 60.0,
    top_k: Annotated[int, typer.Option(min=0, max=50, help="Other plans to list.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the layout with the most goodput, and show why: time and memory by term, and what each freedom buys."""
    import json
    import os
    import shlex

    # The search's matrices are small: threads of numpy's BLAS, not yet imported here, would only wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    with _uncollected():
        from planner.constraints import Constraints
        from planner.start import start_plan

        if plot is not None:
            from reports.figures import format_of

            format_of(plot)  # before the search, not after it
        found = start_plan(
            model=model,
            cluster=cluster,
            profile_path=profile,
            global_batch=global_batch,
            seq_len=seq_len,
            precision=precision,
            memory_cap=memory_cap,
            objective=objective,
            freedom=freedom,
            time_limit_seconds=time_limit,
            top_k=top_k,
            engine=engine,
            constraints=Constraints(tuple(pin or ()), tuple(forbid or ()), tuple(equal or ()), max_degrees, stages),
            slowdown=max_slowdown / 100.0,
            command=shlex.join(["plait", *sys.argv[1:]]),
        )
    if out is not None:
        found.save(out)
    if plot is not None:
        from commands.sources import plot_step  # reports of every kind, slow to import

        plot_step(found, profile, plot)
    if as_json:
        from reports.plan_record import as_json as to_json

        typer.echo(json.dumps(to_json(found), indent=1))
        return
    from rich.console import Console

    from reports.plan import render

    Console(highlight=False).print(render(found))
    for path in (out, plot):
        if path is not None:
            typer.echo(f"wrote {path}")
