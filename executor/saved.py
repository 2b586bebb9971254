"""The weights that a run folder holds: of its newest sound checkpoint, else those it was started from."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from executor.checkpoint import Manifest, PieceEntry, find_checkpoint
from executor.huggingface import HuggingFaceWeights
from specs.base import load_document
from specs.errors import BadInputError
from specs.layout import Interval
from specs.options import TrainOptions
from specs.plan import Plan

Read = Callable[[str, Interval], torch.Tensor]


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
        return SavedRun(plan, options, CheckpointWeights(place, manifest).read, f"step {manifest.step}")
    if options.initial_weights is None:
        raise BadInputError(f"{run} has no checkpoint yet. Let it train to its first one.")
    return imported(plan, options.initial_weights, options)


def imported(plan: Plan, folder: Path, options: TrainOptions | None = None) -> SavedRun:
    """A plan with the weights of a Hugging Face folder."""
    weights = HuggingFaceWeights(folder)
    weights.check_model(plan.model, "the plan")
    return SavedRun(plan, options, weights.read_elements, f"imported from {folder}")


class CheckpointWeights:
    """The weights of a verified checkpoint, by global tensor."""

    def __init__(self, place: Path, manifest: Manifest) -> None:
        self._place = place
        self._pieces: defaultdict[str, list[PieceEntry]] = defaultdict(list)
        for entry in manifest.pieces:
            if entry.kind == "weight":
                self._pieces[entry.tensor].append(entry)
        self._files: dict[str, safe_open] = {}

    def read(self, tensor: str, elements: Interval) -> torch.Tensor:
        """Row-major elements, flat, in the checkpoint's type.  Raises `BadInputError` when some are missing."""
        parts: list[tuple[int, torch.Tensor]] = []
        for entry in self._pieces[tensor]:
            common = elements.overlap(Interval(entry.start, entry.stop))
            if common.size <= 0:
                continue
            if entry.file not in self._files:
                self._files[entry.file] = safe_open(str(self._place / entry.file), framework="pt")
            source = common.shifted(-entry.start)
            try:
                values = self._files[entry.file].get_slice(entry.key)[source.start : source.stop]
            except SafetensorError as error:
                raise BadInputError(f"checkpoint {self._place.name} cannot be read: {error}.") from None
            parts.append((common.start, values))
        parts.sort(key=lambda part: part[0])
        missing = elements.size - sum(values.numel() for _, values in parts)
        if missing:
            raise BadInputError(
                f"checkpoint {self._place.name} lacks {missing:,} of {elements.size:,} elements of {tensor}. "
                "Is it of another model?"
            )
        return torch.cat([values for _, values in parts]) if parts else torch.empty(0)
