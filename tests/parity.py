"""What the parity tests run on every rank, and the same in one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from executor.engine import Engine
from executor.optimizer import learning_rate
from executor.weights import initial_values
from specs.layout import Interval
from specs.model import ModelSpec
from specs.options import OptimizerOptions
from specs.plan import Plan
from specs.tensors import parameter_name, tensors_of
from tests.reference import decaying, mean_loss

# A threshold below the gradients' norm, so that clipping is active.  Adam's epsilon is large enough that an element
# whose gradient is all rounding does not turn that rounding into a full step.
OPTIONS = OptimizerOptions(learning_rate=1e-2, warmup_steps=2, num_steps=20, max_gradient_norm=0.1, epsilon=1e-3)
SEED = 7


@dataclass
class Trace:
    """Losses and norms by step, and whole tensors: gradients of the first step, weights after the last."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def tokens_of(model: ModelSpec, global_batch: int, seq_len: int, step: int) -> torch.Tensor:
    """The step's global batch [sequences, seq_len + 1]."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(model.vocab, (global_batch, seq_len + 1), generator=generator)


def run_rank(
    plan_json: str, dtype: torch.dtype, num_steps: int, overlap: bool | None = None
) -> tuple[list[float], list[float], list, list]:
    """Train on one rank; returns losses, norms and this rank's pieces (name, start, stop, values)."""
    plan = Plan.model_validate_json(plan_json)
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=SEED, dtype=dtype, overlap=overlap)
    losses, norms, gradients = [], [], []
    for step in range(1, num_steps + 1):
        tokens = tokens_of(plan.model, plan.training.global_batch, plan.training.seq_len, step)
        result = engine.step(step, lambda first, count, tokens=tokens: tokens[first : first + count])
        losses.append(result.loss)
        norms.append(result.gradient_norm)
        if step == 1:
            scale = max(1.0, (result.gradient_norm + 1e-6) / OPTIONS.max_gradient_norm)
            for bucket in engine.sync.buckets:
                written = bucket.layout.writer_segment(bucket.process)
                for piece in bucket.layout.pieces:
                    common = Interval(piece.offset, piece.offset + piece.elements.size).overlap(written)
                    if common.size > 0:
                        start = piece.elements.start + common.start - piece.offset
                        where = common.shifted(-written.start)
                        values = bucket.writer_gradients()[where.start : where.stop].clone() * scale
                        gradients.append((piece.tensor, start, start + common.size, values.numpy()))
    weights = []
    for bucket in engine.sync.buckets:
        held = bucket.segment if bucket.layout.zero == 3 else Interval(0, bucket.layout.num_elements)
        values = bucket.shard if bucket.layout.zero == 3 else bucket.weights
        for piece in bucket.layout.pieces:
            common = Interval(piece.offset, piece.offset + piece.elements.size).overlap(held)
            if common.size > 0:
                part = common.shifted(piece.elements.start - piece.offset)
                where = common.shifted(-held.start)
                weights.append((piece.tensor, *part, values[where.start : where.stop].numpy()))
    for name, tensors in engine.local.items():
        for tensor in tensors:
            if tensor.parameter.untyped_storage().nbytes():  # else it has memory only while its module computes
                weights.append((name, *tensor.elements, tensor.parameter.detach().reshape(-1).numpy()))
    return losses, norms, gradients, weights


def run_reference(model: ModelSpec, global_batch: int, seq_len: int, dtype: torch.dtype, num_steps: int) -> Trace:
    """The same training in one process with torch's own optimizer and clipping."""
    weights: dict[str, torch.Tensor] = {}
    for name, module in model.modules():
        for tensor in tensors_of(module):
            key = parameter_name(name, module, tensor)
            values = initial_values(
                key,
                Interval(0, tensor.num_elements),
                tensor.init,
                num_layers=model.num_layers,
                seed=SEED,
                dtype=dtype,
            )
            weights.setdefault(key, values.view(tensor.shape(tensor.rows)).requires_grad_())
    with_decay = decaying(model)
    groups = [
        {"params": [v for k, v in weights.items() if k in with_decay], "weight_decay": OPTIONS.weight_decay},
        {"params": [v for k, v in weights.items() if k not in with_decay], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(OPTIONS.beta1, OPTIONS.beta2), eps=OPTIONS.epsilon)
    trace = Trace([], [], {}, {})
    for step in range(1, num_steps + 1):
        adam.zero_grad()
        loss = mean_loss(model, weights, tokens_of(model, global_batch, seq_len, step))
        loss.backward()
        if step == 1:
            trace.gradients = {k: v.grad.detach().clone().reshape(-1) for k, v in weights.items()}
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), OPTIONS.max_gradient_norm)
        for group in adam.param_groups:
            group["lr"] = learning_rate(OPTIONS, step)
        adam.step()
        trace.losses.append(float(loss.detach()))
        trace.norms.append(float(norm))
    trace.weights = {k: v.detach().reshape(-1) for k, v in weights.items()}
    return trace


def largest_relative_error(pieces: list, whole: dict[str, torch.Tensor], *, complete: bool) -> dict[str, float]:
    """By tensor: largest |piece - whole| over the tensor's largest magnitude, or 1e-4 of the largest of all.

    `complete`: the pieces must hold every element exactly once, else at least once.
    """
    errors: dict[str, float] = {}
    # Some gradients vanish analytically (a key bias without rotary embedding): rounding is all there is to compare.
    floor = 1e-4 * max(float(values.abs().max()) for values in whole.values())
    covered = {name: torch.zeros(values.numel(), dtype=torch.int32) for name, values in whole.items()}
    for name, start, stop, values in pieces:
        expected = whole[name][start:stop]
        scale = max(float(whole[name].abs().max()), floor)
        error = float((torch.from_numpy(values) - expected).abs().max()) / scale if stop > start else 0.0
        errors[name] = max(errors.get(name, 0.0), error)
        covered[name][start:stop] += 1
    for name, count in covered.items():
        assert int(count.min()) >= 1, f"{name}: some elements are held by nobody"
        assert not complete or int(count.max()) == 1, f"{name}: some elements are counted twice"
    return errors
