"""A worker with a supervisor: it trains in one generation after another and keeps its state between them.

When a peer is lost, the collectives of everyone who waits for it fail, one after the other; each worker then leaves
its process groups (which frees whoever waits for it), says which step it has taken, and waits.  The next generation
has new groups, perhaps a new plan, and takes the state over from the memory of those who hold it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from executor.connections import Connections, leave_groups
from executor.control import Control, SupervisorLostError
from executor.device import choose_backend, leave, open_device
from executor.engine import Engine, StepResult
from executor.faults import Drill
from executor.handover import Held, hold, take_over
from executor.launch import end_with_parent, signal_with_parent
from executor.ledger import Ledger, RunLog
from executor.messages import (
    WAITING_TERMS,
    WITH_AGENT,
    Continue,
    End,
    Failed,
    Finished,
    Form,
    Formed,
    Halted,
    Leave,
    Logged,
    Paused,
    Phase,
    StepDone,
    Store,
    Totals,
)
from executor.optimizer import learning_rate
from executor.train import Run, check_machine, prepare_data, restore, start_record
from executor.waiting import PeersLostError, may_leave
from specs.base import load_document
from specs.errors import PlaitError
from specs.options import TrainOptions
from specs.plan import Plan, StepTerms
from specs.runlog import Record, StepRecord

STORE_SECONDS = 6.0  # to reach the store that they meet in
FORMING_SECONDS = 60.0  # for all members to meet


class Member:
    """One worker process."""

    def __init__(self, rank: int, out: Path) -> None:
        self._rank, self._out = rank, out
        self._options = load_document(TrainOptions, out / "options.json", "options")
        self._stride = load_document(Plan, out / "plan.json", "plan").training.global_batch
        self._backend = choose_backend(self._options.backend)
        self._device = open_device(self._backend)
        self._connections = Connections()
        # What torch imports at its first optimizer takes seconds: before this worker says that it is ready.
        torch.optim.AdamW([torch.zeros(1)], fused=True)
        self._control = Control(rank)
        self._control.on_leave = self._abort
        if self._backend == "gloo":
            may_leave(self._control.left)
        self._engine: Engine | None = None
        self._loaded = 0  # the step that the engine's state was loaded at
        self._held: Held | None = None  # what the engine before had, until a new one has it
        self._begun = 0.0  # when the step at hand began

    def serve(self) -> None:
        """Follow orders until the end.  Raises `SupervisorLostError` when there is nobody to give them."""
        while True:
            order = self._control.next()
            match order:
                case Form():
                    self._join(order)
                case Leave():  # while this one was between two generations, or done
                    self._halt(order.generation, "told to leave")
                case End():
                    return
                case _:  # meant for a generation that is gone
                    pass

    def fail(self, error: PlaitError) -> None:
        """Tell the supervisor and wait to be ended: leaving would make peers fail of lost connections."""
        self._control.send(Failed(message=str(error), exit_code=error.exit_code))
        with contextlib.suppress(SupervisorLostError):
            while not isinstance(self._control.next(), End):
                pass

    def _join(self, order: Form) -> None:
        self._control.pause_asked = self._control.orphaned
        try:
            self._generation(order)
        except PeersLostError as error:
            cause = str(error)
        except RuntimeError as error:
            if not _is_lost_peer(error):
                raise
            # The text alone: the traceback would keep the tensors of the broken step alive.
            cause = str(error).splitlines()[0]
        else:
            return
        self._halt(order.generation, cause)

    def _halt(self, generation: int, cause: str) -> None:
        """Out of the groups first, for that frees others; then say what is here."""
        self._connections.cut()
        leave_groups()
        self._connections = Connections()
        optimizer = None if self._engine is None else self._engine.optimizer
        applied = None if optimizer is None else optimizer.applied
        self._control.send(
            Halted(
                generation=generation,
                step=self._step(),
                ready=None if optimizer is None else optimizer.ready,
                applied=None if applied is None else Totals(step=applied[0], values=tuple(applied[1])),
                cause=cause,
            )
        )

    def _step(self) -> int:
        """The step that the state here belongs to."""
        if self._engine is None:
            return self._held.step if self._held is not None else -1
        applied = self._engine.optimizer.applied
        return self._loaded if applied is None else applied[0]

    def _generation(self, order: Form) -> None:
        """Form, take the state over, train."""
        control = self._control
        ledger = Ledger(time.time())
        drill = Drill(order.faults, control)
        outlet = _Line(control, ledger, order.reports, self._out / "log.jsonl", drill)
        outlet.phase("forming")
        if order.reports and (missed := self._unlogged(order)) is not None:
            outlet.record(missed)
        self._lay_down(order.totals)
        plan = load_document(Plan, Path(order.plan), "plan")
        with ledger.bucket("accelerator_initialization"), self._connections.opening():
            self._meet(order, drill)
        with ledger.bucket("training_preparation"), self._connections.opening():
            check_machine(plan, dist.get_world_size())
            prepare_data(plan, self._options)
            engine = Engine(plan, self._options.optimizer, device=self._device, seed=self._options.seed)
        outlet.phase("loading")
        begin = time.time()
        outcome = take_over(engine, self._held)
        source: Literal["memory", "checkpoint", "start"] = "memory"
        if outcome.step is None:
            done = restore(engine, self._options, ledger)
            source = "checkpoint" if done else "start"
        else:
            done = outcome.step
            ledger.add("state_transfer", time.time() - begin)
        dist.barrier()  # from here on everyone has the state
        self._engine, self._loaded, self._held = engine, done, None
        drill.arm(engine)
        if order.generation == 0:
            outlet.record(start_record(plan, self._options, self._device, done, ledger))
        control.send(
            Formed(
                generation=order.generation,
                step=done,
                source=source,
                missing=outcome.missing,
                loading_seconds=time.time() - begin,
            )
        )
        control.where = lambda: engine.clock.current
        outlet.at_step = self._note_begin
        run = Run(plan, self._options, engine, ledger, outlet, stride=self._stride)
        # A step that is trained again is logged, evaluated and saved again.
        step, reason = run.train(
            done,
            evaluated=min(order.evaluated, done),
            saved=min(order.saved, done) if outcome.step is not None else done,
            measure_memory=order.generation == 0,
        )
        control.send(Finished(step=step, reason="finished" if reason == "finished" else "interrupted"))

    def _note_begin(self) -> None:
        self._begun = time.time()

    def _unlogged(self, order: Form) -> StepRecord | None:
        """The record of a step that was taken, here or by the peers' totals, but not logged before a peer was lost."""
        applied = None if self._engine is None else self._engine.optimizer.applied
        totals = (
            order.totals if order.totals is not None or applied is None else Totals(step=applied[0], values=applied[1])
        )
        if totals is None or totals.step <= order.logged or self._engine is None:
            return None
        seconds = time.time() - self._begun
        return StepRecord(
            time=time.time(),
            step=totals.step,
            loss=totals.values[1],
            gradient_norm=totals.values[0] ** 0.5,
            learning_rate=learning_rate(self._options.optimizer, totals.step),
            tokens=self._engine.plan.training.tokens_per_step,
            seconds=seconds,
            terms=StepTerms(other=seconds),
            warm_up=True,
        )

    def _lay_down(self, totals: Totals | None) -> None:
        """Take the step that peers have proved, if its gradients are ready here; then free the engine."""
        engine = self._engine
        if engine is None:
            return
        if totals is not None and engine.optimizer.ready == totals.step:
            engine.optimizer.update(totals.step, torch.tensor(totals.values, dtype=torch.float64))
        self._held = hold(engine, self._step())
        self._engine = None
        del engine
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _meet(self, order: Form, drill: Drill) -> None:
        """Join the process group of a generation."""
        place = self._control.next()
        while not isinstance(place, Store) or place.generation != order.generation:
            if isinstance(place, Leave) and place.generation == order.generation:
                raise PeersLostError("told to leave before the groups were formed")
            if isinstance(place, End):
                raise SupervisorLostError
            place = self._control.next()
        drill.recovering(order.generation)
        # A store whose host has just died would be tried for as long as this; one that lives answers at once.
        store = dist.TCPStore(
            place.host,
            place.port,
            None,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_SECONDS),
        )
        store.set_timeout(timedelta(seconds=FORMING_SECONDS))
        dist.init_process_group(
            self._backend,
            store=store,
            rank=order.members.index(self._rank),
            world_size=len(order.members),
            timeout=timedelta(seconds=self._options.timeout_seconds),
        )

    def _abort(self) -> None:
        """Wake the training thread if it waits for peers.  Called by the listening thread, too."""
        if self._backend == "nccl":
            dist.distributed_c10d._abort_process_group()
        else:
            self._connections.cut()


