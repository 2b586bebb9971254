"""`plait train`."""

from __future__ import annotations

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
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest sound checkpoint in --out.")] = False,
) -> None:
    """Train a model with a plan, on this node or as one worker of torchrun.

    Ctrl-C finishes the step, saves a checkpoint and ends; the same command with --resume continues the same losses.
    On several nodes: torchrun --nnodes N --nproc-per-node 8 ... -m cli train plan.json --out RUN
    """
    from executor.start import start_run

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
    }
    start_run(plan, out, given, resume=resume)
