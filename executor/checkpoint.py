"""Checkpoints that any plan can load: pieces of global tensors in safetensors files, with a manifest.

    RUN/checkpoints/step-00000100/rank-00003.safetensors ...  manifest.json  manifest.json.sha256
    RUN/checkpoints/LATEST        the step to resume from

A piece is a run of row-major elements of one global tensor (weight in master precision, both moments).  A checkpoint
is written beside its place and renamed when every file is on disk (`executor.saving`); the manifest names each file's
sha256 and size.  Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from safetensors import SafetensorError, safe_open

from executor.buckets import BUCKET_ELEMENTS
from executor.engine import Engine
from specs.base import Document, Spec, load_document
from specs.errors import BadInputError
from specs.layout import Interval

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = ("weight", "exp_avg", "exp_avg_sq")
MANIFEST, LATEST = "manifest.json", "LATEST"
_READ_BYTES = 2**24


class PieceEntry(Spec):
    """Elements [start, stop) of a tensor of some kind, under `key` in `file`."""

    file: str
    key: str
    tensor: str
    kind: Kind
    start: int
    stop: int


class FileEntry(Spec):
    """A file of the checkpoint as it must be found; a plain name, in the checkpoint's own folder."""

    file: str = Field(pattern=r"^rank-\d{5,}\.safetensors$")
    size_bytes: int
    sha256: str


class Manifest(Document):
    """What a checkpoint holds."""

    step: int
    seed: int
    plan_sha256: str
    files: tuple[FileEntry, ...]
    pieces: tuple[PieceEntry, ...]


# A sound checkpoint: where, what it holds, and why newer ones were refused.
Found = tuple[Path, Manifest, list[str]]


def steps(folder: Path) -> list[Path]:
    """Folders of saved steps, newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def manifest_digest(place: Path) -> str:
    """sha256 of a checkpoint's manifest."""
    return hashlib.sha256((place / MANIFEST).read_bytes()).hexdigest()


def _read_manifest(place: Path) -> Manifest:
    try:
        expected = (place / f"{MANIFEST}.sha256").read_text(encoding="utf-8", errors="replace").split()[:1]
        found = manifest_digest(place)
    except OSError as error:
        raise BadInputError(f"checkpoint {place.name}: {error.filename} cannot be read: {error.strerror}.") from None
    if expected != [found]:
        raise BadInputError(f"checkpoint {place.name}: {MANIFEST} was changed after it was written (sha256).")
    return load_document(Manifest, place / MANIFEST, "checkpoint manifest")


def _verify(place: Path, entry: FileEntry) -> None:
    path, digest, size = place / entry.file, hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
                size += len(part)
    except OSError as error:
        raise BadInputError(f"checkpoint {place.name}: {entry.file} cannot be read: {error.strerror}.") from None
    if size != entry.size_bytes:
        raise BadInputError(
            f"checkpoint {place.name}: {entry.file} has {size:,} bytes, {entry.size_bytes:,} were written."
        )
    if digest.hexdigest() != entry.sha256:
        raise BadInputError(f"checkpoint {place.name}: {entry.file} was changed after it was written (sha256).")


def verified_manifest(place: Path, *, part: int = 0, parts: int = 1) -> Manifest:
    """The manifest of a checkpoint whose files are all there, whole and unchanged, else `BadInputError`.

    Of several processes each reads its `part` of the files only.
    """
    manifest = _read_manifest(place)
    for entry in manifest.files[part::parts]:
        _verify(place, entry)
    return manifest


