"""Every layout against one process, number by number: writes docs/parity.md.

    python -m benchmarks.parity_table [--only WORD] [--minutes N --rows FILE] [--out FILE]      7 minutes of CPU

Each plan of the parity tests trains a small model for five steps with clipping active, in float64 and float32, and is
compared with one process and torch's own optimizer: losses, gradient norms, every gradient of the first step, weights
after the last.  Then it trains two steps, saves, and another plan loads the checkpoint and goes on to the fifth.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import torch

from specs.base import write_whole
from specs.model import ModelSpec
from specs.plan import Plan
from tests.checkpoints import continue_part
from tests.gloo import GlooPool
from tests.parity import Trace, largest_relative_error, run_rank, run_reference

NUM_STEPS = 5
SAVED_STEP = 2
DTYPES = (torch.float64, torch.float32)
# Tensors by the last word of their names; biases and norms first.
KINDS = ("embedding, head", "query", "key, value", "output", "gate, up", "down", "experts, router", "norms", "biases")
ELSEWHERE = "saved, loaded elsewhere"
Rows = dict[str, dict[str, float]]
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


HEAD = """# Does every layout train like one process?

{num_plans} plans of small models of unlike layers whose sizes hardly divide (8 and 14 heads, FFN 37 to 50, vocabulary
61), five steps with clipping active, against one process with torch's AdamW and clipping. Numbers are the largest
relative differences: of losses and gradient norms over all steps and ranks, of the first step's gradients by kind of
tensor, of all weights after the last step. The last column: two steps, a checkpoint, loaded by the next plan of the
same training in the table, three more steps; losses and weights. A tensor's difference is taken against its largest
magnitude. Empty cells: the model has no such tensor, or no other plan trains it on the same batch.

Made by `python -m benchmarks.parity_table` on {made}.

"""


def kind_of(tensor: str) -> str:
    """Column of the table in which a tensor's gradient counts."""
    module, _, name = tensor.rpartition(".")
    if name.endswith("bias"):
        return "biases"
    if "norm" in name:
        return "norms"
    if name in ("weight", "positions") or not module:
        return "embedding, head"
    if name == "router" or name.startswith("shared") or ".moe" in module:
        return "experts, router"
    return next(kind for kind in KINDS if name in kind.split(", "))


def plans() -> dict[str, Plan]:
    """All plans of the parity tests."""
    from tests import test_context, test_parity, test_parity_families, test_schedules, test_sharding

    found: dict[str, Plan] = {}
    for group in (test_parity, test_schedules, test_sharding, test_parity_families, test_context):
        found.update(group.CASES)
    return found


@cache
def reference(model_json: str, global_batch: int, seq_len: int, dtype: torch.dtype) -> Trace:
    """The same training in one process."""
    return run_reference(ModelSpec.model_validate_json(model_json), global_batch, seq_len, dtype, NUM_STEPS)


def relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference of numbers that may not be zero."""
    return max(abs(one - two) / abs(two) for one, two in zip(found, expected, strict=True))


def compare(pool: GlooPool, plan: Plan, dtype: torch.dtype) -> dict[str, float]:
    """Column -> largest relative difference from one process."""
    whole = reference(plan.model.model_dump_json(), plan.training.global_batch, plan.training.seq_len, dtype)
    ranks = pool.run(run_rank, plan.world_size, plan.model_dump_json(), dtype, NUM_STEPS)
    columns = {
        "loss": max(relative(losses, whole.losses) for losses, *_ in ranks),
        "norm": max(relative(norms, whole.norms) for _, norms, *_ in ranks),
    }
    gradients = largest_relative_error([piece for rank in ranks for piece in rank[2]], whole.gradients, complete=True)
    for tensor, error in gradients.items():
        kind = kind_of(tensor)
        columns[kind] = max(columns.get(kind, 0.0), error)
    weights = largest_relative_error([piece for rank in ranks for piece in rank[3]], whole.weights, complete=False)
    return {**columns, "weights": max(weights.values())}


def go_on(pool: GlooPool, first: Plan, then: Plan, dtype: torch.dtype) -> float:
    """Train, save under one plan, load under another, train on: largest difference of losses and last weights."""
    whole = reference(then.model.model_dump_json(), then.training.global_batch, then.training.seq_len, dtype)
    with tempfile.TemporaryDirectory() as folder:
        pool.run(continue_part, first.world_size, first.model_dump_json(), folder, dtype, SAVED_STEP)
        ranks = pool.run(continue_part, then.world_size, then.model_dump_json(), folder, dtype, NUM_STEPS)
    weights = largest_relative_error([piece for _, pieces in ranks for piece in pieces], whole.weights, complete=False)
    return max(max(weights.values()), *(relative(losses, whole.losses[SAVED_STEP:]) for losses, _ in ranks))


def partner(name: str, found: dict[str, Plan]) -> str | None:
    """Another plan of the same model and training, the next in the list."""
    plan = found[name]
    alike = [key for key, other in found.items() if (other.model, other.training) == (plan.model, plan.training)]
    following = alike[(alike.index(name) + 1) % len(alike)]
    return None if following == name else following


def measure(found: dict[str, Plan], pool: GlooPool, rows: Rows, path: Path, until: float) -> None:
    """Fill in the rows that are missing, plan by plan, each written down at once."""
    for name, plan in found.items():
        for dtype in DTYPES:
            if key_of(name, dtype) in rows or time.monotonic() > until:
                continue
            errors, other = compare(pool, plan, dtype), partner(name, found)
            if other is not None:
                errors[ELSEWHERE] = go_on(pool, plan, found[other], dtype)
            rows[key_of(name, dtype)] = errors
            write_whole(path, json.dumps(rows, indent=1))
            print(f"{key_of(name, dtype)}: {max(errors.values()):.1e}", flush=True)


def key_of(name: str, dtype: torch.dtype) -> str:
    """Under which a row is kept."""
    return f"{name}, {str(dtype).removeprefix('torch.')}"


def table(found: dict[str, Plan], rows: Rows, dtype: torch.dtype) -> list[str]:
    """Markdown."""
    columns = ("loss", "norm", *KINDS, "weights", ELSEWHERE)
    lines = [f"## {str(dtype).removeprefix('torch.')}", "", f"| plan | ranks | {' | '.join(columns)} |"]
    lines.append("|---|" + "---:|" * (len(columns) + 1))
    for name, plan in found.items():
        errors = rows[key_of(name, dtype)]
        cells = (f"{errors[column]:.1e}" if column in errors else "" for column in columns)
        lines.append(f"| {name} | {plan.world_size} | {' | '.join(cells)} |")
    return [*lines, "", f"Largest of all: {worst(found, rows, dtype):.1e} (bound {BOUNDS[dtype]:.0e}).", ""]


def worst(found: dict[str, Plan], rows: Rows, dtype: torch.dtype) -> float:
    """The largest number of a table."""
    return max(max(rows[key_of(name, dtype)].values()) for name in found)


def main() -> None:
    """Measure, write the page, fail when a bound is broken."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", default="", help="plans whose name holds this word")
    arguments.add_argument("--out", type=Path, default=Path("docs/parity.md"))
    arguments.add_argument("--rows", type=Path, help="keep rows here; those that it holds are not measured again")
    arguments.add_argument("--minutes", type=float, default=math.inf, help="then write the page with what there is")
    options = arguments.parse_args()
    every = {name: plan for name, plan in plans().items() if options.only in name}
    rows: Rows = json.loads(options.rows.read_text()) if options.rows is not None and options.rows.exists() else {}
    pool = GlooPool(max(plan.world_size for plan in every.values()), timeout_seconds=600)
    with tempfile.TemporaryDirectory() as folder:
        path = options.rows if options.rows is not None else Path(folder) / "rows.json"
        try:
            measure(every, pool, rows, path, time.monotonic() + 60.0 * options.minutes)
        finally:
            pool.close()
    found = {name: plan for name, plan in every.items() if all(key_of(name, dtype) in rows for dtype in DTYPES)}
    made = f"{datetime.now(tz=timezone.utc).date()}, gloo on {os.cpu_count()} CPU cores, Python"
    made = f"{made} {platform.python_version()}, torch {torch.__version__}"
    lines = [line for dtype in DTYPES for line in table(found, rows, dtype)]
    write_whole(options.out, HEAD.format(num_plans=len(found), made=made) + "\n".join(lines).rstrip() + "\n")
    if any(worst(found, rows, dtype) > BOUNDS[dtype] for dtype in DTYPES):
        sys.exit("a bound is broken; see the page")


if __name__ == "__main__":
    main()
