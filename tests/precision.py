"""What the bf16 test runs on every rank."""

from __future__ import annotations

import torch

from executor.engine import Engine
from specs.options import OptimizerOptions
from specs.plan import Plan
from tests.parity import tokens_of


def train_losses(plan_json: str, num_steps: int) -> tuple[list[float], set[torch.dtype], set[torch.dtype]]:
    """Losses in the plan's own precision, and the types of weights and masters."""
    plan = Plan.model_validate_json(plan_json)
    options = OptimizerOptions(learning_rate=1e-2, warmup_steps=1, num_steps=num_steps)
    engine = Engine(plan, options, device=torch.device("cpu"), seed=0)
    tokens = tokens_of(plan.model, plan.training.global_batch, plan.training.seq_len, 1)
    losses = [
        engine.step(step, lambda first, count: tokens[first : first + count]).loss for step in range(1, num_steps + 1)
    ]
    weights = {parameter.dtype for module in engine.chain for parameter in module.parameters()}
    return losses, weights, {bucket.master.dtype for bucket in engine.sync.buckets}
