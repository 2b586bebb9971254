"""Any damage to any file is accepted or refused with a sentence: no crash, no hang, nothing written elsewhere.

10,000 damaged files are read as commands read them, and some are given to a command; hypothesis looks for more,
and makes small what it finds.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import cli
from specs.base import Document, load_document, parse_document
from specs.cluster import ClusterSpec
from specs.errors import BadInputError, PlaitError
from specs.model import ModelSpec
from specs.plan import Plan
from specs.presets import cluster_preset, model_preset
from specs.profile import Profile
from specs.tensors import num_parameters
from tests import runs
from tests.test_docs import EXAMPLES

PROFILE = next(json.loads(block.text) for block in EXAMPLES if block.info == "json profile")
DOCUMENTS: dict[str, tuple[type[Document], Any]] = {
    "plan": (Plan, runs.plan().model_dump(mode="json")),
    "model": (ModelSpec, model_preset("demo").model_dump(mode="json")),
    "cluster": (ClusterSpec, cluster_preset("gb200x100").model_dump(mode="json")),
    "profile": (Profile, PROFILE),
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -1, 2, 3, 7, 10**6, 10**9, 10**18, 10**40, -(10**40)])
    | st.integers(-3, 300)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["mlp", "attention", "moe", "layer.0.mlp", "head", "H100", "scale_up", "full", "1f1b"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all nodes below the root."""
    found: list[tuple[Any, ...]] = []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        found += [(*path, key), *places(value, (*path, key))]
    return found


def damage(document: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    """A copy with one node replaced, removed, doubled or renamed."""
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    last = path[-1]
    match how:
        case "remove":
            del parent[last]
        case "double" if isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        case "rename" if isinstance(parent, dict):
            parent[f"{last}x"] = parent.pop(last)
        case _:
            parent[last] = value
    return changed


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=100, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_documents(name: str, data: st.DataObject) -> None:
    kind, document = DOCUMENTS[name]
    for _ in range(data.draw(st.integers(1, 3))):
        paths = places(document)
        if not paths:
            break
        path = data.draw(st.sampled_from(paths))
        how = data.draw(st.sampled_from(["replace", "replace", "remove", "double", "rename"]))
        document = damage(document, path, how, data.draw(VALUES))
    with contextlib.suppress(BadInputError):
        use(parse_document(kind, document, f"{name} x.json"))


def use(document: Document) -> None:
    """What every command does with an accepted file."""
    document.sha256()
    match document:
        case ModelSpec():
            num_parameters(document.modules())
        case ClusterSpec():
            document.ranks()
            document.node_starts()
        case Plan():
            modules = dict(document.model.modules())
            for pipeline in document.pipelines:
                for stage in pipeline.stages:
                    for placement in stage.modules:
                        for rank in range(stage.num_ranks):
                            placement.units_of(rank, modules[placement.module])


def test_undamaged_documents_are_accepted() -> None:
    for kind, document in DOCUMENTS.values():
        use(parse_document(kind, document, "x"))


NUM_FILES = 10_000
PER_COMMAND = 50  # every so many files also go through the command line
PER_ACCEPTED = 25  # and of the accepted ones more
SLOWEST_SECONDS = 20.0


def damaged_text(rng: random.Random, document: Any, values: list[Any]) -> bytes:
    """Half of the files are damaged as documents, half (or those again) as text."""
    text = document
    if rng.random() < 0.6:
        for _ in range(rng.randint(1, 3)):
            paths = places(text)
            if paths:
                how = rng.choice(["replace", "replace", "remove", "double", "rename"])
                text = damage(text, rng.choice(paths), how, rng.choice(values))
    raw = bytearray(json.dumps(text).encode())
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw) + 1)
            match rng.randrange(5):
                case 0:
                    del raw[at : at + rng.randint(1, 40)]
                case 1:
                    raw[at:at] = rng.randbytes(rng.randint(1, 8))
                case 2:
                    raw[at:at] = raw[: rng.randint(0, 60)]
                case 3:
                    raw = raw[:at]
                case 4:
                    raw[at : at + 1] = rng.choice([b"9", b"-", b"e9", b"0", b'"', b"]", b"NaN", b"\xff", b"\x00"])
    return bytes(raw)


SIZES = ["--global-batch", "8", "--seq-len", "64", "--time-limit", "0.5", "-o", "out"]
COMMANDS = {
    "plan": (
        ["estimate", "in.json"],
        ["explain", "in.json"],
        ["diff", "in.json", "in.json"],
        ["export", "in.json", "--to", "slurm", "-o", "out"],
        ["export", "in.json", "--to", "megatron", "-o", "out"],
    ),
    "model": (["plan", "--model", "in.json", "--cluster", "h100x2", *SIZES],),
    "cluster": (["plan", "--model", "tiny", "--cluster", "in.json", *SIZES],),
    "profile": (["plan", "--model", "tiny", "--profile", "in.json", *SIZES],),
}


@contextlib.contextmanager
def alarm(what: str) -> Iterator[None]:
    """Fail where something takes too long."""

    def ring(signum: int, frame: object) -> None:  # noqa: ARG001
        raise TimeoutError(f"{what} took more than {SLOWEST_SECONDS} s")

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SLOWEST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_ten_thousand_damaged_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read, or refused in one sentence that names the file."""
    kind, document = DOCUMENTS[name]
    rng = random.Random(name)
    values = [
        None,
        True,
        0,
        1,
        -1,
        3,
        10**6,
        10**18,
        10**40,
        0.5,
        -1e308,
        "",
        "mlp",
        "H100",
        "\u0000",
        [],
        [1],
        {},
        {"a": 1},
    ]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "in.json"
    accepted = 0
    for number in range(NUM_FILES // len(DOCUMENTS)):
        path.write_bytes(damaged_text(rng, document, values))
        with alarm(f"{name} {number}"):
            said = read(kind, path, name)
            accepted += said == ""
            if number % PER_COMMAND == 0 or (said == "" and accepted % PER_ACCEPTED == 0):
                through_the_command_line(rng.choice(COMMANDS[name]), tmp_path)
        assert said == "" or ("in.json" in said and said.endswith((".", "?"))), said
    assert accepted > 20, "files that are damaged beyond reading test only the reader"


def read(kind: type[Document], path: Path, name: str) -> str:
    """Why a file is refused; empty when it is accepted."""
    try:
        use(load_document(kind, path, name))
    except BadInputError as error:
        return str(error)
    return ""


def through_the_command_line(words: list[str], folder: Path) -> None:
    """It ends with one of the documented codes, and writes the output or nothing."""
    result = CliRunner().invoke(cli.app, words)
    problem = result.exception
    assert problem is None or isinstance(problem, (PlaitError, SystemExit)), repr(problem)
    if isinstance(problem, PlaitError):
        assert str(problem).endswith((".", "?"))
        assert "\n" not in str(problem)
    assert {entry.name for entry in folder.iterdir()} <= {"in.json", "out"}
    (folder / "out").unlink(missing_ok=True)
