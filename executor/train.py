"""Training with a plan: what every worker runs.

`plait train` starts one per rank on this node; under torchrun the same command is the worker itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from executor.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from executor.data import Samples, prepare
from executor.device import choose_backend, device_name, leave, process_group, versions
from executor.engine import Batch, Engine, StepResult, mean_terms
from executor.huggingface import HuggingFaceWeights
from executor.launch import STARTED, end_with_parent, report_error
from executor.ledger import Ledger, RunLog
from executor.memory import measure_step
from executor.optimizer import learning_rate
from executor.progress import TrainingProgress
from specs.base import load_document
from specs.errors import BadInputError, PlaitError
from specs.options import TrainOptions
from specs.plan import Plan
from specs.runlog import (
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    MemoryRecord,
    StartRecord,
    StepRecord,
)

WARM_UP_STEPS = 3  # of a process: allocation, first-touch and the measured step make them slower


def run_worker(plan: Plan, options: TrainOptions) -> None:
    """Train on this rank until the last step, a stop signal, or an error."""
    started = float(os.environ.get(STARTED, repr(time.time())))
    check_machine(plan, int(os.environ["WORLD_SIZE"]))
    ledger = Ledger(started)
    backend = choose_backend(options.backend)
    begin = time.time()
    with process_group(backend, options.timeout_seconds) as device, _stop_signal() as stop:
        ledger.add("accelerator_initialization", time.time() - begin)
        with ledger.bucket("training_preparation"):
            data = options.out / "data"
            _on_rank_zero(
                lambda: prepare(
                    options.data,
                    data,
                    vocab=plan.model.vocab,
                    seq_len=plan.training.seq_len,
                    tokenizer=options.tokenizer,
                )
            )
            engine = Engine(plan, options.optimizer, device=device, seed=options.seed)
        Run(plan, options, engine, ledger, backend, stop).train()


def check_machine(plan: Plan, world_size: int) -> None:
    """Raise `BadInputError` when this plan cannot run in this many processes on this kind of device."""
    if world_size != plan.world_size:
        raise BadInputError(
            f"the plan is for {plan.world_size} ranks, {world_size} processes were started. "
            f"Start {plan.world_size}, or make a plan for {world_size}."
        )
    kinds = {plan.cluster.device_of(rank).kind for replica in plan.replicas for rank in replica.ranks}
    if "gpu" in kinds and not torch.cuda.is_available():
        raise BadInputError(
            f"the plan is for {plan.cluster.name}, torch sees no GPU here. "
            "Make a plan for this machine: plait profile, then plait plan --profile profile.json."
        )


@contextmanager
def _stop_signal() -> Iterator[list[bool]]:
    """SIGTERM asks for a clean stop at the next step boundary."""
    stop: list[bool] = [False]

    def ask(signum: int, frame: object) -> None:  # noqa: ARG001
        stop[0] = True

    previous = signal.signal(signal.SIGTERM, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, previous)


def _on_rank_zero(work) -> None:  # type: ignore[no-untyped-def]
    """Run on rank 0; its `PlaitError` is raised on every rank, so that nobody waits for ever."""
    problem: list[PlaitError | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except PlaitError as error:
            problem = [error]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]


class Run:
    """One process's part in a run."""

    def __init__(
        self, plan: Plan, options: TrainOptions, engine: Engine, ledger: Ledger, backend: str, stop: list[bool]
    ) -> None:
        self._plan, self._options, self._engine, self._ledger, self._stop = plan, options, engine, ledger, stop
        self._backend = backend
        self._is_first = dist.get_rank() == 0
        self._log = RunLog(options.out / "log.jsonl") if self._is_first else None
        shape = {"seq_len": plan.training.seq_len, "global_batch": plan.training.global_batch}
        self._train_data = Samples(options.out / "data" / "train.npy", seed=options.seed, **shape)
        self._held_out = Samples(options.out / "data" / "held_out.npy", seed=options.seed, **shape)
        self._checkpoints = options.out / "checkpoints"

    def train(self) -> None:
        """From the newest sound checkpoint, or from the start, to the last step."""
        done = self._restore()
        last = self._options.optimizer.num_steps
        self._write_start(done)
        step, reason, saved = done, "finished", done
        with TrainingProgress(done, last, self._plan.training.tokens_per_step, enabled=self._is_first) as progress:
            for step in range(done + 1, last + 1):
                result = self._step(step, first=step == done + 1, warm_up=step <= done + WARM_UP_STEPS)
                progress.step(step, result.loss)
                stopping = result.flags > 0
                every = self._options.evaluate_every
                if (every and step % every == 0) or (step == last and not stopping):
                    progress.evaluation(step, self._evaluate(step))
                every = self._options.checkpoint_every
                if (every and step % every == 0) or step == last or stopping:
                    self._save(step)
                    saved = step
                if stopping:
                    reason = "interrupted"
                    break
        assert saved == step, "the last step is always saved"
        if self._log is not None:
            wall = self._ledger.wall_seconds()
            self._log.write(
                EndRecord(time=time.time(), step=step, reason=reason, wall_seconds=wall, seconds=self._ledger.seconds())
            )
            self._log.close()

    def _restore(self) -> int:
        found = find_checkpoint(self._checkpoints)
        if found is None:
            if self._options.initial_weights is not None:
                with self._ledger.bucket("checkpoint_restore"):
                    weights = HuggingFaceWeights(self._options.initial_weights)
                    weights.check_model(self._plan.model, "the plan")
                    self._engine.set_weights(weights.read_elements)
            return 0
        place, manifest, refused = found
        if self._is_first:
            for message in refused:
                print(f"plait: {message} The one before it is used.", file=sys.stderr)
        with self._ledger.bucket("checkpoint_restore"):
            load_checkpoint(self._engine, place, manifest)
        return manifest.step

    def _batch(self, samples: Samples, step: int) -> Batch:
        return lambda first, count: samples.sequences(step, first, count)

    def _step(self, step: int, *, first: bool, warm_up: bool) -> StepResult:
        flag = float(self._stop[0])
        with self._ledger.bucket("step"):
            batch = self._batch(self._train_data, step)
            if first:
                with measure_step(self._engine) as readings:
                    result = self._engine.step(step, batch, flag=flag)
            else:
                result = self._engine.step(step, batch, flag=flag)
        terms = mean_terms(result.seconds)
        if self._log is not None:
            self._log.write(
                StepRecord(
                    time=time.time(),
                    step=step,
                    loss=result.loss,
                    gradient_norm=result.gradient_norm,
                    learning_rate=learning_rate(self._options.optimizer, step),
                    tokens=self._plan.training.tokens_per_step,
                    seconds=terms.total(),
                    terms=terms,
                    warm_up=warm_up,
                )
            )
        if first:
            self._write_memory(readings[0])
        return result

    def _write_memory(self, reading) -> None:  # type: ignore[no-untyped-def]
        gathered = [reading] * dist.get_world_size()
        dist.all_gather_object(gathered, reading)
        if self._log is not None:
            ranks = sorted(rank for replica in self._plan.replicas for rank in replica.ranks)
            by_rank = dict(zip(ranks, gathered, strict=True))
            self._log.write(
                MemoryRecord(
                    method=reading.method,
                    peak_bytes={rank: r.peak_bytes for rank, r in by_rank.items()},
                    activation_bytes={rank: r.activation_bytes for rank, r in by_rank.items()},
                    static_bytes={rank: r.static_bytes for rank, r in by_rank.items()},
                )
            )

    def _evaluate(self, step: int) -> float:
        begin = time.time()
        batches = self._options.evaluation_batches
        with self._ledger.bucket("evaluation"):
            loss = sum(self._engine.evaluate(self._batch(self._held_out, i + 1)) for i in range(batches)) / batches
        if self._log is not None:
            tokens = batches * self._plan.training.tokens_per_step
            self._log.write(
                EvaluationRecord(time=time.time(), step=step, loss=loss, tokens=tokens, seconds=time.time() - begin)
            )
        return loss

    def _save(self, step: int) -> None:
        begin = time.time()
        with self._ledger.bucket("checkpoint_save"):
            place, size = save_checkpoint(
                self._engine,
                self._checkpoints,
                step=step,
                seed=self._options.seed,
                keep=self._options.keep_checkpoints,
            )
        if self._log is not None:
            self._log.write(
                CheckpointRecord(
                    time=time.time(), step=step, path=str(place), size_bytes=size, seconds=time.time() - begin
                )
            )

    def _write_start(self, done: int) -> None:
        if self._log is not None:
            self._log.write(
                StartRecord(
                    time=time.time(),
                    step=done,
                    plan_sha256=self._plan.sha256(),
                    world_size=dist.get_world_size(),
                    backend=self._backend,
                    device=device_name(self._engine.device),
                    versions=versions(),
                    seconds=self._ledger.seconds(),
                )
            )


def main() -> None:
    """Worker process of the launcher: the run folder is the only argument."""
    end_with_parent()
    out = Path(sys.argv[1])
    try:
        run_worker(
            load_document(Plan, out / "plan.json", "plan"), load_document(TrainOptions, out / "options.json", "options")
        )
    except PlaitError as error:
        report_error(error)
        sys.exit(error.exit_code)
    leave()


if __name__ == "__main__":
    main()
