"""`plait export-weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export_weights(
    run: Annotated[Path, typer.Argument(help="Run folder that `plait train --out` made.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write config.json and safetensors into.")],
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="Default: the plan's precision.")
    ] = None,
) -> dict[str, object]:
    """Write a run's newest sound weights as a Hugging Face folder that transformers loads."""
    from executor.huggingface_export import export_run

    found = export_run(run, out, dtype)
    typer.echo(f"wrote {found.model} ({found.origin}) to {out}: {found.size_bytes / 2**30:.2f} GiB in {found.dtype}")
    return {"wrote": str(out), **found._asdict()}
