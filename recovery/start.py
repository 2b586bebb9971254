"""`plait train`: checks the run's folder and options, then supervises it; under torchrun, is one of its workers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from executor.launch import ERROR_FILE, STARTED
from executor.start import prepare_run
from recovery.agent import Agent
from recovery.nodes import listen
from recovery.place import Place
from recovery.policy import Policy
from recovery.supervisor import Supervisor
from recovery.workers import NODE_SILENT_SECONDS, TOKEN_FILE, Workers
from specs.base import load_document
from specs.faults import Fault
from specs.options import TrainOptions
from specs.plan import Plan


def start_run(
    plan_path: Path,
    out: Path,
    given: Mapping[str, object],
    *,
    resume: bool,
    place: Place | None = None,
    faults: Iterable[Fault] = (),
    returns: Mapping[int, int] | None = None,
) -> None:
    """Train `plan_path` in the folder `out`; `given` holds the options that the user named (None: not named).

    `place`: this node among several; on all but the first the command is the node's agent.  `faults` and `returns`
    (rank: step) are a drill's.  Raises `BadInputError` for a folder or plan that does not fit,
    and whatever ended the run.
    """
    if place is not None:
        place.check_plan(load_document(Plan, plan_path, "plan"))
        if place.node > 0:
            Agent(place, out.resolve(), worker_arguments(out)).run()
            return
    started = float(os.environ.get(STARTED, repr(time.time())))
    under_torchrun = "RANK" in os.environ and ERROR_FILE not in os.environ
    is_first = not under_torchrun or os.environ["RANK"] == "0"
    plan, options = prepare_run(plan_path, out, given, resume=resume, writes=is_first)
    if under_torchrun:
        from executor.device import leave
        from executor.train import run_worker

        run_worker(plan, options)
        leave()
    where = "this machine" if place is None else f"{place.num_nodes} nodes"
    print(
        f"training {plan.model.name} on {plan.world_size} ranks of {where}, "
        f"{options.optimizer.num_steps} steps of {plan.training.tokens_per_step:,} tokens, in {options.out}",
        file=sys.stderr,
        flush=True,
    )
    way_on, workers = Policy(plan, options).way_on, make_workers(plan, options, place)
    Supervisor(plan, options, way_on, workers, started=started, faults=faults, returns=returns).run()


def worker_arguments(out: Path) -> list[str]:
    """Of `python -m` for a worker of the run in `out`."""
    return ["executor.member", str(out.resolve())]


def make_workers(
    plan: Plan, options: TrainOptions, place: Place | None = None, *, through: Sequence[str] = ()
) -> Workers:
    """None of them started yet: all on this machine, or on the nodes of the plan's cluster.

    `through`: a module and arguments that run this node's workers.
    """
    arguments = [*through, *worker_arguments(options.out)]
    if place is None:
        return Workers(arguments, [range(plan.cluster.num_devices)])
    return Workers(
        arguments,
        plan.cluster.node_ranks(),
        listener=listen(place.host, place.port),
        token_path=options.out / TOKEN_FILE,
        node_silent_seconds=min(NODE_SILENT_SECONDS, options.hang_seconds),
    )
