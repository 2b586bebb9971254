"""What a plan does when a device is lost, as one table."""

from __future__ import annotations

from rich.table import Table

from specs.plan import Contingency, Plan
from specs.units import num_bytes, percent

POLICY_NAMES = {
    "reduced": "goes on with fewer ranks",
    "resplit": "re-splits its stages",
    "split": "goes on as smaller replicas",
    "drop": "is left out",
    "spare": "takes a spare",
}


def contingency_table(plan: Plan) -> Table:
    """One line per kind of loss: what the damaged replica does, what the step takes, and the next best way."""
    table = Table(title="If a device is lost", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in ("rank", "its replica", "speed", "batch", "peak memory", "next best"):
        table.add_column(name, header_style="dim", justify="right" if name in ("speed", "batch") else "left")
    healthy = plan.predicted.tokens_per_second if plan.predicted is not None else None
    for one in plan.contingencies:
        share = "" if healthy is None else percent(one.predicted.tokens_per_second / healthy)
        table.add_row(
            ranks_text(one),
            f"{POLICY_NAMES[one.policy]}: {one.layout}",
            share,
            "whole" if one.global_batch == plan.training.global_batch else str(one.global_batch),
            num_bytes(one.predicted.peak_memory_bytes),
            next_best(one),
        )
    left = plan.world_size - sum(max(len(one.equivalent), 1) for one in plan.contingencies)
    if left:
        table.add_row(f"{left} others", "solved when it happens", "", "", "", "")
    return table


def ranks_text(one: Contingency) -> str:
    """`0-7`, `0-7, 16-23` or `0 ... 88 (12)` for ranks that are not neighbours."""
    ranks = sorted(one.equivalent or one.lost)
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    if len(runs) > 2:
        return f"{ranks[0]} ... {ranks[-1]} ({len(ranks)})"
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def next_best(one: Contingency) -> str:
    """Policy and reason of the first way that was not taken."""
    if not one.alternatives:
        return "nothing else"
    other = one.alternatives[0]
    return f"{other.layout.split(':')[0]}: {other.reason}"
