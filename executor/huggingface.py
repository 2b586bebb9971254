"""Weights out of a Hugging Face folder (`config.json` and safetensors), the rows a rank holds and no more.

Only safetensors are read, one file or several with an index; nothing is unpickled and `transformers` is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from executor.huggingface_names import (
    DEFAULT_PREFIX,
    PREFIXES,
    Source,
    is_ignorable,
    shapes_of,
    sources_of,
    tensors_by_name,
)
from specs.base import read_json, write_whole
from specs.errors import BadInputError
from specs.huggingface import model_from_config
from specs.layout import Interval
from specs.model import ModelSpec

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
# What belongs to a model besides its weights, kept in RUN/model for the way back.
MODEL_FOLDER = "model"
_COMPANIONS = (
    CONFIG,
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
FLOATS = ("F64", "F32", "F16", "BF16")


class HuggingFaceWeights:
    """The weights of one folder.  The constructor checks that every tensor is there with its shape and no other is.

    Raises `BadInputError` for a folder, file, configuration or tensor that is missing, unknown or unlike the rest.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise BadInputError(f"model folder {folder} does not exist. Give a folder with {CONFIG} and {WEIGHTS}.")
        self.folder = folder
        config = read_json(folder / CONFIG, "model configuration")
        self.model = model_from_config(config, name=folder.resolve().name, where=f"model {folder / CONFIG}")
        assert isinstance(config, dict)
        self.model_type: str = config["model_type"]
        self._sources = sources_of(self.model, self.model_type)
        self._specs = tensors_by_name(self.model)
        self._shapes = shapes_of(self.model, self.model_type)
        self._files: dict[str, safe_open] = {}
        self._file_of = self._locate()
        self._check()

    def _locate(self) -> dict[str, tuple[str, str]]:
        """Expected name -> (file, name in it)."""
        if (self.folder / INDEX).is_file():
            found = _weight_map(self.folder / INDEX)
        elif (self.folder / WEIGHTS).is_file():
            found = dict.fromkeys(self._open(WEIGHTS, "np").keys(), WEIGHTS)
        elif any(self.folder.glob("*.bin")):
            raise BadInputError(
                f"model folder {self.folder} holds pickled weights only (*.bin), which are not read. "
                "Save the model again as safetensors: model.save_pretrained(folder)."
            )
        else:
            raise BadInputError(f"model folder {self.folder} holds neither {WEIGHTS} nor {INDEX}.")
        prefix = PREFIXES.get(self.model_type, DEFAULT_PREFIX)
        if not any(name.startswith(prefix) for name in found):  # the bare decoder
            return {prefix + name if prefix + name in self._shapes else name: (f, name) for name, f in found.items()}
        return {name: (file, name) for name, file in found.items()}

    def _check(self) -> None:
        where = f"model folder {self.folder}"
        missing = [name for name in self._shapes if name not in self._file_of]
        if missing:
            raise BadInputError(
                f"{where}: {len(missing)} of {len(self._shapes)} tensors that {CONFIG} asks for are missing, the first "
                f"is {missing[0]}. Are the weights and {CONFIG} of the same model?"
            )
        extra = [n for n in self._file_of if n not in self._shapes and not is_ignorable(n, self.model)]
        if extra:
            raise BadInputError(
                f"{where}: {len(extra)} tensors have no place in the model of {CONFIG}, the first is {extra[0]}. "
                f"Are the weights and {CONFIG} of the same model?"
            )
        for name, expected in self._shapes.items():
            file, inner = self._file_of[name]
            try:
                piece = self._open(file, "np").get_slice(inner)
            except SafetensorError as error:
                raise BadInputError(f"{where}: {file} does not hold {inner}, which {INDEX} says: {error}.") from None
            shape, kind = tuple(piece.get_shape()), piece.get_dtype()
            if shape != expected:
                raise BadInputError(f"{where}: {name} has shape {list(shape)}, {CONFIG} asks for {list(expected)}.")
            if kind not in FLOATS:
                raise BadInputError(f"{where}: {name} has type {kind}; supported are {', '.join(FLOATS)}.")
        self._files.clear()

    def _open(self, file: str, framework: str) -> safe_open:
        if file not in self._files:
            try:
                self._files[file] = safe_open(str(self.folder / file), framework=framework)
            except FileNotFoundError:
                raise BadInputError(f"model folder {self.folder}: {file} is missing, {INDEX} names it.") from None
            except (SafetensorError, OSError) as error:
                raise BadInputError(f"model folder {self.folder}: {file} cannot be read: {error}.") from None
        return self._files[file]

    def check_model(self, wanted: ModelSpec, what: str) -> None:
        """Raise `BadInputError` unless these are weights for the model of `what` (its name may differ)."""
        if wanted.model_copy(update={"name": self.model.name}) == self.model:
            return
        ours, theirs = dict(wanted.modules()), dict(self.model.modules())
        for name in (*ours, *theirs):
            if ours.get(name) != theirs.get(name):
                place = f"{name}: {what} has {_short(ours.get(name), theirs.get(name))}, the folder "
                place += _short(theirs.get(name), ours.get(name))
                break
        else:
            place = f"max_positions: {what} has {wanted.max_positions}, the folder {self.model.max_positions}"
        raise BadInputError(
            f"model folder {self.folder} is not the model of {what}. {place}. Make the plan with --model {self.folder}."
        )

    def read(self, tensor: str, rows: Interval) -> torch.Tensor:
        """Rows of one of our tensors, [rows, cols] or [rows], in the file's own type, on the CPU."""
        import torch

        parts = []
        for source in self._sources[tensor]:
            common = rows.overlap(source.rows)
            if common.size > 0:
                parts.append(self._read_source(source, common))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_elements(self, tensor: str, elements: Interval) -> torch.Tensor:
        """Row-major elements of one of our tensors, flat, in the file's own type, on the CPU."""
        width = max(self._specs[tensor].cols, 1)
        rows = Interval(elements.start // width, -(-elements.stop // width))
        common = elements.shifted(-rows.start * width)
        return self.read(tensor, rows).reshape(-1)[common.start : common.stop]

    def _read_source(self, source: Source, rows: Interval) -> torch.Tensor:
        file, inner = self._file_of[source.name]
        start, stop = rows.shifted(source.first - source.rows.start)
        piece = self._open(file, "pt").get_slice(inner)
        try:
            return piece[:, start:stop].t() if source.transposed else piece[start:stop]
        except SafetensorError as error:
            raise BadInputError(f"model folder {self.folder}: {file} cannot be read: {error}.") from None


def keep_model_files(folder: Path, place: Path) -> None:
    """Copy configuration and tokenizer files, as far as they are there."""
    for name in _COMPANIONS:
        if (folder / name).is_file():
            try:
                payload = (folder / name).read_bytes()
            except OSError as error:
                raise BadInputError(f"model folder {folder}: {name} cannot be read: {error.strerror}.") from None
            write_whole(place / name, payload)


def _weight_map(path: Path) -> dict[str, str]:
    data = read_json(path, "weight index")
    found = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(found, dict) or not all(isinstance(v, str) and Path(v).name == v for v in found.values()):
        raise BadInputError(f"weight index {path} has no weight_map from tensor names to files beside it.")
    return found


def _short(spec: object, other: object) -> str:
    """The keys in which a module differs from another one of the same kind, else all of it."""
    if spec is None:
        return "nothing"
    mine, theirs = _plain(spec), _plain(other)
    keys = [k for k in mine if mine.get("kind") != theirs.get("kind") or mine[k] != theirs.get(k)]
    return ", ".join(f"{key} {json.dumps(mine[key])}" for key in keys)


def _plain(spec: object) -> Mapping[str, object]:
    return {} if spec is None else spec.model_dump(mode="json")  # type: ignore[attr-defined]
