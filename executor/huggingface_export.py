"""Weights of a run written as a Hugging Face folder that `transformers` loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors.torch import save

from executor.huggingface import CONFIG, INDEX, MODEL_FOLDER, WEIGHTS, keep_model_files
from executor.huggingface_config import config_of
from executor.huggingface_names import Source, shapes_of, sources_of, tensors_by_name
from executor.saved import open_run
from specs.base import read_json, write_whole
from specs.errors import BadInputError
from specs.huggingface import model_from_config
from specs.layout import Interval
from specs.model import ModelSpec

FILE_BYTES = 5 * 10**9  # of one file; more make several files and an index, as `transformers` does
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Dtype = Literal["fp32", "bf16", "fp16"]


class Exported(NamedTuple):
    """What was written: `origin` says in words which weights, `size_bytes` counts those of tensors."""

    model: str
    origin: str
    dtype: str
    size_bytes: int


def export_run(run: Path, out: Path, dtype: Dtype | None) -> Exported:
    """Write the newest sound weights of a run folder to `out`.

    `dtype` None: the plan's precision.  Raises `BadInputError` when there is nothing to write or `out` holds a model.
    """
    saved = open_run(run)
    if (out / CONFIG).exists():
        raise BadInputError(f"{out} holds a model already ({CONFIG}). Give another folder.")
    model, original = saved.plan.model, run / MODEL_FOLDER / CONFIG
    if original.is_file():
        config = read_json(original, "model configuration")
        assert isinstance(config, dict)
        if model_from_config(config, name=model.name, where=str(original)) != model:
            raise BadInputError(f"{original} is not of the model in {run / 'plan.json'}. Was the folder changed?")
    else:
        config = config_of(model)
    kind = DTYPES[dtype if dtype is not None else "fp32" if saved.plan.training.precision == "fp32" else "bf16"]
    size = write_weights(model, str(config["model_type"]), saved.read, out, kind)
    if original.is_file():
        keep_model_files(original.parent, out)
    config = {**config, "torch_dtype": str(kind).removeprefix("torch.")}
    write_whole(out / CONFIG, json.dumps(config, indent=2) + "\n")
    return Exported(model.name, saved.origin, str(config["torch_dtype"]), size)


def write_weights(
    model: ModelSpec,
    model_type: str,
    read: Callable[[str, Interval], torch.Tensor],
    out: Path,
    dtype: torch.dtype,
    *,
    file_bytes: int = FILE_BYTES,
) -> int:
    """Write safetensors files and, for more than one, their index; returns the bytes of all tensors.

    `read` gives row-major elements of one of our tensors, flat.  One file's tensors are in memory at a time.
    """
    plan = _files(shapes_of(model, model_type), dtype.itemsize, file_bytes)
    users: dict[str, list[tuple[str, Source]]] = {}
    for tensor, sources in sources_of(model, model_type).items():
        for source in sources:
            users.setdefault(source.name, []).append((tensor, source))
    specs = tensors_by_name(model)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(plan, start=1):
        file = WEIGHTS if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        tensors = {}
        for name, shape in shapes.items():
            whole = torch.empty(shape, dtype=dtype)
            for tensor, source in users[name]:
                width = max(specs[tensor].cols, 1)
                elements = Interval(source.rows.start * width, source.rows.stop * width)
                values = read(tensor, elements).view(specs[tensor].shape(source.rows.size))
                part = slice(source.first, source.first + source.rows.size)
                if source.transposed:
                    whole[:, part] = values.t()
                else:
                    whole[part] = values
            tensors[name] = whole
            weight_map[name] = file
            total += whole.numel() * whole.element_size()
        write_whole(out / file, save(tensors, metadata={"format": "pt"}))
    if len(plan) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_whole(out / INDEX, json.dumps(index, indent=2) + "\n")
    return total


def _files(shapes: dict[str, tuple[int, ...]], itemsize: int, file_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Tensors dealt to files in order, a new file where the next tensor would make one too large."""

    def deal() -> Iterator[dict[str, tuple[int, ...]]]:
        current: dict[str, tuple[int, ...]] = {}
        filled = 0
        for name, shape in shapes.items():
            size = torch.Size(shape).numel() * itemsize
            if current and filled + size > file_bytes:
                yield current
                current, filled = {}, 0
            current[name] = shape
            filled += size
        yield current

    return list(deal())
