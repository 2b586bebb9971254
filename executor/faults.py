"""Drills: faults that happen to this worker at a given step and moment, by its own hand."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

from executor.control import Control
from executor.engine import Engine
from executor.messages import Injected
from specs.faults import Fault, Moment

FULL_DISK_BYTES = 4096  # no file may grow beyond this: checkpoints fail, as on a full disk


class Drill:
    """The faults of one rank in one generation."""

    def __init__(self, faults: Iterable[Fault], control: Control) -> None:
        self._faults = list(faults)
        self._control = control
        self._step = 0
        self._worked = 0.0  # this thread's CPU seconds when it was last slowed down

    def recovering(self, generation: int) -> None:
        """Groups are about to be formed."""
        if generation > 0:
            self._fire("recovery")

    def saving(self) -> None:
        """A checkpoint is about to be written."""
        self._fire("save")

    def arm(self, engine: Engine) -> None:
        """Let the faults happen inside the engine's steps."""
        if not self._faults:
            return

        def before(call: Callable[..., Any], moment: Moment) -> Callable[..., Any]:
            def fault_then(*arguments: Any, **options: Any) -> Any:
                if moment == "begin":
                    self._step = arguments[0]
                self._fire(moment)
                return call(*arguments, **options)

            return fault_then

        engine.step = before(engine.step, "begin")  # type: ignore[method-assign]
        engine.sync.finish = before(engine.sync.finish, "sync")  # type: ignore[method-assign]
        engine.optimizer.update = before(engine.optimizer.update, "update")  # type: ignore[method-assign]
        engine.sync.gather_weights = before(engine.sync.gather_weights, "gather")  # type: ignore[method-assign]
        engine.stages[0].register_forward_pre_hook(lambda *_: self._fire("forward"))

    def _fire(self, moment: Moment) -> None:
        for fault in list(self._faults):
            if fault.kind == "slow":
                self._slow_down(fault)
            elif fault.moment == moment and (moment == "recovery" or fault.step == self._step):
                self._faults.remove(fault)
                self._control.send(Injected(fault=fault, time=time.time()))
                self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                time.sleep(1e9)
            case "partition":
                self._control.cut()
            case "full-disk":
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, FULL_DISK_BYTES))

    def _slow_down(self, fault: Fault) -> None:
        """Sleep in proportion to what this thread computed since the last time (waiting takes no CPU time)."""
        worked = time.thread_time()
        if fault.step <= self._step and fault.factor is not None:
            time.sleep((fault.factor - 1.0) * (worked - self._worked))
        self._worked = worked
