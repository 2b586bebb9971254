"""What the handover tests run on every rank: the state stays in the process between two generations."""

from __future__ import annotations

import torch
import torch.distributed as dist

from executor.engine import Engine
from executor.handover import Held, Outcome, hold, take_over
from specs.plan import Plan
from tests.parity import OPTIONS, SEED, tokens_of

_held: dict[str, Held | None] = {}


def begin() -> None:
    """Forget what this process held."""
    _held.clear()


def train_on(plan_json: str, lost: tuple[int, ...], num_steps: int) -> tuple[Outcome, list[float]]:
    """Take the state over from those that are not `lost`, train, hold it; losses of the steps made.

    The very first generation begins with drawn weights; later ones draw others, so that each must come from a holder.
    """
    plan = Plan.model_validate_json(plan_json)
    is_first = not _held
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=SEED + (not is_first), dtype=torch.float64)
    held = None if dist.get_rank() in lost else _held.get("state")
    outcome = Outcome(0, 0, "") if is_first else take_over(engine, held)
    losses = []
    if outcome.step is not None:
        for step in range(outcome.step + 1, outcome.step + 1 + num_steps):
            tokens = tokens_of(plan.model, plan.training.global_batch, plan.training.seq_len, step)
            losses.append(engine.step(step, lambda first, count, tokens=tokens: tokens[first : first + count]).loss)
        _held["state"] = hold(engine, outcome.step + num_steps)
    return outcome, losses
