"""The command line as a person meets it: every command and option explains itself, within 80 columns, at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import cli

GROUP: Any = typer.main.get_command(cli.app)
COMMANDS: dict[str, Any] = GROUP.commands
PLAIT = Path(sys.executable).with_name("plait")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_option_explains_itself(name: str) -> None:
    command = COMMANDS[name]
    assert command.help, "the function needs a docstring"
    assert command.help.splitlines()[0].endswith((".", "?"))
    for parameter in command.params:
        if parameter.name != "help":
            assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS)])
def test_help_fits_80_columns(name: str) -> None:
    arguments = [*name.split(), "--help"]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "Usage" in result.stdout


def test_options_are_spelled_alike() -> None:
    """Words are joined by hyphens, and JSON is asked for in one way."""
    for name, command in COMMANDS.items():
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        assert not [option for option in options if "_" in option], name
        assert not [option for option in options if "json" in option and option != "--json"], name


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS)])
def test_help_is_quick_and_imports_no_torch(name: str) -> None:
    arguments = [*name.split(), "--help"]
    code = (
        f"import sys, cli\nsys.argv = ['plait', *{arguments!r}]\n"
        "try:\n    cli.main()\nexcept SystemExit as done:\n    assert not done.code\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    begin = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(cli.__file__).parent,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert result.returncode == 0, result.stderr
    # Under a second by itself; the machine may be busy with other tests.
    assert time.perf_counter() - begin < 10.0


def test_version() -> None:
    result = subprocess.run([str(PLAIT), "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith("plait 0.")


def test_a_closed_pipe_is_no_error() -> None:
    result = subprocess.run(
        ["bash", "-c", f"{PLAIT} schema plan | head -1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout == "{\n"
    assert "Traceback" not in result.stderr