def _candidates(folder: Path) -> tuple[list[Path], list[str]]:
    """Saved steps up to LATEST, newest first, and why LATEST is no help, if so."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return steps(folder), []
    except OSError as error:
        return steps(folder), [f"{folder / LATEST} cannot be read: {error.strerror}."]
    if not (folder / name).is_dir() or not name.startswith("step-"):
        return steps(folder), [f"{folder / LATEST} names {name[:80]!r}, which is no saved step."]
    return [place for place in steps(folder) if place.name <= name], []


def _first_sound(folder: Path, check: Callable[[Path], tuple[Manifest | None, str]]) -> Found | None:
    """The newest candidate that `check` accepts (a manifest, and no problem)."""
    places, refused = _candidates(folder)
    for place in places:
        manifest, problem = check(place)
        if manifest is not None and not problem:
            return place, manifest, refused
        refused.append(problem)
    if places:
        raise BadInputError(f"no sound checkpoint in {folder}: {refused[0]} Restore one or start a new run folder.")
    return None


def _check(place: Path, part: int = 0, parts: int = 1) -> tuple[Manifest | None, str]:
    try:
        return verified_manifest(place, part=part, parts=parts), ""
    except BadInputError as error:
        return None, str(error)


def find_checkpoint(folder: Path) -> Found | None:
    """The checkpoint that LATEST names or, where that is damaged, the newest sound one before it.

    None when the folder has none.  Raises `BadInputError` when there are checkpoints but all of them are damaged.
    """
    return _first_sound(folder, _check)


def agree_on_checkpoint(folder: Path) -> Found | None:
    """`find_checkpoint` by all ranks together: each reads its part of the files, and all get the same answer."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def check(place: Path) -> tuple[Manifest | None, str]:
        manifest, problem = _check(place, rank, world)
        problems = [problem] * world
        dist.all_gather_object(problems, problem)
        return manifest, next(filter(None, problems), "")

    return _first_sound(folder, check)


def load_checkpoint(engine: Engine, place: Path, manifest: Manifest) -> None:
    """Fill weights and moments of this rank from a checkpoint made under any plan of the same model.

    Little more than what is filled is in memory at a time.  Raises `BadInputError` when an element that this rank needs
    is missing.
    """
    reader = CheckpointReader(place, manifest)
    engine.set_weights(lambda tensor, elements: reader.read(tensor, elements, "weight"))
    for bucket in engine.sync.buckets:
        state = engine.optimizer.adam.state[bucket.master]
        for piece in bucket.layout.pieces:
            mine = Interval(piece.offset, piece.offset + piece.elements.size).overlap(bucket.segment)
            for start in range(mine.start, mine.stop, BUCKET_ELEMENTS):
                part = Interval(start, min(start + BUCKET_ELEMENTS, mine.stop))
                elements = part.shifted(piece.elements.start - piece.offset)
                where = slice(*part.shifted(-bucket.segment.start))
                state["exp_avg"][where] = reader.read(piece.tensor, elements, "exp_avg")
                state["exp_avg_sq"][where] = reader.read(piece.tensor, elements, "exp_avg_sq")
    engine.optimizer.set_steps(manifest.step)


class CheckpointReader:
    """The contents of a verified checkpoint, by global tensor."""

    def __init__(self, place: Path, manifest: Manifest) -> None:
        self._place = place
        self._pieces: defaultdict[tuple[str, Kind], list[PieceEntry]] = defaultdict(list)
        for entry in manifest.pieces:
            self._pieces[entry.tensor, entry.kind].append(entry)
        self._files: dict[str, safe_open] = {}

    def read(self, tensor: str, elements: Interval, kind: Kind = "weight") -> torch.Tensor:
        """Row-major elements, flat, in the checkpoint's type.  Raises `BadInputError` when some are missing."""
        parts: list[tuple[int, torch.Tensor]] = []
        for entry in self._pieces[tensor, kind]:
            common = elements.overlap(Interval(entry.start, entry.stop))
            if common.size > 0:
                parts.append((common.start, self._slice(entry, common.shifted(-entry.start))))
        parts.sort(key=lambda part: part[0])
        missing = elements.size - sum(values.numel() for _, values in parts)
        if missing:
            raise BadInputError(
                f"checkpoint {self._place.name} lacks {missing:,} of {elements.size:,} elements of {tensor} ({kind}). "
                "Is it of another model?"
            )
        return torch.cat([values for _, values in parts]) if parts else torch.empty(0)

    def _slice(self, entry: PieceEntry, part: Interval) -> torch.Tensor:
        try:
            if entry.file not in self._files:
                self._files[entry.file] = safe_open(str(self._place / entry.file), framework="pt")
            return self._files[entry.file].get_slice(entry.key)[part.start : part.stop]
        except (SafetensorError, OSError) as error:
            raise BadInputError(f"checkpoint {self._place.name} cannot be read: {error}.") from None
