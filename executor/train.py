"""Training with a plan: the loop that every worker runs, and its frame for workers of torchrun.

Workers of `plait train` have a supervisor; theirs is in executor/member.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol, TypeVar

import torch
import torch.distributed as dist

from executor.checkpoint import agree_on_checkpoint, load_checkpoint
from executor.data import Samples, prepare
from executor.device import choose_backend, device_name, process_group, versions
from executor.engine import Batch, Engine, StepResult, mean_terms
from executor.huggingface import HuggingFaceWeights
from executor.launch import STARTED
from executor.ledger import Ledger, RunLog
from executor.live import Live
from executor.memory import MemoryReading, measure_step
from executor.optimizer import learning_rate
from executor.progress import TrainingProgress
from executor.saving import Saver
from specs.errors import BadInputError, PlaitError
from specs.options import TrainOptions
from specs.plan import Plan
from specs.runlog import (
    ActionsRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    ExpertLoadRecord,
    MemoryRecord,
    Record,
    StartRecord,
    StepRecord,
)

T = TypeVar("T")

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
            prepare_data(plan, options)
            engine = Engine(plan, options.optimizer, device=device, seed=options.seed)
        done = restore(engine, options, ledger)
        with _Diary(options, ledger, stop, done) as diary:
            if dist.get_rank() == 0:
                diary.record(start_record(plan, options, engine.device, done, ledger))
            run = Run(plan, options, engine, ledger, diary, stride=plan.training.global_batch)
            step, reason = run.train(done, evaluated=done, saved=done, measure_memory=True)
            diary.end(step, reason)


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


def prepare_data(plan: Plan, options: TrainOptions) -> None:
    """Tokenise the corpus on rank 0, unless that is done already; a collective."""
    _on_rank_zero(
        lambda: prepare(
            options.data,
            options.out / "data",
            vocab=plan.model.vocab,
            seq_len=plan.training.seq_len,
            tokenizer=options.tokenizer,
        )
    )


def restore(engine: Engine, options: TrainOptions, ledger: Ledger) -> int:
    """Load the newest sound checkpoint, else the imported weights, else keep the drawn ones; gives the steps done."""
    found = agree_on_checkpoint(options.out / "checkpoints")
    if found is None:
        if options.initial_weights is not None:
            with ledger.bucket("checkpoint_restore"):
                weights = HuggingFaceWeights(options.initial_weights)
                weights.check_model(engine.plan.model, "the plan")
                engine.set_weights(weights.read_elements)
        return 0
    place, manifest, refused = found
    if dist.get_rank() == 0:
        for message in refused:
            print(f"plait: {message} The one before it is used.", file=sys.stderr)
    with ledger.bucket("checkpoint_restore"):
        load_checkpoint(engine, place, manifest)
    return manifest.step


def start_record(plan: Plan, options: TrainOptions, device: torch.device, done: int, ledger: Ledger) -> StartRecord:
    """What a log begins with."""
    return StartRecord(
        time=time.time(),
        step=done,
        plan_sha256=plan.sha256(),
        world_size=plan.world_size,
        backend=choose_backend(options.backend),
        device=device_name(device),
        versions=versions(),
        seconds=ledger.seconds(),
    )


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


class Outlet(Protocol):
    """Where a worker's run goes to, and where its flags come from."""

    def phase(self, name: Literal["training", "evaluating", "saving"]) -> None:
        """What begins now."""

    def record(self, record: Record) -> None:
        """For the run log; called on every rank, one of them writes it."""

    def step_done(self, step: int, result: StepResult) -> None:
        """A step is taken on this rank."""

    def flag(self) -> float:
        """Above 0: this rank asks all to halt at the end of the step that begins."""

    def at_flag(self, step: int) -> Literal["stop", "go on"]:
        """All ranks halt after `step`, for some rank asked for it: what now?"""


class _Diary:
    """Outlet of a run without supervisor: rank 0 writes log and progress, SIGTERM is a clean stop."""

    def __init__(self, options: TrainOptions, ledger: Ledger, stop: list[bool], done: int) -> None:
        is_first = dist.get_rank() == 0
        self._ledger, self._stop = ledger, stop
        self._log = RunLog(options.out / "log.jsonl") if is_first else None
        last = options.optimizer.num_steps
        self._progress = TrainingProgress(done, last, enabled=is_first)
        self._live = Live(options) if is_first else None

    def __enter__(self) -> _Diary:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)  # type: ignore[arg-type]
        if self._live is not None:
            self._live.close()

    def phase(self, name: str) -> None:
        pass

    def record(self, record: Record) -> None:
        if self._log is not None:
            self._log.write(record)
            self._progress.record(record)
        if self._live is not None:
            self._live.record(record)

    def step_done(self, step: int, result: StepResult) -> None:
        pass

    def flag(self) -> float:
        return float(self._stop[0])

    def at_flag(self, step: int) -> Literal["stop", "go on"]:  # noqa: ARG002
        return "stop"

    def end(self, step: int, reason: str) -> None:
        if self._log is not None:
            wall = self._ledger.wall_seconds()
            self._log.write(
                EndRecord(time=time.time(), step=step, reason=reason, wall_seconds=wall, seconds=self._ledger.seconds())
            )
            self._log.close()


