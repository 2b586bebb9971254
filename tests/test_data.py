"""From text to samples: order fixed by seed and step, held-out text apart, bad corpora refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.data import Samples, documents, prepare
from specs.errors import BadInputError


def _prepare(
    source: Path | str, folder: Path, *, vocab: int = 256, seq_len: int = 8, tokenizer: Path | None = None
) -> None:
    prepare(str(source), folder, vocab=vocab, seq_len=seq_len, tokenizer=tokenizer)


def test_samples_do_not_depend_on_how_they_are_asked_for(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(1000, dtype=np.int32))
    samples = Samples(tmp_path / "t.npy", seq_len=10, global_batch=6, seed=3)
    whole = samples.sequences(4, 0, 6)
    again = Samples(tmp_path / "t.npy", seq_len=10, global_batch=6, seed=3)
    parts = torch.cat([again.sequences(4, first, count) for first, count in ((0, 1), (1, 3), (4, 2))])
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, Samples(tmp_path / "t.npy", seq_len=10, global_batch=6, seed=4).sequences(4, 0, 6))


def test_every_window_comes_once_per_pass(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(121, dtype=np.int32))
    samples = Samples(tmp_path / "t.npy", seq_len=10, global_batch=4, seed=0)
    assert samples.num_windows == 12
    starts = torch.cat([samples.sequences(step, 0, 4)[:, 0] for step in (1, 2, 3)])
    assert sorted(starts.tolist()) == list(range(0, 120, 10))
    second_pass = torch.cat([samples.sequences(step, 0, 4)[:, 0] for step in (4, 5, 6)])
    assert sorted(second_pass.tolist()) == list(range(0, 120, 10))
    assert second_pass.tolist() != starts.tolist()


def test_text_json_lines_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha")
    (tmp_path / "b.jsonl").write_text('{"text": "beta"}\n\n{"text": "gamma", "more": 1}\n')
    (tmp_path / "c.bin").write_bytes(b"\x00")
    assert list(documents(str(tmp_path))) == ["alpha", "beta", "gamma"]


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i:02d}.txt").write_text(chr(ord("A") + i) * 30)
    _prepare(corpus, tmp_path / "data")
    train, held_out = (np.load(tmp_path / "data" / f"{n}.npy") for n in ("train", "held_out"))
    assert len(train) + len(held_out) == 40 * 30
    assert not set(train.tolist()) & set(held_out.tolist())


def test_one_document_is_held_out_by_its_end(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("x" * 950 + "y" * 50)
    _prepare(tmp_path / "one.txt", tmp_path / "data")
    assert set(np.load(tmp_path / "data" / "held_out.npy").tolist()) == {ord("y")}


def test_the_same_corpus_is_prepared_once(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("text " * 100)
    _prepare(tmp_path / "one.txt", tmp_path / "data")
    before = (tmp_path / "data" / "train.npy").stat().st_mtime_ns
    _prepare(tmp_path / "one.txt", tmp_path / "data")
    assert (tmp_path / "data" / "train.npy").stat().st_mtime_ns == before


def test_a_tokenizer_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"red": 0, "green": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "one.txt").write_text("red green blue " * 30)
    _prepare(tmp_path / "one.txt", tmp_path / "data", vocab=3, tokenizer=tmp_path / "tokenizer.json")
    assert np.load(tmp_path / "data" / "train.npy")[:3].tolist() == [0, 1, 2]
    with pytest.raises(BadInputError, match="token id 2, the model's vocabulary has 2"):
        _prepare(tmp_path / "one.txt", tmp_path / "other", vocab=2, tokenizer=tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "empty.txt", "holds no text"),
        ("short", "short.txt", "need at least 9 each"),
        ("not json", "bad.jsonl", "line 1 is not valid JSON"),
        (json.dumps({"body": "x"}), "key.jsonl", "line 1 has no string under the key `text`"),
    ],
)
def test_a_corpus_that_cannot_be_used(tmp_path: Path, content: str, name: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInputError, match=message):
        _prepare(tmp_path / name, tmp_path / "data")


def test_missing_data_and_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="does not exist"):
        _prepare(tmp_path / "nowhere", tmp_path / "data")
    (tmp_path / "one.txt").write_text("text " * 100)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(BadInputError, match=r"tokenizer .* cannot be read"):
        _prepare(tmp_path / "one.txt", tmp_path / "data", tokenizer=tmp_path / "broken.json")
    with pytest.raises(BadInputError, match=r"tokenizer .* does not exist"):
        _prepare(tmp_path / "one.txt", tmp_path / "data", tokenizer=tmp_path / "none.json")
