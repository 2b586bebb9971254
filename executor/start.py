"""Makes a run's folder ready: checks it, fixes the options, writes plan and options.  No torch."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from executor.huggingface import MODEL_FOLDER, TOKENIZER, HuggingFaceWeights, keep_model_files
from specs.base import first_problem, load_document
from specs.errors import BadInputError
from specs.options import OptimizerOptions, TrainOptions
from specs.plan import Plan
from specs.tensors import num_parameters


def prepare_run(
    plan_path: Path, out: Path, given: Mapping[str, object], *, resume: bool, writes: bool
) -> tuple[Plan, TrainOptions]:
    """Plan and options of a run of `plan_path` in the folder `out`, which is made ready when `writes`.

    `given` holds the options that the user named (None: not named); a new run takes defaults for the rest, a resumed
    one what it was started with.  Raises `BadInputError` for a folder, plan or option that does not fit.
    """
    plan = load_document(Plan, plan_path, "plan")
    out = out.resolve()
    if resume and given.get("initial_weights") is not None:
        raise BadInputError("--from starts a new run, --resume goes on from a checkpoint. Give one of them.")
    options = _options(out, given, resume=resume)
    if options.initial_weights is not None and not resume:
        options = _with_model_folder(plan, options)
    if writes:
        _write_folder(plan, options)
    return plan, options


def _options(out: Path, given: Mapping[str, object], *, resume: bool) -> TrainOptions:
    options_path = out / "options.json"
    if resume:
        if not options_path.exists():
            raise BadInputError(f"{out} holds no run to resume (no options.json). Start one without --resume.")
        before = load_document(TrainOptions, options_path, "options").model_copy(update={"out": out})
    elif (out / "log.jsonl").exists():
        raise BadInputError(f"{out} holds a run already. Continue it with --resume, or choose another --out.")
    else:
        before = TrainOptions(out=out)
    named = {key: value for key, value in given.items() if value is not None}
    of_optimizer = {key: named.pop(key) for key in list(named) if key in OptimizerOptions.model_fields}
    try:
        optimizer = OptimizerOptions.model_validate({**before.optimizer.model_dump(), **of_optimizer})
        return TrainOptions.model_validate({**before.model_dump(), **named, "optimizer": optimizer})
    except ValidationError as error:
        raise BadInputError(f"option {first_problem(error)}") from None


def _with_model_folder(plan: Plan, options: TrainOptions) -> TrainOptions:
    """Check the imported weights before anything starts; their tokenizer is the default one."""
    assert options.initial_weights is not None
    folder = options.initial_weights.resolve()
    HuggingFaceWeights(folder).check_model(plan.model, "the plan")
    update: dict[str, object] = {"initial_weights": folder}
    if options.tokenizer is None and (folder / TOKENIZER).is_file():
        update["tokenizer"] = folder / TOKENIZER
    return options.model_copy(update=update)


def _write_folder(plan: Plan, options: TrainOptions) -> None:
    disk = next(folder for folder in (options.out, *options.out.parents) if folder.exists())
    free = shutil.disk_usage(disk).free
    needed = _checkpoint_bytes(plan) * (options.keep_checkpoints + 1)
    if free < needed:
        raise BadInputError(
            f"{options.out} has {free / 2**30:.2f} GiB free, {options.keep_checkpoints} checkpoints and the one being "
            f"written need {needed / 2**30:.2f} GiB. Free space, or lower --keep-checkpoints."
        )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"{options.out} cannot be used as a run folder: {error.strerror}.") from None
    if options.initial_weights is not None:
        keep_model_files(options.initial_weights, options.out / MODEL_FOLDER)
    plan.save(options.out / "plan.json")
    options.save(options.out / "options.json")


def _checkpoint_bytes(plan: Plan) -> int:
    """fp32 weights and two moments."""
    return 12 * num_parameters(plan.model.modules())
