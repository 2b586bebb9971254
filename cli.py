"""The command line: its commands (one file each in `commands`), its errors and exit codes."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Annotated, Any


def _quit(signum: int, frame: object) -> None:  # noqa: ARG001
    os.write(2, b"plait: interrupted.\n")
    os._exit(130)


# The command's own process: `plait` or `python -m cli`.
IS_OWN = os.path.basename(sys.argv[0]) in ("plait", "cli.py")

# Ctrl-C while the imports below run, before `main` can catch it.
if IS_OWN:
    signal.signal(signal.SIGINT, _quit)

import typer  # noqa: E402
import typer.core  # noqa: E402

from commands.output import with_output  # noqa: E402
from specs.errors import PlaitError  # noqa: E402

# A wrong option or argument.  The public name for it is that of its subclass.
USAGE_ERROR: Any = typer.BadParameter.__base__


class _InOrder(typer.core.TyperGroup):
    """Help lists the commands as they are registered: the main job first."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(self.commands)


app = typer.Typer(
    name="plait",
    cls=_InOrder,
    help="Plan, run and keep running the parallel layout that delivers the most goodput on your cluster.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"plait {version('plait')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


# The file and function of each command, in the order of help.
COMMANDS = {
    "profile": "profile",
    "plan": "plan",
    "train": "train",
    "chaos": "chaos",
    "compare": "compare",
    "diff": "diff",
    "dry-run": "dry_run",
    "estimate": "estimate",
    "eval": "evaluate",
    "explain": "explain",
    "export": "export",
    "export-weights": "export_weights",
    "fit-failures": "fit_failures",
    "generate": "generate",
    "import": "import_",
    "report": "report",
    "schema": "schema",
    "simulate": "simulate",
    "sweep": "sweep",
    "trace": "trace",
    "validate": "validate",
}

# Commands whose output is what was asked for: it is printed when quiet, too.
PRODUCT = ("export", "generate", "schema")

# Commands that leave nothing to others when they are done: their process ends without taking millions of objects apart
# one by one, a tenth of a second of planning.
LEAVES_NOTHING = ("plan", "sweep")

# The command that is asked for is the only one whose file its process needs; help and mistakes need them all.
asked = sys.argv[1] if IS_OWN and len(sys.argv) > 1 and sys.argv[1] in COMMANDS else None
for command, module in COMMANDS.items():
    if asked not in (None, command):
        continue
    entry = getattr(importlib.import_module(f"commands.{module}"), module)
    if isinstance(entry, typer.Typer):  # a group of commands
        for part in entry.registered_commands:
            part.callback = with_output(part.callback) if part.callback else None
        app.add_typer(entry, name=command)
    else:
        app.command(name=command)(with_output(entry, is_product=module in PRODUCT))


def main() -> None:
    """Entry point: a user's mistake ends in one sentence and its exit code, Ctrl-C in 130, a bug in a traceback."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = app(prog_name="plait", standalone_mode=False)
        if code == 130:  # typer made an exit of an interrupt
            raise KeyboardInterrupt
        if asked in LEAVES_NOTHING and not code:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        sys.exit(code)
    except PlaitError as error:
        typer.echo(f"plait: {error}", err=True)
        sys.exit(error.exit_code)
    except USAGE_ERROR as error:
        sentence = " ".join(error.format_message().replace("Value error, ", "").split())
        if sentence:  # empty: no command was given, and the help is already printed
            command = error.ctx.command_path if error.ctx else "plait"
            stop = "" if sentence.endswith((".", "?")) else "."
            typer.echo(f"plait: {sentence}{stop} See `{command} --help`.", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("plait: interrupted.", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
