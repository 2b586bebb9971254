"""Text from a trained or imported model, under its plan.  No torch until a worker runs."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from executor.huggingface import MODEL_FOLDER, TOKENIZER, HuggingFaceWeights
from executor.launch import end_with_parent, report_error, run_workers
from specs.base import Spec, load_document, read_json
from specs.errors import BadInputError, PlaitError
from specs.options import Backend, TrainOptions
from specs.plan import Plan

if TYPE_CHECKING:
    from executor.saved import SavedRun

NUM_BYTES = 256


class GenerateOptions(Spec):
    """What to continue and how.  `run` is a run folder, or a plan file when `weights` names a Hugging Face folder."""

    run: Path
    weights: Path | None = None
    tokenizer: Path | None = None
    prompt: str = Field(min_length=1)
    max_tokens: PositiveInt = 100
    temperature: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    backend: Backend | None = None


def start_generate(options: GenerateOptions, into: IO[bytes] | None = None) -> None:
    """Print the continuation of the prompt on standard output (or into a file), token by token.

    Raises `BadInputError` for a run, prompt or length that does not fit, and whatever ended the workers.
    """
    plan = load_document(Plan, plan_path(options.run), "plan")
    if options.weights is not None:
        HuggingFaceWeights(options.weights).check_model(plan.model, "the plan")
    elif not options.run.is_dir():
        raise BadInputError(f"{options.run} is a plan: give the weights too, with --from FOLDER (Hugging Face).")
    num_ranks = len(plan.replicas[0].ranks)
    arguments = ["executor.generate", options.model_dump_json()]
    run_workers(arguments, num_ranks, after_crash="Nothing was changed.", stdout=into)


def plan_path(run: Path) -> Path:
    """The plan of a run folder, or the plan file itself."""
    if not run.exists():
        raise BadInputError(f"run folder {run} does not exist. Give the folder that `plait train --out` made.")
    return run / "plan.json" if run.is_dir() else run


def tokenizer_of(run: Path, weights: Path | None, given: Path | None) -> Path | None:
    """The tokenizer that goes with some weights: the given one, the folder's, the run's; None: bytes are tokens."""
    if given is not None:
        return given
    if weights is not None:
        return weights / TOKENIZER if (weights / TOKENIZER).is_file() else None
    options = load_document(TrainOptions, run / "options.json", "options")
    if options.tokenizer is not None and not options.tokenizer.is_file():
        kept = run / MODEL_FOLDER / TOKENIZER  # the imported folder may be gone
        return kept if kept.is_file() else options.tokenizer
    return options.tokenizer


class Text:
    """Token ids from text and back; `num_ids` ids mean something."""

    def __init__(self, path: Path | None) -> None:
        self._tokenizer = None
        self.num_ids = NUM_BYTES
        if path is not None:
            from executor.data import load_tokenizer

            self._tokenizer = load_tokenizer(path)
            self.num_ids = self._tokenizer.get_vocab_size()

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(text.encode()) if self._tokenizer is None else self._tokenizer.encode(text).ids

    def printer(self, write: Callable[[str], object]) -> Callable[[int, bool], None]:
        """A function of (token, is it the last) that writes text as soon as its characters are whole."""
        if self._tokenizer is None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            return lambda token, last: write(decoder.decode(bytes([token]), last))  # type: ignore[return-value]
        tokenizer, ids, written = self._tokenizer, [], ""

        def put(token: int, last: bool) -> None:
            nonlocal written
            ids.append(token)
            text = tokenizer.decode(ids)
            if last or not text.endswith("\N{REPLACEMENT CHARACTER}"):
                write(text[len(written) :])
                written = text

        return put


def _stop_ids(saved: SavedRun, weights: Path | None, run: Path) -> set[int]:
    """End-of-text tokens that an imported model's configuration names."""
    path = (weights if weights is not None else run / MODEL_FOLDER) / "config.json"
    if not path.is_file():
        return set()
    config = read_json(path, "model configuration")
    stop = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = stop if isinstance(stop, list) else [stop]
    return {i for i in ids if isinstance(i, int) and i < saved.plan.model.vocab}


def generate(options: GenerateOptions, write: Callable[[str], object]) -> None:
    """Generate on this rank; `write` gets the text on rank 0."""
    import torch
    import torch.distributed as dist

    from executor.decoder import Decoder, first_replica
    from executor.device import choose_backend, process_group
    from executor.engine import DTYPES
    from executor.saved import imported, open_run

    plan = load_document(Plan, plan_path(options.run), "plan")
    saved = open_run(options.run) if options.weights is None else imported(plan, options.weights)
    text = Text(tokenizer_of(options.run, options.weights, options.tokenizer))
    ids, model = text.ids(options.prompt), plan.model
    stop = _stop_ids(saved, options.weights, options.run) if text.num_ids != NUM_BYTES else set()
    total = len(ids) + options.max_tokens
    if not ids or max(ids) >= model.vocab:
        raise BadInputError(
            f"the prompt has token id {max(ids, default=-1)}, the model's vocabulary has {model.vocab}. "
            "Use the model's own tokenizer.json."
        )
    if model.max_positions is not None and total > model.max_positions:
        raise BadInputError(
            f"the prompt has {len(ids)} tokens and {options.max_tokens} are to follow, {model.name} has "
            f"{model.max_positions} positions. Use a shorter prompt or --max-tokens {model.max_positions - len(ids)}."
        )
    with process_group(choose_backend(options.backend), 600.0) as device:
        dtype = DTYPES[plan.training.precision]
        decoder = Decoder(first_replica(plan), saved.read, max_tokens=total, dtype=dtype, device=device)
        put = text.printer(write) if dist.get_rank() == 0 else None
        generator = torch.Generator().manual_seed(options.seed)
        num_ids = min(text.num_ids, model.vocab)
        fed = torch.tensor(ids)
        for left in range(options.max_tokens - 1, -1, -1):
            logits = decoder.next_logits(fed)
            token = decoder.choose(logits, temperature=options.temperature, generator=generator, num_ids=num_ids)
            if token in stop:
                break
            if put is not None:
                put(token, left == 0)
            fed = torch.tensor([token])
        if put is not None:
            write("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> None:
    """Worker process of the launcher: the options as JSON are the only argument."""
    from executor.device import leave

    end_with_parent()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        generate(GenerateOptions.model_validate(json.loads(sys.argv[1])), _write)
    except PlaitError as error:
        report_error(error)
        sys.exit(error.exit_code)
    leave()


if __name__ == "__main__":
    main()
