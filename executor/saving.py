"""Saving while training goes on: state is copied at a step's end, a thread of each rank writes its file meanwhile.

    start    all ranks copy what they write to the host; the only time that training waits for
    (steps)  threads write, hash and sync the files of a folder that no reader looks at
    finish   all ranks tell of their files; the first one adds the manifest, renames the folder, points LATEST to it

`finish` is called once every thread has ended, or when the next save is due (it then waits: no more than one save is
on its way).  What a thread could not write is raised there, on every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from executor.buckets import Bucket, Piece
from executor.checkpoint import KINDS, LATEST, MANIFEST, FileEntry, Kind, Manifest, PieceEntry, manifest_digest, steps
from executor.engine import Engine
from specs.base import write_whole
from specs.errors import BadInputError
from specs.layout import Interval

WRITE_BYTES = 2**24  # written and hashed at a time
SAFETENSORS_NAMES = {torch.float32: "F32", torch.float64: "F64"}


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is durable.  `stall_seconds` training waited for it, `lag_seconds` until all was on disk."""

    step: int
    path: Path
    size_bytes: int
    stall_seconds: float
    lag_seconds: float


@dataclass
class _Save:
    """One save on its way."""

    step: int
    folder: Path
    pieces: list[PieceEntry]
    began: float
    stall_seconds: float = 0.0
    file: FileEntry | None = None
    problem: str = ""
    thread: threading.Thread = field(init=False)


