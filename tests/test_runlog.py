"""Run logs: every record survives, a torn end is dropped, any other damage is named by its line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from specs.errors import BadInputError
from specs.runlog import CheckpointRecord, EvaluationRecord, Record, read_log
from tests import runs


def every_kind() -> list[Record]:
    return [
        *runs.whole_run()[:3],
        runs.memory(),
        CheckpointRecord(time=1.0, step=2, path="c", size_bytes=3, seconds=0.1),
        EvaluationRecord(time=1.0, step=2, loss=3.0, tokens=4, seconds=0.2),
        runs.end(2.0, step=2, startup=1.0, in_steps=1.0),
    ]


def log(folder: Path, text: str) -> Path:
    path = folder / "log.jsonl"
    path.write_text(text)
    return path


def test_every_record_survives(tmp_path: Path) -> None:
    folder = runs.write(tmp_path, every_kind())
    assert read_log(folder / "log.jsonl") == every_kind()


def test_a_log_cut_anywhere_loses_only_its_end(tmp_path: Path) -> None:
    lines = [record.model_dump_json() + "\n" for record in every_kind()]
    text = "".join(lines)
    whole = [sum(map(len, lines[: number + 1])) for number in range(len(lines))]
    for length in sorted({*range(0, len(text), 9), *whole, *(end - 1 for end in whole), *(end - 2 for end in whole)}):
        # A line is whole once its last character is there, with or without the line's end.
        expected = sum(end - 1 <= length for end in whole)
        assert read_log(log(tmp_path, text[:length])) == every_kind()[:expected]


def test_a_diverged_run_can_be_read(tmp_path: Path) -> None:
    step = runs.steps(0.0, [1])[0].model_copy(update={"loss": math.nan, "gradient_norm": math.inf})
    found = read_log(runs.write(tmp_path, [step]) / "log.jsonl")
    assert math.isnan(found[0].loss)
    assert found[0].gradient_norm == math.inf


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("{", "line 2 is not valid JSON"),
        ('{"kind": "stop"}', "line 2: Input tag 'stop' found using 'kind' does not match"),
        ('{"kind": "evaluation", "time": 1, "step": -1, "loss": 2, "tokens": 3, "seconds": 1}', "line 2: "),
        ("[]", "line 2: "),
        ("", "line 2 is not valid JSON"),
    ],
)
def test_damage_inside_is_named(bad: str, expected: str, tmp_path: Path) -> None:
    line = runs.start(1.0).model_dump_json()
    with pytest.raises(BadInputError) as caught:
        read_log(log(tmp_path, f"{line}\n{bad}\n{line}\n"))
    assert expected in str(caught.value)


def test_a_folder_without_a_log(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"cannot be read: No such file or directory\. Is this a run folder"):
        read_log(tmp_path / "log.jsonl")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b"\xff\xfe\n{}\n")
    with pytest.raises(BadInputError, match=r"log\.jsonl, line 1 is not valid JSON"):
        read_log(tmp_path / "log.jsonl")


def test_line_separators_inside_strings_do_not_split_lines(tmp_path: Path) -> None:
    record = CheckpointRecord(time=1.0, step=2, path="a\u2028b\x85c", size_bytes=3, seconds=0.1)
    assert read_log(runs.write(tmp_path, [record]) / "log.jsonl") == [record]
