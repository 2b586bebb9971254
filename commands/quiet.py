"""`--quiet`, for every command alike."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but errors, and JSON where that is asked for.")
]


def with_quiet(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the option `--quiet`: no tables, notes or progress; files and exit codes stay as they are."""
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    parameters = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]
    quiet = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)

    @functools.wraps(command)
    def quietly(*args: Any, quiet: bool = False, **kwargs: Any) -> None:
        if not quiet:
            return command(*args, **kwargs)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            if kwargs.get("as_json"):
                return command(*args, **kwargs)
            with contextlib.redirect_stdout(nowhere):
                return command(*args, **kwargs)

    quietly.__signature__ = signature.replace(parameters=[*parameters, quiet])  # type: ignore[attr-defined]
    quietly.__annotations__ = {**hints, "quiet": Quiet}
    return quietly
