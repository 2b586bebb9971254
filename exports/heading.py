"""The comment that begins an exported file: of which plan it is, and what is predicted for it."""

from __future__ import annotations

from specs.plan import Plan
from specs.units import num_bytes, rate, seconds


def heading(plan: Plan, what: str) -> list[str]:
    """Lines that begin with `#`."""
    lines = [
        f"# {what}, made by plait export.",
        f"# {plan.model.name} on {plan.cluster.name}: {plan.world_size} processes, global batch "
        f"{plan.training.global_batch} x {plan.training.seq_len} tokens, {plan.training.precision}.",
    ]
    if plan.predicted is not None:
        lines.append(
            f"# Predicted under Plait's own executor: {seconds(plan.predicted.step_time_seconds)} a step, "
            f"{rate(plan.predicted.tokens_per_second, 'tokens')}, fullest rank "
            f"{num_bytes(plan.predicted.peak_memory_bytes)}."
        )
    return lines
