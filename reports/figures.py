"""Matplotlib figures without a display: one look, and whole-file writing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from specs.base import write_whole
from specs.errors import BadInputError

FORMATS = ("png", "svg", "pdf")


def new_figure(*, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes; inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def format_of(path: Path) -> str:
    """The format that a file's ending names.  Raises `BadInputError`."""
    ending = path.suffix.removeprefix(".").lower()
    if ending not in FORMATS:
        raise BadInputError(f"picture {path}: the ending must be one of {', '.join(FORMATS)}.")
    return ending


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure whole or not at all; png, svg or pdf by the file's ending."""
    ending = format_of(path)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=ending)
    write_whole(path, buffer.getvalue())
