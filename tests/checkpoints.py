"""What the checkpoint tests run on every rank."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from executor.checkpoint import agree_on_checkpoint, find_checkpoint, load_checkpoint
from executor.engine import Engine
from executor.saving import Saver
from specs.errors import BadInputError
from specs.layout import Interval
from specs.plan import Plan
from tests.parity import OPTIONS, SEED, tokens_of


def train_part(plan_json: str, folder: str, last_step: int, keep: int = 10) -> list[float]:
    """Resume from the newest checkpoint if there is one, train to `last_step`, save; losses of the steps made."""
    plan = Plan.model_validate_json(plan_json)
    # Another seed where a checkpoint is loaded: every weight must come from it.
    found = agree_on_checkpoint(Path(folder))
    seed = SEED if found is None else SEED + 1
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=seed, dtype=torch.float64)
    done = 0
    if found is not None:
        place, manifest, _ = found
        load_checkpoint(engine, place, manifest)
        done = manifest.step
    losses = []
    for step in range(done + 1, last_step + 1):
        tokens = tokens_of(plan.model, plan.training.global_batch, plan.training.seq_len, step)
        losses.append(engine.step(step, lambda first, count, tokens=tokens: tokens[first : first + count]).loss)
    saver = Saver(engine, Path(folder), seed=SEED, keep=keep)
    saver.start(last_step)
    saver.finish()
    return losses


def continue_part(plan_json: str, folder: str, dtype: torch.dtype, last_step: int) -> tuple[list[float], list]:
    """`train_part` in any type; losses, and this rank's weights at the end as (name, start, stop, values)."""
    plan = Plan.model_validate_json(plan_json)
    found = agree_on_checkpoint(Path(folder))
    seed = SEED if found is None else SEED + 1
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=seed, dtype=dtype)
    done = 0
    if found is not None:
        place, manifest, _ = found
        load_checkpoint(engine, place, manifest)
        done = manifest.step
    losses = _steps(plan, engine, range(done + 1, last_step + 1))
    if found is None:
        saver = Saver(engine, Path(folder), seed=SEED, keep=1)
        saver.start(last_step)
        saver.finish()
    weights = [
        (name, tensor.elements.start, tensor.elements.stop, tensor.parameter.detach().reshape(-1).numpy())
        for name, tensors in engine.local.items()
        for tensor in tensors
    ]
    return losses, weights


HELD_SECONDS = 1.0


def agreed(folder: str) -> tuple[str, str]:
    """Which checkpoint all ranks take, and why not the newer one."""
    found = agree_on_checkpoint(Path(folder))
    assert found is not None
    return found[0].name, found[2][0]


def _steps(plan: Plan, engine: Engine, steps: range) -> list[float]:
    batches = (tokens_of(plan.model, plan.training.global_batch, plan.training.seq_len, step) for step in steps)
    return [
        engine.step(step, lambda first, count, tokens=tokens: tokens[first : first + count]).loss
        for step, tokens in zip(steps, batches, strict=True)
    ]


def train_while_writing(plan_json: str, folder: str) -> tuple[list[float], list[str], float, float]:
    """Save step 1 with writers that wait, train steps 2 and 3 meanwhile; losses, what a reader saw, stall and lag."""
    plan = Plan.model_validate_json(plan_json)
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=SEED, dtype=torch.float64)
    losses = _steps(plan, engine, range(1, 2))
    saver = Saver(engine, Path(folder), seed=SEED, keep=2)
    go_on = threading.Event()
    write = saver._write
    saver._write = lambda *arguments: (go_on.wait(), write(*arguments))  # type: ignore[method-assign]
    saver.start(1)
    started = time.time()
    losses += _steps(plan, engine, range(2, 4))
    assert saver.is_writing
    seen = [path.name for path in Path(folder).iterdir() if path.name.startswith(("step-", "LATEST"))]
    time.sleep(max(0.0, HELD_SECONDS - (time.time() - started)))
    go_on.set()
    while saver.is_writing:
        time.sleep(0.01)
    dist.barrier()
    saved = saver.finish()
    return losses, seen, saved.stall_seconds, saved.lag_seconds


def save_on_a_full_disk(plan_json: str, folder: str, failing: int) -> str:
    """Save where one rank's disk takes no more than some bytes; the message that this rank gets."""
    plan = Plan.model_validate_json(plan_json)
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=SEED, dtype=torch.float64)
    saver = Saver(engine, Path(folder), seed=SEED, keep=2)
    if dist.get_rank() == failing:
        write = saver._write

        def write_to_full(save, file: str, header: bytes) -> None:  # type: ignore[no-untyped-def]
            save.folder.mkdir(parents=True, exist_ok=True)
            (save.folder / file).symlink_to("/dev/full")
            write(save, file, header)

        saver._write = write_to_full  # type: ignore[method-assign]
    saver.start(7)
    try:
        saver.finish()
    except BadInputError as error:
        return str(error)
    return "saved"


def largest_read(plan_json: str, folder: str, limit: int) -> int:
    """Load with buckets' limit lowered; the most elements that were read at once."""
    from executor import buckets, checkpoint

    plan = Plan.model_validate_json(plan_json)
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=SEED, dtype=torch.float64)
    found = find_checkpoint(Path(folder))
    assert found is not None
    largest = 0
    read = checkpoint.CheckpointReader.read

    def counted(self, tensor: str, elements: Interval, kind="weight"):  # type: ignore[no-untyped-def]
        nonlocal largest
        largest = max(largest, elements.size)
        return read(self, tensor, elements, kind)

    before = buckets.BUCKET_ELEMENTS
    try:
        buckets.BUCKET_ELEMENTS = checkpoint.BUCKET_ELEMENTS = limit
        checkpoint.CheckpointReader.read = counted  # type: ignore[method-assign]
        load_checkpoint(engine, found[0], found[1])
    finally:
        buckets.BUCKET_ELEMENTS = checkpoint.BUCKET_ELEMENTS = before
        checkpoint.CheckpointReader.read = read  # type: ignore[method-assign]
    return largest
