"""Values that several commands read: lists of integers."""

from __future__ import annotations

import typer


def integers(option: str, text: str) -> list[int]:
    """`1,2,4` as numbers.

    Raises:
        typer.BadParameter: something in the list is not a positive integer.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option} {text!r} is not a list of positive integers such as 1,2,4")
    return [int(part) for part in parts]


def one_or_several(option: str, one: int | None, several: str | None) -> list[int]:
    """`--seq-len 8192` or `--seq-lens 4096,8192`, one of the two.

    Raises:
        typer.BadParameter: neither or both are given.
    """
    if (one is None) == (several is None):
        plural = "--global-batches" if option == "--global-batch" else f"{option}s"
        raise typer.BadParameter(f"give either {option} or {plural}")
    return [one] if one is not None else integers(option, several or "")
