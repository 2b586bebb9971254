"""Files that are whole or not there, identities that follow content, and errors that name the file."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from specs.base import Document, load_document, read_json, write_whole
from specs.errors import BadInputError, NoPlanFitsError, PlaitError, TimeLimitError
from specs.presets import cluster_preset


class Note(Document):
    """A small document."""

    text: str = ""
    numbers: dict[str, int] = Field(default_factory=dict)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_write_replaces_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "note.json"
    write_whole(path, "one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert leftovers(path.parent) == []
    assert oct(path.stat().st_mode & 0o777) == "0o644"


class FullFile:
    """A file on a full disk."""

    def __init__(self, file) -> None:
        self.file = file

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, _: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_full_disk_leaves_the_old_file_and_one_sentence(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "note.json"
    write_whole(path, "the old one")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step == "write":
        real = os.fdopen
        monkeypatch.setattr(os, "fdopen", lambda handle, mode: FullFile(real(handle, mode)))
    else:
        monkeypatch.setattr(os, step, full)
    with pytest.raises(BadInputError) as caught:
        write_whole(path, "the new one")
    monkeypatch.undo()
    assert "note.json cannot be written (11 bytes): No space left on device." in str(caught.value)
    assert path.read_text() == "the old one"
    assert leftovers(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_really_full_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself says that the device is full."""
    monkeypatch.setattr("tempfile.mkstemp", lambda **_: (os.open("/dev/full", os.O_WRONLY), str(tmp_path / ".gone")))
    with pytest.raises(BadInputError, match="No space left on device"):
        write_whole(tmp_path / "note.json", "x" * 100_000)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with pytest.raises(BadInputError, match="cannot be written"):
        write_whole(tmp_path / "plain" / "note.json", "x")


def test_an_interrupt_while_writing_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "note.json", "x")
    assert list(tmp_path.iterdir()) == []


@given(st.text(), st.dictionaries(st.text(), st.integers()))
def test_identity_follows_content(text: str, numbers: dict[str, int]) -> None:
    note = Note(text=text, numbers=numbers)
    again = Note(numbers=dict(reversed(numbers.items())), text=text)
    assert note.sha256() == again.sha256()
    assert note.sha256() != Note(text=text + "!", numbers=numbers).sha256()
    assert Note.model_validate_json(note.model_dump_json()).sha256() == note.sha256()


def test_identity_is_stable_over_versions() -> None:
    """A stored hash must mean the same tomorrow."""
    assert Note(text="a").sha256() == ("ab24ac6261adc0e8cef17dfed85dd053c9656f1046afc39be735b6e0f30f95e4")


def test_a_document_loads_as_it_was_saved(tmp_path: Path) -> None:
    cluster = cluster_preset("h100x16")
    cluster.save(tmp_path / "c.json")
    assert load_document(type(cluster), tmp_path / "c.json", "cluster") == cluster


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "note n.json is not valid JSON"),
        (b'{"text": "a', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b'{"text": 3}', "text: Input should be a valid string"),
        (b'{"text": "a", "txet": 1, "x": 2}', r"Extra inputs are not permitted (1 more like it)"),
        (b'{"schema_version": 2}', "schema_version is 2, this version of plait reads 1"),
        (b"[]", "Input should be a valid dictionary"),
        (b'{"numbers": {"a": ' + b"1" * 5000 + b"}}", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_files(content: bytes, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("n.json").write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        load_document(Note, Path("n.json"), "note")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"does not exist\. Check the path"):
        read_json(tmp_path / "none.json", "plan")
    with pytest.raises(BadInputError, match="is a folder"):
        read_json(tmp_path, "plan")
    with pytest.raises(BadInputError, match="cannot be read"):
        read_json(Path("x" * 5000), "plan")


def test_every_prefix_of_a_file_is_refused(tmp_path: Path) -> None:
    """A torn copy never passes for the whole."""
    path = tmp_path / "note.json"
    Note(text="abc", numbers={"a": 1}).save(path)
    whole = path.read_bytes().rstrip()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInputError):
            load_document(Note, path, "note")


def test_exit_codes() -> None:
    codes = {error.__name__: error.exit_code for error in (BadInputError, NoPlanFitsError, TimeLimitError)}
    assert codes == {"BadInputError": 2, "NoPlanFitsError": 3, "TimeLimitError": 4}
    assert all(issubclass(error, PlaitError) for error in (BadInputError, NoPlanFitsError, TimeLimitError))


def test_saved_files_are_readable_by_people(tmp_path: Path) -> None:
    Note(text="a").save(tmp_path / "n.json")
    text = (tmp_path / "n.json").read_text()
    assert json.loads(text) == {"schema_version": 1, "text": "a", "numbers": {}}
    assert text.count("\n") > 3
