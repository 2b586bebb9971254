"""Commands of the documentation beside `plait`: scripts take the options that are shown, targets and files are there.

Those that take hours, GPUs or root are begun as they are written and stopped once their options are read.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.test_docs import PAGES, ROOT

# What is there is what was done on a day, with the scripts of that day.
RECORDS = ("LOG.md", "CHANGELOG.md")
PROGRAMS = ("make", "python", "torchrun", "pytest", "pip", "pre-commit", ".ci/run")


def lines() -> set[tuple[str, ...]]:
    """Words of every command line in indented code or in a code span that begins with one of the programs."""
    found = set()
    for page in PAGES:
        if page.name in RECORDS:
            continue
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        indented = [re.split(r"\s{2,}|\s#", line.strip())[0] for line in re.findall(r"^    .+$", text, re.MULTILINE)]
        for line in (*indented, *re.findall(r"`([^`\n]+)`", text)):
            line = re.sub(r"^(?:sudo )?(?:\w+=\S+;? )*(?:\.venv/bin/)?", "", line)
            if line.split(" ")[0] in PROGRAMS:
                found.add(tuple(shlex.split(line.split(" > ")[0])))
    return found


LINES = sorted(lines())


def of(program: str) -> list[tuple[str, ...]]:
    return [words[1:] for words in LINES if words[0] == program and len(words) > 1]


def test_every_kind_is_found() -> None:
    assert {words[0] for words in LINES} == set(PROGRAMS)
    assert len(of("python")) > 10


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("words", of("make"), ids=" ".join)
def test_make_knows_the_target(words: tuple[str, ...]) -> None:
    """Without doing it."""
    result = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


class ParsedError(Exception):
    """The script has read its options, and would begin."""


@pytest.mark.parametrize("words", [words for words in of("python") if "pytest" not in words], ids=" ".join)
def test_the_script_takes_its_options(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    is_module = words[0] == "-m"
    name, *options = words[1:] if is_module else words
    options = [option for option in options if not option.isupper()]  # the reader's own
    path = ROOT / (name if not is_module else name.replace(".", "/") + ".py")
    path = path if path.exists() else path.with_suffix("") / "__main__.py"
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *args: object) -> None:
        parse(parser, *args)  # type: ignore[call-overload]
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [str(path), *options])
    has_options = "ArgumentParser" in path.read_text(encoding="utf-8")
    try:
        runpy.run_path(str(path), run_name="__main__" if has_options else "imported")
    except ParsedError:
        return
    assert not has_options
    assert not options, "it reads none"


def test_torchrun_takes_its_options() -> None:
    from torch.distributed.run import get_args_parser

    for words in of("torchrun"):
        found = get_args_parser().parse_args([word.replace("$NODE", "0") for word in words])
        assert (found.module, found.training_script) == (True, "cli")


def test_the_tests_that_are_named_exist() -> None:
    for words in [*of("pytest"), *(words[2:] for words in of("python") if "pytest" in words)]:
        for number, word in enumerate(words):
            if word.startswith("tests/"):
                assert (ROOT / word).is_file(), word
            if word == "-k":
                assert words[number + 1] in (ROOT / words[0]).read_text(encoding="utf-8")


def test_what_is_installed_beside_exists() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for words in of("pip"):
        for extra in re.findall(r"plait\[(\w+)\]", " ".join(words)):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
    assert '"pre-commit' in project
    assert (ROOT / ".pre-commit-config.yaml").is_file()


def test_continuous_integration_can_begin() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    for target in re.findall(r"^make .*?([a-z]+)$", script.read_text(encoding="utf-8"), re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target
