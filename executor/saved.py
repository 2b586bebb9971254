"""The weights that a run folder holds: of its newest sound checkpoint, else those it was started from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

from executor.buckets import Read
from executor.checkpoint import CheckpointReader, find_checkpoint
from executor.huggingface import HuggingFaceWeights
from specs.base import load_document
from specs.errors import BadInputError
from specs.options import TrainOptions
from specs.plan import Plan


class SavedRun(NamedTuple):
    """`read` gives row-major elements of a global tensor, flat; `origin` says in words where they come from."""

    plan: Plan
    options: TrainOptions | None
    read: Read
    origin: str


def open_run(run: Path) -> SavedRun:
    """Plan, options and weights of a run folder.  Raises `BadInputError` when it has none that are sound."""
    if not run.is_dir():
        raise BadInputError(f"run folder {run} does not exist. Give the folder that `plait train --out` made.")
    plan = load_document(Plan, run / "plan.json", "plan")
    options = load_document(TrainOptions, run / "options.json", "options")
    found = find_checkpoint(run / "checkpoints")
    if found is not None:
        place, manifest, refused = found
        for message in refused if os.environ.get("RANK", "0") == "0" else ():
            print(f"plait: {message} The one before it is used.", file=sys.stderr)
        return SavedRun(plan, options, CheckpointReader(place, manifest).read, f"step {manifest.step}")
    if options.initial_weights is None:
        raise BadInputError(f"{run} has no checkpoint yet. Let it train to its first one.")
    return imported(plan, options.initial_weights, options)


def imported(plan: Plan, folder: Path, options: TrainOptions | None = None) -> SavedRun:
    """A plan with the weights of a Hugging Face folder."""
    weights = HuggingFaceWeights(folder)
    weights.check_model(plan.model, "the plan")
    return SavedRun(plan, options, weights.read_elements, f"imported from {folder}")
