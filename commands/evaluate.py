"""`plait eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder, or a plan file together with --from.")],
    data: Annotated[
        str | None, typer.Option(help="Text to evaluate on, as for `plait train`; default: the run's held-out part.")
    ] = None,
    initial_weights: Annotated[
        Path | None, typer.Option("--from", help="Hugging Face folder to take weights of.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json; default: the run's or the folder's.")] = None,
    backend: Annotated[
        Literal["gloo", "nccl"] | None, typer.Option(help="Default: nccl where a GPU is, else gloo.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Loss and perplexity of a trained or imported model on held-out text, under its plan."""
    from executor.evaluate import EvaluateOptions, start_evaluate

    found = start_evaluate(
        EvaluateOptions(run=run, weights=initial_weights, data=data, tokenizer=tokenizer, backend=backend)
    )
    if as_json:
        typer.echo(found.model_dump_json(indent=1))
        return
    typer.echo(
        f"loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.2f}, {found.origin}, over "
        f"{found.tokens:,} of {found.text_tokens:,} tokens ({found.data})"
    )
