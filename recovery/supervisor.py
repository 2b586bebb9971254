"""One run, whatever happens to its workers: form a generation, watch it, and go on with another when it breaks.

    form -> watch -> end
     ^        |  a worker is lost, hangs, comes back
     +- choose <- leave

Workers that live leave their collectives and keep their state; the way on is looked up or solved; the next generation
is formed of them, and of processes that are started anew.  Losses during any of this are handled alike.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping

from executor.launch import GRACE_SECONDS, WorkerError
from executor.messages import (
    Continue,
    End,
    Failed,
    Injected,
    Leave,
    Logged,
    Order,
    Pause,
    Phase,
    Ping,
    Report,
    StepDone,
    Store,
    StoreOpen,
)
from recovery.absent import Absent
from recovery.generation import Generation
from recovery.incident import Incident
from recovery.log import SupervisorLog
from recovery.policy import Way, WayOn, peers, words
from recovery.watch import Patience, Slowness, suspects
from recovery.workers import Back, Lost, Workers
from specs.errors import BadInputError, PlaitError
from specs.faults import Fault
from specs.options import TrainOptions
from specs.plan import Plan
from specs.runlog import StepRecord

PING_SECONDS = 1.0
LEAVE_SECONDS = 15.0  # beyond two steps: to get out of collectives; who cannot is started again
END_SECONDS = 5.0  # for workers to end when nothing is left to do
AFTER_CRASH = "The same command with --resume continues from the last checkpoint."
MAX_BREAKS = 5  # generations in a row that break without a step


class _BrokenError(Exception):
    """The generation cannot go on as it is: members are lost, stand still, or are to change."""


class Supervisor:
    """Of one run.  `returns`: drills, ranks that come back once a step is done.  `workers`: none are started yet."""

    def __init__(
        self,
        plan: Plan,
        options: TrainOptions,
        way_on: WayOn,
        workers: Workers,
        *,
        started: float,
        faults: Iterable[Fault] = (),
        returns: Mapping[int, int] | None = None,
    ) -> None:
        self._options, self._way_on, self._original = options, way_on, plan
        self._way = Way(plan, "as planned", "")  # of the generation to come
        self._faults = list(faults)
        self._workers = workers
        self._log = SupervisorLog(options, started)
        self._patience = Patience(options.hang_seconds)
        self._generation = Generation(-1, self._way, -1)
        self._absent = Absent(options.return_after_seconds, returns or {})
        self._incident: Incident | None = None
        self._injected: float | None = None  # time of a drill's fault that is not discovered yet
        self._crashed_after: list[int] = []  # steps after which a worker ended of an exception
        self._breaks = 0
        self._was_formed = False
        self._stop_asked = 0
        self._stop_by = float("inf")
        self._pinged = 0.0
        self._slowness = Slowness({})
        self._slow: dict[int, float] = {}  # factor by rank, as it was found
        self._lighter: dict[int, float] = {}  # those of them that get less work

    # ---- the run

    def run(self) -> None:
        """Train to the end.  Raises what ended the run early; `KeyboardInterrupt` after a clean stop."""
        handlers = {name: signal.signal(name, self._ask_to_stop) for name in (signal.SIGINT, signal.SIGTERM)}
        handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._ask_to_retry)
        try:
            with self._log:
                self._train()
        finally:
            self._workers.close()
            for name, handler in handlers.items():
                signal.signal(name, handler)
        if self._stop_asked:
            raise KeyboardInterrupt

    def _ask_to_stop(self, signum: int, frame: object) -> None:  # noqa: ARG002
        """The first time: at the next step boundary.  Before there was a step, and the second time: at once."""
        self._stop_asked += 1
        self._stop_by = time.monotonic() + GRACE_SECONDS
        if self._stop_asked > 1 or not self._was_formed:
            raise KeyboardInterrupt

    def _ask_to_retry(self, signum: int, frame: object) -> None:  # noqa: ARG002
        """Lost devices are said to be back."""
        self._absent.retry_now(self._absent.ranks)

    def _train(self) -> None:
        self._workers.wait_for_nodes()
        while True:
            try:
                self._form()
                self._watch()
                return self._end()
            except _BrokenError:
                self._leave()
                self._choose()

    # ---- hearing

    def _hear(self) -> None:
        """What workers say, and who of them is gone."""
        for rank, event in self._workers.events(0.05):
            if isinstance(event, Lost):
                self._lose(event, event.seconds)
            elif isinstance(event, Back):
                self._absent.retry_now([rank])
            else:
                self._take(rank, event)
        now = time.monotonic()
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            self._tell(self._workers.ranks, Ping())
        if now > self._stop_by:
            raise KeyboardInterrupt

    def _take(self, rank: int, report: Report) -> None:
        generation = self._generation
        match report:
            case Failed():
                error = BadInputError(report.message)
                error.exit_code = report.exit_code
                raise error
            case Injected():
                self._faults.remove(report.fault)
                self._injected = report.time
            case _ if rank not in generation.members:
                pass
            case Logged():
                if isinstance(report.record, StepRecord):
                    self._patience.step(report.record.seconds)
                    if generation.is_formed and not generation.broken:  # else a step that was done before the loss
                        self._close_incident()
                self._log.take(report)
            case StoreOpen() if report.generation == generation.number:
                place = Store(generation=report.generation, host=report.host, port=report.port)
                self._tell(generation.members, place)
            case Phase():
                self._patience.progress(report.name)
                if report.name == "loading" and self._incident is not None and rank == generation.speaker:
                    self._incident.enter("state_transfer")
            case StepDone():
                self._patience.progress()
                self._slowness.step(report.step, rank, report.busy_seconds)
            case _:
                generation.take(rank, report, self._log)

    def _tell(self, ranks: Iterable[int], order: Order) -> None:
        for rank in ranks:
            self._workers.send(rank, order)

    def _until(self, done: Callable[[], bool]) -> None:
        """Hear until `done`.  Raises `_BrokenError` as soon as the generation cannot go on."""
        while not done():
            self._hear()
            self._look_for_hangs()
            if self._generation.broken:
                raise _BrokenError

    def _lose(self, lost: Lost, detection: float | None = None) -> None:
        """A worker is gone; `detection`: seconds from the fault to now, where it is known."""
        if lost.crashed:
            self._crashed_after.append(self._log.step)
            if self._crashed_after.count(self._log.step) > 1:
                raise WorkerError(
                    f"worker {lost.rank} {lost.cause} in the step after {self._log.step}, as another did before: it is "
                    f"not the device. What they had to say is above. {AFTER_CRASH}"
                )
        if self._options.on_loss == "stop":
            raise WorkerError(
                f"worker {lost.rank} {lost.cause}; the other workers were ended. What it had to say is above. "
                f"{AFTER_CRASH}"
            )
        self._absent.add(lost.rank, lost.cause)
        self._generation.finished.pop(lost.rank, None)
        if lost.rank in self._generation.members:
            if detection is None:
                detection = 0.0 if self._injected is None else time.time() - self._injected
            self._injected = None
            self._open_incident(detection).lost[lost.rank] = lost.cause
            self._generation.breaks(f"lost {words([lost.rank])}")

    def _open_incident(self, detection: float = 0.0) -> Incident:
        if self._incident is None:
            since = time.monotonic() - self._log.step_time if self._was_formed else 0.0
            self._incident = Incident(since_step=since, detection=detection)
        return self._incident

    def _close_incident(self) -> None:
        """Training goes on: the first step of the new generation is there."""
        self._breaks = 0
        if self._incident is None:
            return
        generation, whole = self._generation, self._original.training.global_batch
        formed = generation.formed[generation.speaker]
        record = self._incident.record(
            generation=generation.number,
            step=formed.step,
            redone_steps=generation.redone,
            way=generation.way,
            full_batch=whole,
            source=formed.source,
            missing=formed.missing,
        )
        self._log.incident(record, self._incident.by_bucket(), whole)
        self._incident = None

    # ---- forming

    def _form(self) -> None:
        """Start what is missing, give everyone the plan, wait until all are ready."""
        plan = self._way.plan
        speaker, totals = self._generation.agree()
        generation = self._generation = Generation(self._generation.number + 1, self._way, speaker)
        self._patience.progress("forming")
        for rank in generation.members:
            if rank not in self._workers.ranks:
                self._workers.start(rank)
        self._until(lambda: all(self._workers.is_ready(rank) for rank in generation.members))
        path = self._options.out / "plan.json"
        if generation.number == 0:
            self._log.account.add("program_startup", self._log.account.wall_seconds)
        else:
            path = self._options.out / "generations" / f"plan-{generation.number:04d}.json"
            plan.save(path)
        if self._absent.causes:
            self._log.catch_up()
        for rank, order in generation.orders(path, totals, self._log, self._faults).items():
            self._workers.send(rank, order)
        self._until(lambda: generation.is_formed)
        self._was_formed = True
        self._slowness = Slowness(peers(plan))
        self._patience.progress("training")
        if self._incident is not None:
            self._incident.enter("first_step")

    # ---- watching

    def _watch(self) -> None:
        """Until everyone has finished."""
        generation = self._generation
        while not generation.is_finished:
            self._hear()
            self._look_for_hangs()
            if not generation.broken and generation.is_paused:
                self._after_pause()
            if generation.broken:
                raise _BrokenError
            self._look_for_slow_ranks()
            self._absent.call_back(self._log.step, self._workers)
            back = self._absent.back(self._workers)
            wanted = self._stop_asked or back or self._heavy or self._absent.awaited
            if wanted and not generation.is_pausing:
                generation.is_pausing = True
                self._tell(generation.members, Pause())

    def _after_pause(self) -> None:
        """All members stand at the end of the same step."""
        generation = self._generation
        back, heavy = self._absent.back(self._workers), self._heavy
        if self._absent.awaited - back and not self._stop_asked:
            self._incident = self._incident or Incident(since_step=0.0, detection=0.0)  # waiting is a part of it
            return
        generation.paused.clear()
        generation.is_pausing = False
        if (back or heavy) and not self._stop_asked:
            incident = self._incident = self._incident or Incident(since_step=0.0, detection=0.0)
            incident.returned |= back
            incident.slow.update(heavy)
            self._lighter.update(heavy)
            for rank in back:
                self._absent.remove(rank)
            generation.breaks(f"{words(back)} back" if back else f"{words(heavy)} slow")
        else:
            self._incident = None
            self._tell(generation.members, Continue(stop=bool(self._stop_asked)))

    @property
    def _heavy(self) -> dict[int, float]:
        """Slow ranks that are to get less work."""
        found = {rank: factor for rank, factor in self._slow.items() if rank not in self._lighter}
        return found if self._options.rebalance else {}

    def _look_for_hangs(self) -> None:
        """End members that the others wait for in vain; they are lost then."""
        if not self._generation.active:
            self._patience.progress()
        active = [rank for rank in self._generation.active if self._workers.is_ready(rank)]
        silent = {rank: time.monotonic() - self._workers.worker(rank).heard for rank in active}
        over = self._patience.is_over
        if not over and max(silent.values(), default=0.0) < self._patience.silence:
            return
        starting = self._workers.ranks.intersection(self._generation.active).difference(active) if over else ()
        for rank in starting:
            self._lose(self._workers.kill(rank, f"did not start in {self._patience.waited:.0f} s"))
        waited = self._patience.waited
        found = suspects(active, silent, {rank: self._workers.worker(rank).pong for rank in active}, stalled=over)
        for suspect in found:
            lost = self._workers.kill(suspect.rank, suspect.cause)
            self._lose(lost, detection=max(0.0, waited - self._patience.median))
        if not found and not starting:
            self._open_incident()
            self._generation.breaks("all members wait for each other")

    def _look_for_slow_ranks(self) -> None:
        for rank, factor in self._slowness.slow_ranks().items():
            if rank not in self._slow:
                self._slow[rank] = factor
                self._log.slow(rank, factor, rebalance=self._options.rebalance)

    # ---- going on

    def _leave(self) -> None:
        """Get everyone who lives out of the generation's collectives; who cannot is started again."""
        generation = self._generation
        incident = self._open_incident()
        incident.enter("reforming")
        self._log.account.close_generation()
        self._breaks += 1
        if self._breaks > MAX_BREAKS:
            raise WorkerError(f"{MAX_BREAKS} times in a row no step was reached ({generation.broken}). {AFTER_CRASH}")
        self._tell(self._workers.ranks, Leave(generation=generation.number))
        deadline = time.monotonic() + LEAVE_SECONDS + 2 * self._patience.median

        def inside() -> list[int]:
            return [r for r in generation.members if self._workers.is_ready(r) and r not in generation.halted]

        while inside() and time.monotonic() < deadline:
            self._hear()
        for rank in inside():
            pong = self._workers.worker(rank).pong
            self._log.note(
                f"rank {rank} did not get out of {pong.where if pong else 'its start'}; it is started again."
            )
            self._workers.kill(rank, "could not leave its collectives")
            incident.restarted.add(rank)

    def _choose(self) -> None:
        """The plan for the devices that are left."""
        incident = self._open_incident()
        incident.enter("replanning")
        if self._absent.causes and self._options.on_loss == "restart":
            self._restart_lost()
        else:
            try:
                self._way = self._way_on(self._absent.ranks, self._lighter)
            except PlaitError as error:
                then = "Workers are needed again on the lost devices." if self._absent.causes else "The plan stays."
                self._log.note(f"{error} {then}")
                self._restart_lost()
        incident.enter("reforming")

    def _restart_lost(self) -> None:
        for rank in self._absent.ranks:
            if not self._workers.has_node(rank):
                cause = self._absent.causes[rank]
                raise WorkerError(f"worker {rank} {cause}; training does not go on without it. {AFTER_CRASH}")
            self._open_incident().restarted.add(rank)
            self._absent.remove(rank)
        self._way = Way(self._original, "as planned", "")

    def _end(self) -> None:
        self._close_incident()
        self._log.end(self._generation.finished[self._generation.speaker].reason)
        self._tell(self._workers.ranks, End())
        deadline = time.monotonic() + END_SECONDS
        while self._workers.ranks and time.monotonic() < deadline:
            self._workers.events(0.05)
