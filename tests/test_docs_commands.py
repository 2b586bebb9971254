"""Every command in the documentation runs, with its own options: small models, short runs, invented input files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner, Result

import cli
from specs.presets import cluster_preset, model_preset
from tests import plans, runs
from tests.test_docs import PAGES, blocks
from tests.test_import import LLAMA, TWO_NODES, json_output, put, table
from tests.test_report import priced

# Commands that start workers, or need what they made.
WORKERS = ("profile", "train", "generate", "eval", "export-weights")
# What the documentation calls a user's own things, by what is there in the tests.
NAMES = {"RUN": "runs/first", "FOLDER": "OUT", "openelm-3b": "openelm.json", "$NODE": "0", "$HEAD": "127.0.0.1"}
# Sizes of real jobs, by what one process of this machine does in seconds.
SMALL = {
    "--nnodes": "1",
    "--model": "tiny",
    "--steps": "5",
    "--seq-len": "64",
    "--global-batch": "8",
    "--max-tokens": "2",
}


class Command(NamedTuple):
    page: str
    words: tuple[str, ...]

    @property
    def shape(self) -> tuple[str, ...]:
        """The command and its options: two that differ in values only are one."""
        options = sorted(word for word in self.words if word.startswith("-"))
        positions = sum(not word.startswith("-") for word in self.words[:3])
        return (self.words[0], *options, str(positions))


def commands_of(page: Path) -> list[Command]:
    """Lines of indented or fenced code that call plait, by torchrun too.  Remarks after two spaces or a # are cut."""
    shown = {line[2:] for block in blocks(page) if block.info == "console" for line in block.text.splitlines()}
    found = []
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        match = re.match(r"^(?:    |\$ )(?:\w+=\S+; )*(?:(?:\.venv/bin/)?plait|torchrun .* -m cli)\s+([a-z].*)$", line)
        if match is None or line[2:] in shown:
            continue
        text = re.sub(r"^(\S+(?: nccl-tests| topo| config)?)\s+", r"\1 ", match[1])
        text = re.split(r"\s+#|\s{2,}(?=[^-\s])", text)[0]
        found.append(Command(page.name, tuple(shlex.split(text))))
    return found


COMMANDS = list({command.shape: command for page in PAGES for command in commands_of(page)}.values())


def test_there_are_commands() -> None:
    assert {"plan", "train", "profile", "compare", "export", "report"} <= {command.words[0] for command in COMMANDS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the commands name: plans, a profile, a run, lists of incidents, texts, a tokenizer."""
    folder = tmp_path_factory.mktemp("docs")
    gpt2 = plans.plan(
        ranks=2, degree=1, replicas=4, model=model_preset("gpt2"), on=cluster_preset("h100x8"), seq_len=512
    )
    for name in ("plan.json", "a.json", "b.json", "other.json"):
        priced(gpt2).save(folder / name)
    runs.write(folder / "runs" / "first", runs.whole_run(), of=priced(runs.plan()))
    (folder / "incidents.csv").write_text("class,repair_hours\ngpu,2\ngpu,30\nhost,4\n")
    openelm = model_preset("openelm-3b")  # every layer of it is unlike the others; a few of them are enough here
    openelm.model_copy(update={"layers": openelm.layers[:6]}).save(folder / "openelm.json")
    put(folder, "all_reduce.txt", TWO_NODES)
    put(folder, "gather.json", json_output())
    put(folder, "topo.txt", table("NV18", cards=8))
    (folder / "path" / "to" / "model").mkdir(parents=True)
    put(folder / "path" / "to" / "model", "config.json", LLAMA)
    for name in ("benchmarks", "examples"):
        (folder / name).symlink_to(Path(__file__).resolve().parents[1] / name)
    return folder


def invoke(words: list[str], expected: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, words)
    code = getattr(result.exception, "exit_code", result.exit_code)
    assert code == expected, f"plait {shlex.join(words)}: {result.exception} {result.output}"
    return result


def with_workers(command: Command) -> bool:
    return command.words[0] in WORKERS or "--profile" in command.words


def is_covered(command: Command) -> bool:
    """By another line of the same command that names all of its options and more."""
    own = set(command.shape[1:-1])
    return any(own < set(other.shape[1:-1]) for other in COMMANDS if same_start(command, other))


def same_start(one: Command, other: Command) -> bool:
    return (one.shape[0], one.shape[-1]) == (other.shape[0], other.shape[-1])


IN_PROCESS = [command for command in COMMANDS if not with_workers(command)]
SLOW = [command for command in COMMANDS if with_workers(command) and not is_covered(command)]


@pytest.mark.parametrize("command", IN_PROCESS, ids=lambda command: f"{command.page} {' '.join(command.words)}"[:60])
def test_the_command_runs(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = [NAMES.get(word, word) for word in command.words]
    if words[0] == "plan" and not {"--freedom", "--pin", "--plot"} & set(words):
        words += ["--freedom", "uniform"]  # the search with every freedom has tests of its own
    if words[0] in ("plan", "sweep"):
        words = [re.sub(r"^(h100x\d+),.*", r"\1,h200x8", word) for word in words] + ["--time-limit", "5"]
    if words[0] == "simulate":
        words += ["--trials", "2"]
    if "--failures" in words:
        invoke(["fit-failures", "incidents.csv", "--devices", "512", "--days", "60", "-o", "failures.json"])
    too_large = "llama-3-405b" in words and "h100x8" in words
    invoke(words, expected=3 if too_large else 0)


@pytest.mark.gloo
def test_commands_with_workers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other in one folder, as a user does: profile, plan, train, look, take the weights along."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for name in ("corpus/one.txt", "other.txt"):
        (tmp_path / name).write_text("It was the best of times, it was the worst of times.\n" * 4000)
    (tmp_path / "corpus.jsonl").write_text('{"text": "It was the best of times."}\n' * 4000)
    save_tokenizer(tmp_path / "tokenizer.json")
    order = ("profile", "plan", "estimate", "train", "export-weights")
    ranked = sorted(SLOW, key=lambda command: (*order, command.words[0]).index(command.words[0]))
    for number, command in enumerate(sorted(ranked, key=lambda command: "FOLDER" in command.words)):
        words = [NAMES.get(word, word) for word in command.words]
        for option, value in SMALL.items():
            if option in words:
                words[words.index(option) + 1] = value
        if words[0] == "profile":
            words += ["--nproc", "1", "--rounds", "1", "--steps", "1", "--block-sequences", "1,2,4,8"]
        if words[0] == "train":
            words += [] if "--steps" in words else ["--steps", "5"]
            at = words.index("--out") + 1
            words[at] = words[at] if not Path(words[at]).exists() else f"runs/{number}"
        if words[0] in ("report", "simulate"):
            words += ["--trials", "2"]
        if words[0] in WORKERS and "--json" not in words:
            words.append("--json")
        result = invoke(words)
        assert words[0] not in WORKERS or json.loads(result.stdout)


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE(unk_token="?"))
    tokenizer.pre_tokenizer = ByteLevel()
    texts = ["It was the best of times, it was the worst of times. Once upon a time, red."]
    tokenizer.train_from_iterator(texts, BpeTrainer(vocab_size=80, special_tokens=["?"]))
    tokenizer.save(str(path))
