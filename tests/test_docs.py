"""The documentation holds: examples load, commands run as printed, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.core
import typer.main

import cli
from specs.base import parse
from specs.cluster import ClusterSpec
from specs.failures import FailureModel
from specs.model import ModelSpec
from specs.plan import Plan
from specs.profile import Profile
from specs.runlog import read_log

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
KINDS = {"model": ModelSpec, "cluster": ClusterSpec, "plan": Plan, "profile": Profile, "failures": FailureModel}


class Block(NamedTuple):
    """A fenced block: what stands after the fence, and its text."""

    info: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        yield Block(match[1].strip(), match[2])


EXAMPLES = [block for block in blocks(ROOT / "docs" / "files.md") if block.info.startswith("json ")]
CONSOLE = [(page, block.text) for page in PAGES for block in blocks(page) if block.info == "console"]


@pytest.mark.parametrize("block", EXAMPLES, ids=[block.info for block in EXAMPLES])
def test_file_examples_load(block: Block, tmp_path: Path) -> None:
    import json

    kind = block.info.split()[1]
    if kind == "runlog":
        (tmp_path / "log.jsonl").write_text(block.text)
        kinds = [record.kind for record in read_log(tmp_path / "log.jsonl")]
        assert kinds == ["start", "step", "memory", "checkpoint", "end"]
    else:
        parse(KINDS[kind], json.loads(block.text), kind)


def test_every_kind_of_file_has_an_example() -> None:
    assert {block.info.split()[1] for block in EXAMPLES} == {*KINDS, "runlog"}


def without_decimals(text: str) -> str:
    """Predictions change when a model improves; what is said about them does not."""
    return re.sub(r"\d+\.\d+", "#", text).strip()


@pytest.mark.parametrize(("page", "text"), CONSOLE, ids=[text.splitlines()[0][2:60] for _, text in CONSOLE])
def test_console_examples_print_what_is_shown(page: Path, text: str, tmp_path: Path) -> None:
    """`$ command`, its output, and `exit code N` where that is not 0."""
    command, *shown = text.rstrip("\n").splitlines()
    code = 0
    if shown and shown[-1].startswith("exit code "):
        code = int(shown.pop().removeprefix("exit code "))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", command.removeprefix("$ ")],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert without_decimals(result.stdout + result.stderr) == without_decimals("\n".join(shown)), page.name
    assert result.returncode == code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name}: {target}"
        assert not heading or heading in headings(path), f"{page.name}: {target}#{heading}"


def headings(page: Path) -> set[str]:
    """Of a page, as they are named in links: small letters, hyphens for blanks, no other signs."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-") for text in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    known = set(typer.main.get_command(cli.app).commands)
    known |= {"--help", "--version", "--install-completion", "--show-completion"}
    used = set(re.findall(r"(?:`|bin/|^\s{4}|^\$ )plait ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert used <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"plait ([a-z-]+ [^`\n]*)", text):
        commands = typer.main.get_command(cli.app).commands
        name, *words = line.split()
        if name in commands and isinstance(commands[name], typer.core.TyperGroup):  # a command of a group
            commands, name = commands[name].commands, words.pop(0)
        if name in commands:
            known = {option for parameter in commands[name].params for option in parameter.opts} | {"--help"}
            used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            assert used <= known, line


def test_exit_codes_are_documented() -> None:
    from specs.errors import PlaitError

    table = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert {kind.exit_code for kind in PlaitError.__subclasses__()} | {0, 1, 130} == documented


def test_the_file_tree_is_up_to_date() -> None:
    """`python docs/tree.py` writes it anew."""
    space: dict[str, object] = {"__file__": str(ROOT / "docs" / "tree.py"), "__name__": "tree"}
    exec((ROOT / "docs" / "tree.py").read_text(encoding="utf-8"), space)
    page = space["page"]
    assert callable(page)
    assert (ROOT / "docs" / "tree.md").read_text(encoding="utf-8") == page()


def test_the_figure_is_what_its_script_draws(tmp_path: Path) -> None:
    """Up to matplotlib's version: same texts in the same order."""
    script = (ROOT / "docs" / "figures" / "token_contiguous.py").read_text(encoding="utf-8")
    copy = tmp_path / "token_contiguous.py"
    copy.write_text(script)
    subprocess.run([sys.executable, str(copy)], check=True, timeout=60)

    def texts(path: Path) -> list[str]:
        return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))

    drawn = texts(tmp_path / "token_contiguous.svg")
    assert drawn == texts(ROOT / "docs" / "figures" / "token_contiguous.svg")
    assert "attention: 4 + 3" in drawn
