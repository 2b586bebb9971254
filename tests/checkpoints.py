"""What the checkpoint tests run on every rank."""

from __future__ import annotations

from pathlib import Path

import torch

from executor.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from executor.engine import Engine
from specs.plan import Plan
from tests.parity import OPTIONS, SEED, tokens_of


def train_part(plan_json: str, folder: str, last_step: int, keep: int = 10) -> list[float]:
    """Resume from the newest checkpoint if there is one, train to `last_step`, save; losses of the steps made."""
    plan = Plan.model_validate_json(plan_json)
    # Another seed where a checkpoint is loaded: every weight must come from it.
    found = find_checkpoint(Path(folder))
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
    save_checkpoint(engine, Path(folder), step=last_step, seed=SEED, keep=keep)
    return losses
