"""Checkpoints that any plan can load: pieces of global tensors in safetensors files, with a manifest.

    RUN/checkpoints/step-00000100/rank-0003.safetensors ...  manifest.json

A piece is a run of row-major elements of one global tensor (weight in master precision, both moments).  A checkpoint
is written beside its place and renamed when every file is on disk; the manifest names each file's sha256 and size.
Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from executor.buckets import Bucket, Piece
from executor.engine import Engine
from specs.base import Document, Spec, load_document, write_whole
from specs.errors import BadInputError
from specs.layout import Interval

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = ("weight", "exp_avg", "exp_avg_sq")


class PieceEntry(Spec):
    """Elements [start, stop) of a tensor of some kind, under `key` in `file`."""

    file: str
    key: str
    tensor: str
    kind: Kind
    start: int
    stop: int


class FileEntry(Spec):
    """A file of the checkpoint as it must be found."""

    file: str
    size_bytes: int
    sha256: str


class Manifest(Document):
    """What a checkpoint holds."""

    step: int
    seed: int
    plan_sha256: str
    files: tuple[FileEntry, ...]
    pieces: tuple[PieceEntry, ...]


def _written(bucket: Bucket) -> Iterator[tuple[Piece, Interval, Interval]]:
    """(piece, elements of the tensor, where in this process's segment) that this process writes."""
    writes = bucket.layout.writer_segment(bucket.process)
    for piece in bucket.layout.pieces:
        common = Interval(piece.offset, piece.offset + piece.elements.size).overlap(writes)
        if common.size > 0:
            elements = common.shifted(piece.elements.start - piece.offset)
            yield piece, elements, common.shifted(-bucket.segment.start)


def save_checkpoint(engine: Engine, folder: Path, *, step: int, seed: int, keep: int) -> tuple[Path, int]:
    """Write one checkpoint (all ranks together) and drop all but the `keep` newest.  Returns its path and bytes.

    Raises `BadInputError` on every rank when any rank cannot write; the checkpoints before stay as they were.
    """
    place = folder / f"step-{step:08d}"
    temporary = folder / f".writing-{place.name}"
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    tensors: dict[str, torch.Tensor] = {}
    pieces: list[PieceEntry] = []
    name = f"rank-{rank:05d}.safetensors"
    for bucket in engine.sync.buckets:
        state = engine.optimizer.adam.state[bucket.master]
        values: dict[Kind, torch.Tensor] = {
            "weight": bucket.master,
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
        }
        for piece, elements, where in _written(bucket):
            for kind in KINDS:
                key = f"{len(pieces)}"
                tensors[key] = values[kind].detach()[where.start : where.stop].cpu().clone()
                pieces.append(
                    PieceEntry(
                        file=name, key=key, tensor=piece.tensor, kind=kind, start=elements.start, stop=elements.stop
                    )
                )
    payload = save(tensors) if tensors else b""
    problem = ""
    if tensors:
        try:
            write_whole(temporary / name, payload)
        except BadInputError as error:
            problem = str(error)
    entry = FileEntry(file=name, size_bytes=len(payload), sha256=hashlib.sha256(payload).hexdigest())
    mine = (problem, entry if tensors else None, pieces)
    gathered: list[tuple[str, FileEntry | None, list[PieceEntry]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    problem = next((p for p, _, _ in gathered if p), "")
    files = tuple(file for _, file, _ in gathered if file is not None)
    if rank == 0 and not problem:
        try:
            manifest = Manifest(
                step=step,
                seed=seed,
                plan_sha256=engine.plan.sha256(),
                files=files,
                pieces=tuple(piece for _, _, part in gathered for piece in part),
            )
            manifest.save(temporary / "manifest.json")
            _replace_folder(temporary, place)
            for old in sorted(folder.glob("step-*"))[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
        except (BadInputError, OSError) as error:
            problem = str(error)
    outcome = [problem]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0]:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise BadInputError(f"the checkpoint of step {step} was not saved: {outcome[0]}")
    return place, sum(file.size_bytes for file in files)


def _replace_folder(new: Path, place: Path) -> None:
    """Rename `new` to `place`; what was there (the same step, saved before) goes only once the new one stands."""
    old = place.with_name(f".replaced-{place.name}")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def verified_manifest(place: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there, whole and unchanged, else `BadInputError`."""
    manifest = load_document(Manifest, place / "manifest.json", "checkpoint manifest")
    for entry in manifest.files:
        path = place / entry.file
        try:
            payload = path.read_bytes()
        except OSError as error:
            raise BadInputError(f"checkpoint {place.name}: {entry.file} cannot be read: {error.strerror}.") from None
        if len(payload) != entry.size_bytes:
            raise BadInputError(
                f"checkpoint {place.name}: {entry.file} has {len(payload):,} bytes, {entry.size_bytes:,} were written."
            )
        if hashlib.sha256(payload).hexdigest() != entry.sha256:
            raise BadInputError(f"checkpoint {place.name}: {entry.file} was changed after it was written (sha256).")
    return manifest


def find_checkpoint(folder: Path) -> tuple[Path, Manifest, list[str]] | None:
    """The newest checkpoint that is sound, and why newer ones were refused; None when the folder has none.

    Raises `BadInputError` when there are checkpoints but all of them are damaged.
    """
    places = sorted(folder.glob("step-*"), reverse=True)
    refused: list[str] = []
    for place in places:
        try:
            return place, verified_manifest(place), refused
        except BadInputError as error:
            refused.append(str(error))
    if refused:
        raise BadInputError(f"no sound checkpoint in {folder}: {refused[0]} Restore one or start a new run folder.")
    return None


def load_checkpoint(engine: Engine, place: Path, manifest: Manifest) -> None:
    """Fill weights and moments of this rank from a checkpoint made under any plan of the same model.

    Raises `BadInputError` when an element that this rank needs is missing.
    """
    by_tensor: defaultdict[tuple[str, Kind], list[PieceEntry]] = defaultdict(list)
    for entry in manifest.pieces:
        by_tensor[entry.tensor, entry.kind].append(entry)
    files: dict[str, safe_open] = {}

    def fill(target: torch.Tensor, tensor: str, kind: Kind, elements: Interval) -> None:
        missing = elements.size
        for entry in by_tensor[tensor, kind]:
            common = elements.overlap(Interval(entry.start, entry.stop))
            if common.size <= 0:
                continue
            if entry.file not in files:
                files[entry.file] = safe_open(str(place / entry.file), framework="pt")
            source = common.shifted(-entry.start)
            where = common.shifted(-elements.start)
            target[where.start : where.stop] = files[entry.file].get_slice(entry.key)[source.start : source.stop]
            missing -= common.size
        if missing:
            raise BadInputError(
                f"checkpoint {place.name} lacks {missing:,} of {elements.size:,} elements of {tensor} ({kind}). "
                "Is it of another model?"
            )

    def read(tensor: str, elements: Interval) -> torch.Tensor:
        values = torch.empty(elements.size, dtype=engine.sync.buckets[0].master.dtype)
        fill(values, tensor, "weight", elements)
        return values

    try:
        engine.set_weights(read)
        for bucket in engine.sync.buckets:
            state = engine.optimizer.adam.state[bucket.master]
            for piece in bucket.layout.pieces:
                mine = Interval(piece.offset, piece.offset + piece.elements.size).overlap(bucket.segment)
                if mine.size <= 0:
                    continue
                elements = mine.shifted(piece.elements.start - piece.offset)
                where = mine.shifted(-bucket.segment.start)
                for kind in ("exp_avg", "exp_avg_sq"):
                    fill(state[kind][where.start : where.stop], piece.tensor, kind, elements)
    except SafetensorError as error:
        raise BadInputError(f"checkpoint {place.name} cannot be read: {error}.") from None
    engine.optimizer.set_steps(manifest.step)
