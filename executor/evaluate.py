"""The loss of a trained or imported model on held-out text, under its plan.  No torch until a worker runs."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path

from executor.generate import plan_path, tokenizer_of
from executor.huggingface import HuggingFaceWeights
from executor.launch import end_with_parent, report_error, run_workers
from specs.base import Spec, load_document, write_whole
from specs.errors import BadInputError, PlaitError
from specs.options import Backend, OptimizerOptions
from specs.plan import Plan


class EvaluateOptions(Spec):
    """What to evaluate on what.  `run` is a run folder, or a plan file when `weights` names a Hugging Face folder.

    `data` None: the run's own held-out part; else all of this text.
    """

    run: Path
    weights: Path | None = None
    data: str | None = None
    tokenizer: Path | None = None
    backend: Backend | None = None


class Evaluation(Spec):
    """Mean loss over `tokens` target tokens of the `text_tokens` there are; the rest does not fill a batch."""

    loss: float  # nats per token
    perplexity: float
    tokens: int
    text_tokens: int
    origin: str
    data: str


def start_evaluate(options: EvaluateOptions) -> Evaluation:
    """Evaluate in worker processes.  Raises `BadInputError` for inputs that do not fit, and what ended the workers."""
    plan = load_document(Plan, plan_path(options.run), "plan")
    if options.weights is not None:
        HuggingFaceWeights(options.weights).check_model(plan.model, "the plan")
    elif not options.run.is_dir():
        raise BadInputError(f"{options.run} is a plan: give the weights too, with --from FOLDER (Hugging Face).")
    if options.data is None and not options.run.is_dir():
        raise BadInputError(f"{options.run} is a plan and has no held-out text of its own. Give some with --data.")
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        arguments = ["executor.evaluate", options.model_dump_json(), folder]
        run_workers(arguments, plan.world_size, after_crash="Nothing was changed.")
        return Evaluation.model_validate_json((Path(folder) / "result.json").read_text())


def one_pass(plan: Plan) -> Plan:
    """The same layout with one micro-batch per replica: the smallest batch that every rank has a part in."""
    replicas = tuple(
        replica.model_copy(update={"sequences": plan.pipelines[replica.pipeline].micro_batch})
        for replica in plan.replicas
    )
    training = plan.training.model_copy(update={"global_batch": sum(replica.sequences for replica in replicas)})
    return plan.model_copy(update={"replicas": replicas, "training": training})


def evaluate(options: EvaluateOptions, folder: Path) -> None:
    """Evaluate on this rank; rank 0 leaves `result.json` in `folder`."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from executor.data import tokenise
    from executor.device import choose_backend, process_group
    from executor.engine import Engine
    from executor.saved import imported, open_run

    whole = load_document(Plan, plan_path(options.run), "plan")
    saved = open_run(options.run) if options.weights is None else imported(whole, options.weights)
    plan = one_pass(whole)
    vocab, seq_len, batch = plan.model.vocab, plan.training.seq_len, plan.training.global_batch
    if options.data is None:
        text = np.load(options.run / "data" / "held_out.npy", mmap_mode="r", allow_pickle=False)
    else:
        tokenizer = tokenizer_of(options.run, options.weights, options.tokenizer)
        text = np.concatenate(tokenise(options.data, vocab=vocab, tokenizer=tokenizer))
    passes = (text.size - 1) // seq_len // batch
    if passes == 0:
        raise BadInputError(
            f"the text has {text.size:,} tokens, one batch of this plan needs {batch * seq_len + 1:,} "
            f"({batch} sequences of {seq_len}). Give more text."
        )
    with process_group(choose_backend(options.backend), 600.0) as device:
        engine = Engine(plan, OptimizerOptions(), device=device, seed=0)
        engine.set_weights(saved.read)
        total = 0.0
        for number in range(passes):

            def sequences(first: int, count: int, number: int = number) -> torch.Tensor:
                starts = ((number * batch + i) * seq_len for i in range(first, first + count))
                return torch.from_numpy(np.stack([text[s : s + seq_len + 1] for s in starts]).astype(np.int64))

            total += engine.evaluate(sequences)
        loss = total / passes
        if dist.get_rank() == 0:
            result = Evaluation(
                loss=loss,
                perplexity=math.exp(min(loss, 700.0)),
                tokens=passes * batch * seq_len,
                text_tokens=int(text.size) - 1,
                origin=saved.origin,
                data=options.data if options.data is not None else "held-out part of the run's data",
            )
            write_whole(folder / "result.json", result.model_dump_json())


def main() -> None:
    """Worker process of the launcher: the options as JSON and a folder for the result."""
    from executor.device import leave

    end_with_parent()
    try:
        evaluate(EvaluateOptions.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2]))
    except PlaitError as error:
        report_error(error)
        sys.exit(error.exit_code)
    leave()


if __name__ == "__main__":
    main()
