"""`plait generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def generate(
    run: Annotated[Path, typer.Argument(help="Run folder, or a plan file together with --from.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    initial_weights: Annotated[
        Path | None, typer.Option("--from", help="Hugging Face folder to take weights of.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json; default: the run's or the folder's.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, max=1e3, help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws at a temperature above 0.")] = 0,
    backend: Annotated[
        Literal["gloo", "nccl"] | None, typer.Option(help="Default: nccl where a GPU is, else gloo.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print prompt and text as JSON, when all is there.")] = False,
) -> None:
    """Continue a text with a trained or imported model, under its plan (its first replica)."""
    import json
    import tempfile

    from executor.generate import GenerateOptions, start_generate

    if not prompt:
        raise typer.BadParameter("--prompt is empty, at least one token is needed to begin with")
    options = GenerateOptions(
        run=run,
        weights=initial_weights,
        tokenizer=tokenizer,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        backend=backend,
    )
    if not as_json:
        start_generate(options)
        return
    with tempfile.TemporaryFile() as file:
        start_generate(options, file)
        file.seek(0)
        text = file.read().decode().removesuffix("\n")
    typer.echo(json.dumps({"prompt": prompt, "text": text, "temperature": temperature, "seed": seed}, indent=1))
