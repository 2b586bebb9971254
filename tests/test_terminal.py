"""What commands print: within 80 columns, nothing when quiet, JSON when asked, completion for shells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner, Result

import cli
from tests import runs
from tests.test_import import LLAMA, TWO_NODES, put, table
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
        "--freedom",
        "uniform",
    ),
    "estimate": ("estimate", "plan.json"),
    "explain": ("explain", "plan.json"),
    "dry-run": ("dry-run", "run/plan.json", "--rank", "0"),
    "diff": ("diff", "plan.json", "other.json"),
    "simulate": ("simulate", "plan.json", "--policy", "all", "--trials", "2"),
    "sweep": ("sweep", "--model", "gpt2", "--clusters", "h100x2,h100x4", "--global-batch", "64", "--seq-len", "512"),
    "compare": ("compare", "run"),
    "fit-failures": ("fit-failures", "incidents.csv", "--devices", "1024", "--days", "30"),
    "validate": ("validate", str(ROOT / "benchmarks" / "data" / "published_runs.csv")),
    "report": ("report", "plan.json", "--trials", "2"),
    "trace": ("trace", "plan.json"),
    "export": ("export", "plan.json", "--to", "slurm", "-o", "job.sh"),
    "export printed": ("export", "plan.json", "--to", "torchrun"),
    "schema": ("schema", "plan"),
    "import": ("import", "nccl-tests", "all_reduce.txt", "--cluster", "h100x64", "-o", "cluster.json"),
    "import topo": ("import", "topo", "topo.txt", "--device", "h100", "-o", "cluster.json"),
    "import config": ("import", "config", "config.json", "-o", "model.json"),
}
LARGE = "plan large"
SLOW = ("plan", "explain", "sweep", "dry-run")  # the option is one for all
# Their output is what was asked for, whatever its width; quiet, it is all that is left.
PRODUCTS = ("export printed", "schema")
# Commands that start workers or need a run with weights; `tests.test_docs_commands` runs them, with --json too.
WITH_WORKERS = {"profile", "train", "chaos", "eval", "generate", "export-weights"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two plans, a run, and what other tools wrote."""
    folder = tmp_path_factory.mktemp("terminal")
    for name, batch in (("plan", "64"), ("other", "128")):
        words = [*COMMANDS["plan"], "-o", str(folder / f"{name}.json")]
        words[words.index("64")] = batch
        words += ["--freedom", "uniform"] if name == "other" else []
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 0, result.output
    runs.write(folder / "run", runs.whole_run(), of=priced(runs.plan()))
    (folder / "incidents.csv").write_text("class,repair_hours\ngpu,2\ngpu,30\nhost,4\n")
    put(folder, "all_reduce.txt", TWO_NODES)
    put(folder, "topo.txt", table("NV18", cards=8))
    put(folder, "config.json", LLAMA)
    return folder


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(cli.app, [*COMMANDS[name], *options])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in PRODUCTS])
def test_tables_fit_80_columns(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(name, folder, monkeypatch)
    assert result.output.strip()
    for line in result.stdout.splitlines():
        assert len(line.rstrip()) <= 80, line
        assert "…" not in line, "something is cut off"
        assert "\x1b" not in line, "colour, and no terminal"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != LARGE])
def test_json_is_all_that_is_printed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = COMMANDS[name]
    """Quiet, nothing is on standard error either."""
    found = json.loads(run(name, folder, monkeypatch, "--json", "--quiet").output)
    assert found
    if "-o" in words:
        assert found["wrote"] == words[words.index("-o") + 1]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in (LARGE, *SLOW, *PRODUCTS)])
def test_quiet_prints_nothing(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(name, folder, monkeypatch, "--quiet").output == ""


@pytest.mark.parametrize("name", ["estimate", "export", *PRODUCTS])
def test_quiet_leaves_what_was_asked_for(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--json",) if name not in PRODUCTS else ()
    loud, quiet = run(name, folder, monkeypatch, *asked), run(name, folder, monkeypatch, *asked, "--quiet")
    assert quiet.output == loud.stdout != ""


def test_every_command_has_both_and_is_tried() -> None:
    """Of those above, or with workers; a command that is new is here, or this fails."""
    commands = typer.main.get_command(cli.app).commands
    assert set(commands) == {words[0] for words in COMMANDS.values()} | WITH_WORKERS
    for name, command in commands.items():
        for part in getattr(command, "commands", {"": command}).values():
            options = [option for parameter in part.params for option in parameter.opts]
            assert options.count("--quiet") == options.count("-q") == options.count("--json") == 1, name


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
