"""`plait train`: checks the run's folder and options, then supervises it; under torchrun, is one of its workers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from executor.launch import ERROR_FILE, STARTED
from executor.start import prepare_run
from recovery.policy import Policy
from recovery.supervisor import Supervisor
from specs.faults import Fault


def start_run(
    plan_path: Path,
    out: Path,
    given: Mapping[str, object],
    *,
    resume: bool,
    faults: Iterable[Fault] = (),
    returns: Mapping[int, int] | None = None,
) -> None:
    """Train `plan_path` in the folder `out`; `given` holds the options that the user named (None: not named).

    `faults` and `returns` (rank: step) are a drill's.  Raises `BadInputError` for a folder or plan that does not fit,
    and whatever ended the run.
    """
    started = float(os.environ.get(STARTED, repr(time.time())))
    under_torchrun = "RANK" in os.environ and ERROR_FILE not in os.environ
    is_first = not under_torchrun or os.environ["RANK"] == "0"
    plan, options = prepare_run(plan_path, out, given, resume=resume, writes=is_first)
    if under_torchrun:
        from executor.device import leave
        from executor.train import run_worker

        run_worker(plan, options)
        leave()
    print(
        f"training {plan.model.name} on {plan.world_size} ranks of this machine, "
        f"{options.optimizer.num_steps} steps of {plan.training.tokens_per_step:,} tokens, in {options.out}",
        file=sys.stderr,
        flush=True,
    )
    Supervisor(plan, options, Policy(plan, options).way_on, started=started, faults=faults, returns=returns).run()
