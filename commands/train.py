"""`plait train`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer


def train(
    plan: Annotated[Path, typer.Argument(help="plan.json from `plait plan`.")],
    out: Annotated[Path, typer.Option(help="Run folder: log, checkpoints, prepared data.")],
    data: Annotated[
        str | None,
        typer.Option(help="Text file, .jsonl (key text), a folder of them, or [bold]stdlib[/bold] (the default)."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps in all (100).")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json; without one, bytes are tokens.")] = None,
    initial_weights: Annotated[
        Path | None, typer.Option("--from", help="Hugging Face folder to start from; its tokenizer is the default.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of weights and sample order (0).")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=1e-9, max=1e3, help="Peak rate, reached after warm-up (3e-3).")
    ] = None,
    warmup_steps: Annotated[int | None, typer.Option(min=0, help="Steps of linear warm-up (10).")] = None,
    max_gradient_norm: Annotated[
        float | None, typer.Option(min=1e-9, max=1e9, help="Clip the global norm to this (1.0).")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(min=0, help="Steps; 0: only at the end (50).")] = None,
    keep_checkpoints: Annotated[int | None, typer.Option(min=1, help="Newest checkpoints to keep (2).")] = None,
    evaluate_every: Annotated[int | None, typer.Option(min=0, help="Steps; 0: only at the end (0).")] = None,
    backend: Annotated[
        Literal["gloo", "nccl"] | None, typer.Option(help="Default: nccl where a GPU is, else gloo.")
    ] = None,
    on_loss: Annotated[
        Literal["shrink", "restart", "stop"] | None,
        typer.Option(help="A worker is lost: go on with the devices left (default), start it again, or end the run."),
    ] = None,
    return_after: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds after which a lost device is tried again (never).")
    ] = None,
    hang_seconds: Annotated[
        float | None, typer.Option(min=1, help="Without progress beyond 5 median steps: a worker hangs (30).")
    ] = None,
    rebalance: Annotated[
        bool | None, typer.Option("--rebalance/--no-rebalance", help="Give a persistently slow device less work.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Prices the ways on after a loss; without one, shipped device data does.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Serve Prometheus metrics on this port while it trains.")
    ] = None,
    metrics_address: Annotated[
        str | None, typer.Option(help="Address to serve metrics on (127.0.0.1: this machine alone).")
    ] = None,
    tensorboard: Annotated[
        bool | None, typer.Option("--tensorboard/--no-tensorboard", help="Write scalars to RUN/tensorboard.")
    ] = None,
    nnodes: Annotated[
        int | None, typer.Option(min=1, help="Start this command once on each of so many nodes (Slurm says it itself).")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="This node's number, in the order of the plan's cluster.")
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option(help="Name or address of node 0, which supervises and must be reached from the others."),
    ] = None,
    master_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of node 0 (29500).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest sound checkpoint in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="At the end, print the outcome as JSON.")] = False,
) -> None:
    """Train a model with a plan: on this node, on several with one command each, or as one worker of torchrun.

    A worker that dies or hangs does not end the run: training goes on with the devices that are left.
    Ctrl-C finishes the step, saves a checkpoint and ends; the same command with --resume continues the same losses.
    On several nodes: plait train plan.json --out RUN --nnodes N --node-rank K --master-addr HOST, or under srun.
    """
    from recovery.place import find_place
    from recovery.start import start_run
    from reports.outcome import outcome
    from specs.runlog import read_log

    given = {
        "data": data,
        "num_steps": steps,
        "tokenizer": tokenizer,
        "initial_weights": initial_weights,
        "seed": seed,
        "learning_rate": learning_rate,
        "warmup_steps": warmup_steps,
        "max_gradient_norm": max_gradient_norm,
        "checkpoint_every": checkpoint_every,
        "keep_checkpoints": keep_checkpoints,
        "evaluate_every": evaluate_every,
        "backend": backend,
        "on_loss": on_loss,
        "return_after_seconds": return_after,
        "hang_seconds": hang_seconds,
        "rebalance": rebalance,
        "metrics_port": metrics_port,
        "metrics_address": metrics_address,
        "tensorboard": tensorboard,
        "profile": None if profile is None else profile.resolve(),
    }
    place = find_place(nnodes, node_rank, master_addr, master_port, os.environ)
    start_run(plan, out, given, resume=resume, place=place)
    if as_json and (place is None or place.node == 0):
        typer.echo(json.dumps({"run": str(out), **outcome(read_log(out / "log.jsonl"))}, indent=1))
