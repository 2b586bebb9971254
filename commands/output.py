"""`--quiet` and `--json`, for every command alike."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print nothing but errors, and what was asked for: JSON, a text, a schema."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: what was written, where, and its key figures.")]


def with_output(command: Callable[..., Any], *, is_product: bool = False) -> Callable[..., None]:
    """The command with the options `--quiet` and `--json`; files and exit codes stay as they are.

    A command without its own `as_json` returns what `--json` prints in place of its standard output.  Quiet, nothing is
    left of standard output and error, unless the output `is_product`: what was asked for.
    """
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    parameters = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]
    own_json = "as_json" in hints
    options = {"quiet": Quiet} if own_json else {"as_json": Json, "quiet": Quiet}
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, keyword, default=False, annotation=kind) for name, kind in options.items()]

    @functools.wraps(command)
    def run(*args: Any, quiet: bool = False, **kwargs: Any) -> None:
        as_json = kwargs.get("as_json", False) if own_json else kwargs.pop("as_json")
        with contextlib.ExitStack() as stack:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            if quiet:
                stack.enter_context(contextlib.redirect_stderr(nowhere))
                stack.enter_context(_workers_are_quiet())
            if (as_json and not own_json) or (quiet and not as_json and not is_product):
                stack.enter_context(contextlib.redirect_stdout(nowhere))
            said = command(*args, **kwargs)
        if as_json and not own_json:
            typer.echo(json.dumps(said, indent=1))

    run.__signature__ = signature.replace(parameters=[*parameters, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {**hints, **options}
    return run


@contextlib.contextmanager
def _workers_are_quiet() -> Any:
    from executor.launch import QUIET  # sockets and processes, which few commands need

    os.environ[QUIET] = "1"
    try:
        yield
    finally:
        del os.environ[QUIET]