class _Line:
    """Outlet of a supervised run: everything goes to the supervisor, or to the log itself when that is gone."""

    def __init__(self, control: Control, ledger: Ledger, reports: bool, log: Path, drill: Drill) -> None:
        self._control, self._ledger, self._reports, self._log = control, ledger, reports, log
        self._drill = drill
        self.at_step = lambda: None

    def phase(self, name: Literal["forming", "loading", "training", "evaluating", "saving"]) -> None:
        if name == "training":
            self.at_step()
        self._control.send(Phase(name=name))
        if name == "saving":
            self._drill.saving()

    def record(self, record: Record) -> None:
        if self._reports and self._control.orphaned:
            log = RunLog(self._log)
            log.write(record)
            log.close()
        elif self._reports:
            self._control.send(Logged(record=record, seconds=self._ledger.seconds()))

    def step_done(self, step: int, result: StepResult) -> None:
        busy = sum(seconds for term, seconds in result.seconds.items() if term not in WAITING_TERMS)
        self._control.send(StepDone(step=step, busy_seconds=busy))

    def flag(self) -> float:
        return float(self._control.pause_asked)

    def at_flag(self, step: int) -> Literal["stop", "go on"]:
        self._control.send(Paused(step=step))
        try:
            while True:
                order = self._control.next()
                if isinstance(order, Continue):
                    self._control.pause_asked = self._control.orphaned
                    return "stop" if order.stop else "go on"
                if isinstance(order, Leave):
                    raise PeersLostError("told to leave at a pause")
                if isinstance(order, End):
                    return "stop"
        except SupervisorLostError:
            return "stop"


def _is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed.  gloo has no class of its own for that, its messages name its source files."""
    return isinstance(error, (dist.DistError, dist.DistStoreError)) or "gloo" in str(error)


@contextlib.contextmanager
def _deaf_to_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM of a whole process tree (a job that ends) reach the supervisor too; it decides."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    yield


def main() -> None:
    """Worker process of the supervisor: the run folder is the only argument, RANK the device's number in the plan."""
    if WITH_AGENT in os.environ:
        end_with_parent()  # nobody else could end it, and its node is lost
    else:
        # A frozen worker wakes when its supervisor dies; then it sees that nobody is at the other end of the line.
        signal_with_parent(signal.SIGCONT)
    out = Path(sys.argv[1])
    member: Member | None = None
    with _deaf_to_signals():
        try:
            member = Member(int(os.environ["RANK"]), out)
            member.serve()
        except SupervisorLostError:
            pass
        except PlaitError as error:
            if member is None:
                print(f"plait: {error}", file=sys.stderr)
                os._exit(error.exit_code)
            member.fail(error)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    leave()


if __name__ == "__main__":
    main()