class Saver:
    """Checkpoints of one engine in one folder, of which the `keep` newest stay.  All ranks call it together."""

    def __init__(self, engine: Engine, folder: Path, *, seed: int, keep: int) -> None:
        self._engine, self._folder = engine, folder
        self._seed, self._keep = seed, keep
        self._host: torch.Tensor | None = None  # what is being written; kept for the next save
        self._save: _Save | None = None

    @property
    def is_under_way(self) -> bool:
        """A save has begun and is not finished."""
        return self._save is not None

    @property
    def is_writing(self) -> bool:
        """This rank's part of it is not on disk yet."""
        return self._save is not None and self._save.thread.is_alive()

    def start(self, step: int) -> None:
        """Copy the state after `step` and begin to write it.  No other save may be under way."""
        assert self._save is None, "finish the save before"
        began = time.time()
        rank = dist.get_rank()
        # A name of its own, so that nothing is mixed with what a killed run, or one still writing, has left.
        name = [f".writing-{secrets.token_hex(4)}-step-{step:08d}"]
        if rank == 0:
            for left in self._folder.glob(".writing-*"):
                shutil.rmtree(left, ignore_errors=True)
        dist.broadcast_object_list(name, src=0)
        file = f"rank-{rank:05d}.safetensors"
        pieces, header = self._copy(file)
        save = _Save(step, self._folder / name[0], pieces, began)
        save.thread = threading.Thread(target=self._write, args=(save, file, header), name="checkpoint", daemon=True)
        self._save = save
        save.thread.start()
        save.stall_seconds = time.time() - began

    def _copy(self, file: str) -> tuple[list[PieceEntry], bytes]:
        """What this rank writes, in `_host`; entries of the manifest and the header of the safetensors file."""
        parts: list[tuple[Piece, Interval, Kind, torch.Tensor]] = []
        for bucket in self._engine.sync.buckets:
            state = self._engine.optimizer.adam.state[bucket.master]
            values: dict[Kind, torch.Tensor] = {
                "weight": bucket.master.detach(),
                "exp_avg": state["exp_avg"],
                "exp_avg_sq": state["exp_avg_sq"],
            }
            for piece, elements, where in _written(bucket):
                parts += [(piece, elements, kind, values[kind][where.start : where.stop]) for kind in KINDS]
        size = sum(part.numel() for *_, part in parts)
        if self._host is None:
            dtype, on_gpu = self._engine.sync.buckets[0].master.dtype, self._engine.device.type == "cuda"
            self._host = torch.empty(size, dtype=dtype, pin_memory=on_gpu)
        width, start = self._host.element_size(), 0
        entries: list[PieceEntry] = []
        header: dict[str, object] = {}
        for piece, elements, kind, part in parts:
            stop = start + part.numel()
            self._host[start:stop].copy_(part, non_blocking=True)
            key = str(len(entries))
            entries.append(
                PieceEntry(file=file, key=key, tensor=piece.tensor, kind=kind, start=elements.start, stop=elements.stop)
            )
            name = SAFETENSORS_NAMES[self._host.dtype]
            header[key] = {"dtype": name, "shape": [part.numel()], "data_offsets": [start * width, stop * width]}
            start = stop
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize()
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return entries, len(text).to_bytes(8, "little") + text

    def _write(self, save: _Save, file: str, header: bytes) -> None:
        """In a thread: header and host copy to disk, hashed on the way."""
        assert self._host is not None
        if not save.pieces:
            return
        data = memoryview(self._host.numpy()).cast("B")
        path, size, digest = save.folder / file, len(header) + len(data), hashlib.sha256(header)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as out:
                out.write(header)
                for start in range(0, len(data), WRITE_BYTES):
                    part = data[start : start + WRITE_BYTES]
                    out.write(part)
                    digest.update(part)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            save.problem = (
                f"{path} cannot be written ({size:,} bytes): {error.strerror}. Free space or choose another place."
            )
        except Exception as error:  # in a thread it would be lost; `finish` tells everybody
            save.problem = f"{path}: {type(error).__name__}: {error}"
        else:
            save.file = FileEntry(file=file, size_bytes=size, sha256=digest.hexdigest())

    def finish(self) -> Saved:
        """Wait for the writers and make the checkpoint the newest.

        Raises `BadInputError` on every rank when any rank could not write; the checkpoints before stay as they were.
        """
        assert self._save is not None, "nothing is under way"
        begin, save, self._save = time.time(), self._save, None
        save.thread.join()
        mine = (save.problem, save.file, save.pieces)
        gathered: list[tuple[str, FileEntry | None, list[PieceEntry]]] = [mine] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        outcome = [next((problem for problem, _, _ in gathered if problem), "")]
        place = self._folder / f"step-{save.step:08d}"
        files = tuple(file for _, file, _ in gathered if file is not None)
        if dist.get_rank() == 0:
            if not outcome[0]:
                pieces = tuple(piece for _, _, part in gathered for piece in part)
                plan = self._engine.plan.sha256()
                manifest = Manifest(step=save.step, seed=self._seed, plan_sha256=plan, files=files, pieces=pieces)
                outcome = [self._publish(manifest, save.folder, place)]
            if outcome[0]:
                shutil.rmtree(save.folder, ignore_errors=True)
        dist.broadcast_object_list(outcome, src=0)
        if outcome[0]:
            raise BadInputError(f"the checkpoint of step {save.step} was not saved: {outcome[0]}")
        now = time.time()
        stall = save.stall_seconds + now - begin
        return Saved(save.step, place, sum(file.size_bytes for file in files), stall, now - save.began)

    def _publish(self, manifest: Manifest, folder: Path, place: Path) -> str:
        """On the first rank: manifest, rename, LATEST, and the oldest go.  Returns what went wrong, if anything."""
        try:
            manifest.save(folder / MANIFEST)
            write_whole(folder / f"{MANIFEST}.sha256", f"{manifest_digest(folder)}  {MANIFEST}\n")
            _replace_folder(folder, place)
            write_whole(self._folder / LATEST, f"{place.name}\n")
        except BadInputError as error:
            return str(error)
        except OSError as error:
            return f"{place} cannot be put in its place: {error.strerror}."
        older = [path for path in steps(self._folder) if path.name <= place.name]
        for path in older[self._keep :]:
            shutil.rmtree(path, ignore_errors=True)
        return ""


def _written(bucket: Bucket) -> Iterator[tuple[Piece, Interval, Interval]]:
    """(piece, elements of the tensor, where in this process's segment) that this process writes."""
    writes = bucket.layout.writer_segment(bucket.process)
    for piece in bucket.layout.pieces:
        common = Interval(piece.offset, piece.offset + piece.elements.size).overlap(writes)
        if common.size > 0:
            elements = common.shifted(piece.elements.start - piece.offset)
            yield piece, elements, common.shifted(-bucket.segment.start)


def _replace_folder(new: Path, place: Path) -> None:
    """Rename `new` to `place`; what was there (the same step, saved before) goes only once the new one stands."""
    old = place.with_name(f".replaced-{place.name}")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    new.rename(place)
    with contextlib.suppress(OSError):  # not every file system can
        handle = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    shutil.rmtree(old, ignore_errors=True)