class Run:
    """One process's part in training under one plan.

    `stride` is the number of samples by which the data advance each step: the global batch that the run was started
    with, also where a plan for fewer devices takes fewer of them.
    """

    def __init__(
        self, plan: Plan, options: TrainOptions, engine: Engine, ledger: Ledger, outlet: Outlet, *, stride: int
    ) -> None:
        self._plan, self._options, self._engine = plan, options, engine
        self._ledger, self._outlet = ledger, outlet
        shape = {"seq_len": plan.training.seq_len, "global_batch": stride}
        self._train_data = Samples(options.out / "data" / "train.npy", seed=options.seed, **shape)
        self._held_out = Samples(options.out / "data" / "held_out.npy", seed=options.seed, **shape)
        folder = options.out / "checkpoints"
        self._saver = Saver(engine, folder, seed=options.seed, keep=options.keep_checkpoints)

    def train(self, done: int, *, evaluated: int, saved: int, measure_memory: bool) -> tuple[int, str]:
        """Steps after `done` to the last one, or until all are told to stop; gives the last step and the reason.

        What a step is followed by is made up for first, where `done` is beyond what is evaluated and saved.
        """
        step, last = done, self._options.optimizer.num_steps
        stopping = False
        while True:
            every = self._options.evaluate_every
            if step > evaluated and ((every and step % every == 0) or (step == last and not stopping)):
                self._evaluate(step)
            every = self._options.checkpoint_every
            # A save that was under way when peers were lost is made up for at once.
            if step > saved and ((every and step // every > saved // every) or step == last or stopping):
                self._save(step)
                saved = step
            if step >= last or stopping:
                self._finish_save()
                return step, "interrupted" if stopping else "finished"
            step += 1
            result = self._step(
                step,
                measure=measure_memory and step == done + 1,
                warm_up=step <= done + WARM_UP_STEPS,
                record=step == last,
            )
            stopping = result.flags > 0 and self._outlet.at_flag(step) == "stop"

    def _batch(self, samples: Samples, step: int) -> Batch:
        return lambda first, count: samples.sequences(step, first, count)

    def _step(self, step: int, *, measure: bool, warm_up: bool, record: bool) -> StepResult:
        self._outlet.phase("training")
        flag = self._outlet.flag()
        readings: list[MemoryReading] = []
        with self._ledger.bucket("step"):
            batch = self._batch(self._train_data, step)
            if measure:
                with measure_step(self._engine) as readings:
                    result = self._engine.step(step, batch, flag=flag)
            else:
                result = self._engine.step(step, batch, flag=flag, record=record)
        self._outlet.step_done(step, result)
        terms, still_writing = mean_terms(result.seconds, float(self._saver.is_writing))
        self._outlet.record(
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
        for reading in readings:
            self._write_memory(reading)
        if record and not measure:
            actions = self._by_rank(self._engine.clock.recorded())
            self._outlet.record(ActionsRecord(step=step, actions={r: tuple(own) for r, own in actions.items()}))
        if not still_writing:
            self._finish_save()
        return result

    def _by_rank(self, own: T) -> dict[int, T]:
        """What every rank has, by rank."""
        gathered = [own] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        ranks = sorted(rank for replica in self._plan.replicas for rank in replica.ranks)
        return dict(zip(ranks, gathered, strict=True))

    def _write_memory(self, reading: MemoryReading) -> None:
        by_rank = self._by_rank(reading)
        self._outlet.record(
            MemoryRecord(
                method=reading.method,
                peak_bytes={rank: r.peak_bytes for rank, r in by_rank.items()},
                activation_bytes={rank: r.activation_bytes for rank, r in by_rank.items()},
                static_bytes={rank: r.static_bytes for rank, r in by_rank.items()},
            )
        )

    def _write_expert_load(self, step: int) -> None:
        """How even the routers were in the step that was just made, of models that have them."""
        if not any(module.kind == "moe" for _, module in self._plan.model.modules()):
            return
        total: dict[str, list[int]] = {}
        for own in self._by_rank(self._engine.expert_load()).values():
            for name, counts in own.items():
                before = total.get(name, [0] * len(counts))
                total[name] = [a + b for a, b in zip(before, counts, strict=True)]
        # Recomputation routes twice, so that shares are kept and not counts; none before the first step.
        share = {name: tuple(n * len(c) / sum(c) for n in c) for name, c in sorted(total.items()) if sum(c)}
        if share:
            self._outlet.record(ExpertLoadRecord(time=time.time(), step=step, share=share))

    def _evaluate(self, step: int) -> None:
        self._outlet.phase("evaluating")
        self._write_expert_load(step)
        begin = time.time()
        batches = self._options.evaluation_batches
        with self._ledger.bucket("evaluation"):
            loss = sum(self._engine.evaluate(self._batch(self._held_out, i + 1)) for i in range(batches)) / batches
        tokens = batches * self._plan.training.tokens_per_step
        self._outlet.record(
            EvaluationRecord(time=time.time(), step=step, loss=loss, tokens=tokens, seconds=time.time() - begin)
        )

    def _save(self, step: int) -> None:
        """Begin to save; the save before is waited for, so that no more than one is on its way."""
        self._finish_save()
        self._outlet.phase("saving")
        with self._ledger.bucket("checkpoint_save"):
            self._saver.start(step)

    def _finish_save(self) -> None:
        if not self._saver.is_under_way:
            return
        self._outlet.phase("saving")
        with self._ledger.bucket("checkpoint_save"):
            saved = self._saver.finish()
        self._outlet.record(
            CheckpointRecord(
                time=time.time(),
                step=saved.step,
                path=str(saved.path),
                size_bytes=saved.size_bytes,
                seconds=saved.stall_seconds,
                lag_seconds=saved.lag_seconds,
            )
        )
