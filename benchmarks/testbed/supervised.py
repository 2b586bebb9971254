"""One host's part of a supervised run on the testbed: the supervisor on host 0, an agent on the others.

python -m benchmarks.testbed.supervised JOB.json HOST, as `plait train --nnodes ...` with a policy to choose and with
workers that are held back.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from benchmarks.recovery import drop_replicas
from executor.start import prepare_run
from recovery.agent import Agent
from recovery.place import Place
from recovery.policy import Policy, WayOn
from recovery.start import make_workers, worker_arguments
from recovery.supervisor import Supervisor
from specs.base import Document, load_document
from specs.errors import PlaitError

PolicyName = Literal["plan anew", "drop replicas", "stop and restart"]


class Job(Document):
    """A run in the folder `out`; `through`: a module and arguments that run the workers."""

    plan: Path
    profile: Path
    out: Path
    policy: PolicyName
    num_steps: PositiveInt
    checkpoint_every: PositiveInt
    num_hosts: PositiveInt
    address: str
    port: int
    through: tuple[str, ...]


def main() -> None:
    """Until the run is over; a run that is in the folder already goes on."""
    job, host = load_document(Job, Path(sys.argv[1]), "job"), int(sys.argv[2])
    place = Place(host, job.num_hosts, job.address, job.port)
    if host > 0:
        Agent(place, job.out, [*job.through, *worker_arguments(job.out)]).run()
        return
    resume = (job.out / "log.jsonl").exists()
    given: dict[str, object] = {
        "num_steps": job.num_steps,
        "checkpoint_every": job.checkpoint_every,
        "profile": job.profile,
        "on_loss": "stop" if job.policy == "stop and restart" else "shrink",
    }
    plan, options = prepare_run(job.plan, job.out, {} if resume else given, resume=resume, writes=True)
    way_on: WayOn = Policy(plan, options).way_on
    if job.policy == "drop replicas":
        way_on = lambda lost, _slow: drop_replicas(plan, lost)  # noqa: E731
    workers = make_workers(plan, options, place, through=job.through)
    Supervisor(plan, options, way_on, workers, started=time.time()).run()


if __name__ == "__main__":
    try:
        main()
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
