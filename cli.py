"""The command line: parse, call, print.  Every command imports what it needs when it runs."""

from __future__ import annotations

import sys

import typer

from specs.errors import PlaitError

app = typer.Typer(
    name="plait",
    help="Plan, run and keep running the parallel layout that delivers the most goodput on your cluster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point: a user's mistake ends in one sentence and its exit code, Ctrl-C in 130, a bug in a traceback."""
    try:
        app()
    except PlaitError as error:
        typer.echo(f"plait: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("plait: interrupted.", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
