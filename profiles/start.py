"""Begins a measurement: fixes its options and starts its workers.  No torch until a worker runs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from executor.launch import ERROR_FILE, run_workers
from profiles.options import ProfileOptions
from specs.errors import BadInputError
from specs.model import ModelSpec
from specs.options import Backend


def start_profile(
    model: ModelSpec,
    out: Path,
    *,
    seq_len: int,
    num_ranks: int | None,
    backend: Backend | None,
    block_sequences: Sequence[int],
    degrees: Sequence[int] | None,
    steps: int,
    rounds: int,
) -> None:
    """Measure `model`'s modules and the links with `num_ranks` workers (None: one per device), or under torchrun.

    Raises `BadInputError` for a size that cannot be measured.
    """
    under_torchrun = "RANK" in os.environ and ERROR_FILE not in os.environ
    backend = backend or _backend()
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun else (num_ranks or _num_devices(backend))
    if model.max_positions is not None and seq_len > model.max_positions:
        raise BadInputError(
            f"--seq-len {seq_len} is longer than the {model.max_positions} positions of {model.name}. Use at most that."
        )
    chosen = tuple(degrees) if degrees else tuple(t for t in range(1, ranks + 1) if ranks % t == 0)
    for degree in chosen:
        if ranks % degree:
            raise BadInputError(
                f"degree {degree} does not divide the {ranks} ranks that measure. Use one of "
                f"{[t for t in range(1, ranks + 1) if ranks % t == 0]}, or another --nproc."
            )
    options = ProfileOptions(
        out=out.resolve(),
        model=model,
        seq_len=seq_len,
        block_sequences=tuple(sorted(set(block_sequences))),
        degrees=chosen,
        precision=_precision(backend),
        backend=backend,
        num_steps=steps,
        num_rounds=rounds,
        command=" ".join(["plait", *sys.argv[1:]]),
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    _check_writable(options.out)
    if under_torchrun:
        from executor.device import leave
        from profiles.measure import measure

        measure(options)
        leave()
    print(
        f"profiling {model.name} on {ranks} ranks over {backend}: degrees {list(chosen)}, "
        f"{list(options.block_sequences)} sequences a block",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        path = Path(folder) / "options.json"
        options.save(path)
        run_workers(["profiles.measure", str(path)], ranks, after_crash="Nothing was written.")


def _check_writable(out: Path) -> None:
    """Better now than after the measurement."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise BadInputError(f"{out.parent} cannot be written: {error.strerror}. Choose another -o.") from None


def _nvidia_devices() -> int:
    """GPUs by their device files, without loading CUDA in this process."""
    return sum(1 for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit())


def _backend() -> Backend:
    return "nccl" if _nvidia_devices() else "gloo"


def _num_devices(backend: Backend) -> int:
    if backend == "nccl":
        return max(1, _nvidia_devices())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _precision(backend: Backend) -> Literal["fp32", "bf16"]:
    return "bf16" if backend == "nccl" else "fp32"
