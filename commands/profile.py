"""`plait profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from commands.parse import integers


def profile(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the profile.")] = Path("profile.json"),
    model: Annotated[
        str, typer.Option(help="Whose modules to time: preset, model file or Hugging Face config.json.")
    ] = "demo",
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 256,
    nproc: Annotated[int | None, typer.Option(min=1, help="Workers on this node; default: one per device.")] = None,
    backend: Annotated[
        Literal["gloo", "nccl"] | None, typer.Option(help="Default: nccl where a GPU is, else gloo.")
    ] = None,
    block_sequences: Annotated[
        str, typer.Option(help="Sequences that a block may hold (micro-batch x degree / ranks), comma-separated.")
    ] = "1,2,4,8",
    degrees: Annotated[
        str | None, typer.Option(help="Degrees to time, comma-separated; default: all divisors of the ranks.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per layout and round.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Times to go through all layouts.")] = 2,
) -> dict[str, object]:
    """Measure this cluster: modules in situ at every degree, optimizer, collectives, spread between ranks.

    On one node it starts its own workers. On several: torchrun --nnodes N --nproc-per-node 8 ... -m cli profile
    """
    from profiles.start import start_profile
    from specs.base import load_document
    from specs.presets import load_model
    from specs.profile import Profile

    start_profile(
        load_model(model),
        out,
        seq_len=seq_len,
        num_ranks=nproc,
        backend=backend,
        block_sequences=integers("--block-sequences", block_sequences),
        degrees=None if degrees is None else integers("--degrees", degrees),
        steps=steps,
        rounds=rounds,
    )
    typer.echo(f"wrote {out}")
    made = load_document(Profile, out, "profile")
    return {
        "wrote": str(out),
        "cluster": made.cluster.name,
        "num_ranks": made.world_size,
        "backend": made.backend,
        "num_module_timings": len(made.modules),
        "num_collective_timings": len(made.collectives),
        "sha256": made.sha256(),
    }
