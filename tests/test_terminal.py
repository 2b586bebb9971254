"""What commands print: within 80 columns, nothing when quiet, JSON when asked, completion for shells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner, Result

import cli
from tests import runs
from tests.test_report import priced

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--model", "gpt2", "--cluster", "h100x8", "--global-batch", "64", "--seq-len", "512", "--time-limit", "5")
# One of every command that needs no worker, with the files it needs.
COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": ("plan", *SMALL),
    "plan large": (
        "plan",
        "--model",
        "mixtral-8x7b",
        "--cluster",
        "h100x64",
        "--global-batch",
        "512",
        "--seq-len",
        "4096",
    ),
    "estimate": ("estimate", "plan.json"),
    "explain": ("explain", "plan.json"),
    "diff": ("diff", "plan.json", "other.json"),
    "simulate": ("simulate", "plan.json", "--policy", "all", "--trials", "2"),
    "sweep": ("sweep", "--model", "gpt2", "--clusters", "h100x8,h200x8", "--global-batch", "64", "--seq-len", "512"),
    "compare": ("compare", "run"),
    "fit-failures": ("fit-failures", "incidents.csv", "--devices", "1024", "--days", "30"),
    "validate": ("validate", str(ROOT / "benchmarks" / "data" / "published_runs.csv")),
}
WITH_JSON = [name for name in COMMANDS if name != "plan large"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two plans, a run and a list of incidents."""
    folder = tmp_path_factory.mktemp("terminal")
    for name, batch in (("plan", "64"), ("other", "128")):
        words = [*COMMANDS["plan"], "-o", str(folder / f"{name}.json")]
        words[words.index("64")] = batch
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 0, result.output
    runs.write(folder / "run", runs.whole_run(), of=priced(runs.plan()))
    (folder / "incidents.csv").write_text("class,repair_hours\ngpu,2\ngpu,30\nhost,4\n")
    return folder


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(cli.app, [*COMMANDS[name], *options])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("name", COMMANDS)
def test_tables_fit_80_columns(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(name, folder, monkeypatch)
    assert result.stdout.strip()
    for line in result.stdout.splitlines():
        assert len(line.rstrip()) <= 80, line
        assert "…" not in line, "something is cut off"
        assert "\x1b" not in line, "colour, and no terminal"


@pytest.mark.parametrize("name", WITH_JSON)
def test_json_is_all_that_is_printed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(run(name, folder, monkeypatch, "--json").stdout)
    assert found
    again = json.loads(run(name, folder, monkeypatch, "--json", "--quiet").stdout)
    assert list(again) == list(found) if isinstance(found, dict) else len(again) == len(found)


@pytest.mark.parametrize("name", WITH_JSON)
def test_quiet_prints_nothing(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(name, folder, monkeypatch, "--quiet").output == ""


def test_every_command_can_be_quiet() -> None:
    """Apart from those whose output is what was asked for."""
    for name, command in typer.main.get_command(cli.app).commands.items():
        for part in getattr(command, "commands", {"": command}).values():
            options = {option for parameter in part.params for option in parameter.opts}
            assert "--quiet" in options or name in ("generate", "schema"), name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_commands(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {
        "bash": {"COMP_WORDS": "plait ex", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "plait ex"},
        "fish": {"_TYPER_COMPLETE_ARGS": "plait ex", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    for name, value in {**words[shell], "_PLAIT_COMPLETE": f"complete_{shell}"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(cli.app, prog_name="plait")
    for command in ("explain", "export", "export-weights"):
        assert command in result.output
    assert "simulate" not in result.output
