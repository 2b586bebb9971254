"""From text to token sequences, in an order that depends on the seed and the step, never on the layout.

The corpus is tokenised once into one array that every rank maps; sample i of step s is a window whose position
comes from a permutation of all windows, a new one for each pass over the data.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from specs.base import read_json, write_whole
from specs.errors import BadInputError

STANDARD_LIBRARY = "stdlib"  # the name of the default corpus: the installed Python's own library
HELD_OUT_EVERY = 20  # documents 0, 20, 40, ... of the sorted corpus are held out
TEXT_SUFFIXES = {".txt", ".md", ".py", ".rst", ".text"}


def documents(source: str) -> Iterator[str]:
    """The documents of a text file, a JSON-lines file (key `text`), a folder of them, or the standard library."""
    if source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
        for path in sorted(root.rglob("*.py")):
            if not skipped & set(path.relative_to(root).parts):
                yield path.read_text(encoding="utf-8", errors="replace")
        return
    path = Path(source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES | {".jsonl"} and p.is_file())
        for file in files:
            yield from _documents_of_file(file)
    elif path.is_file():
        yield from _documents_of_file(path)
    else:
        raise BadInputError(
            f"data {source} does not exist. Give a text file, a .jsonl file with the key `text`, a folder of them, "
            f"or `{STANDARD_LIBRARY}` for the installed Python's own library."
        )


def _documents_of_file(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInputError(f"data {path} cannot be read: {error.strerror}.") from None
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInputError(f"data {path}, line {number} is not valid JSON: {error.msg}.") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise BadInputError(f"data {path}, line {number} has no string under the key `text`.")
        yield entry["text"]


def tokenise(source: str, *, vocab: int, tokenizer: Path | None) -> list[np.ndarray]:
    """Token ids of each document.  Raises `BadInputError` for ids beyond the model's vocabulary."""
    encode = _encoder(tokenizer)
    parts = [encode(text) for text in documents(source) if text]
    largest = max((int(part.max()) for part in parts), default=0)
    if largest >= vocab:
        raise BadInputError(
            f"data {source} has token id {largest}, the model's vocabulary has {vocab}. "
            "Use the model's own tokenizer.json, or a model with a larger vocabulary."
        )
    return parts


def prepare(source: str, folder: Path, *, vocab: int, seq_len: int, tokenizer: Path | None) -> None:
    """Tokenise `source` into folder/train.npy and folder/held_out.npy, unless they are there for this very input.

    Byte-level without a tokenizer.  A corpus of one document is held out by its last part.  Raises `BadInputError`
    for an empty corpus, one too short for a sequence, and token ids beyond the model's vocabulary.
    """
    recipe = {"source": source, "tokenizer": str(tokenizer) if tokenizer else "bytes"}
    recipe_path = folder / "recipe.json"
    if recipe_path.exists() and read_json(recipe_path, "data recipe") == recipe:
        return
    parts = tokenise(source, vocab=vocab, tokenizer=tokenizer)
    num_tokens = _length(parts)
    if num_tokens == 0:
        raise BadInputError(f"data {source} holds no text. Give a corpus with at least {2 * (seq_len + 1)} tokens.")
    held_out = parts[::HELD_OUT_EVERY]
    train = [part for i, part in enumerate(parts) if i % HELD_OUT_EVERY]
    if not train or min(_length(train), _length(held_out)) <= seq_len:
        whole = np.concatenate(parts)
        cut = whole.size - max(seq_len + 1, whole.size // HELD_OUT_EVERY)
        train, held_out = [whole[: max(cut, 0)]], [whole[max(cut, 0) :]]
    if min(_length(train), _length(held_out)) <= seq_len:
        raise BadInputError(
            f"data {source} has {num_tokens:,} tokens; training and held-out parts need at least {seq_len + 1} each. "
            "Give more text or a shorter --seq-len."
        )
    for name, chosen in (("train", train), ("held_out", held_out)):
        _save(folder / f"{name}.npy", np.concatenate(chosen))
    write_whole(recipe_path, json.dumps(recipe))


def _length(parts: list[np.ndarray]) -> int:
    return sum(part.size for part in parts)


def _encoder(tokenizer: Path | None):  # type: ignore[no-untyped-def]
    if tokenizer is None:
        return lambda text: np.frombuffer(text.encode(), dtype=np.uint8)
    loaded = load_tokenizer(tokenizer)
    return lambda text: np.asarray(loaded.encode(text).ids, dtype=np.int32)


def load_tokenizer(path: Path):  # type: ignore[no-untyped-def]
    """The tokenizer of a tokenizer.json.  Raises `BadInputError` for a file that is none."""
    from tokenizers import Tokenizer

    if not path.is_file():
        raise BadInputError(f"tokenizer {path} does not exist. Give the path of a tokenizer.json.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise BadInputError(f"tokenizer {path} cannot be read: {error}.") from None


def _save(path: Path, array: np.ndarray) -> None:
    import io

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_whole(path, buffer.getvalue())


class Samples:
    """Windows of seq_len + 1 tokens of one prepared array, in an order fixed by seed and step."""

    def __init__(self, path: Path, *, seq_len: int, global_batch: int, seed: int) -> None:
        self._tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        self._seq_len = seq_len
        self._global_batch = global_batch
        self._seed = seed
        self._num_windows = (self._tokens.size - 1) // seq_len
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    @property
    def num_windows(self) -> int:
        """Windows per pass over the data."""
        return int(self._num_windows)

    def _window(self, sample: int) -> int:
        epoch, place = divmod(sample, self._num_windows)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(self._num_windows))
        return int(self._order[1][place])

    def sequences(self, step: int, first: int, count: int) -> torch.Tensor:
        """Sequences [first, first + count) of step 1, 2, ...: int64 [count, seq_len + 1]."""
        rows = []
        for sample in range(first, first + count):
            start = self._window((step - 1) * self._global_batch + sample) * self._seq_len
            rows.append(self._tokens[start : start + self._seq_len + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))
