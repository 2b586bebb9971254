"""Steps of many plans in turns, in one set of processes: what disturbs the machine falls on no plan alone.

python -m benchmarks.testbed.turns JOB.json, on every rank under torchrun.  Each turn makes the plan's groups, modules
and optimizer with the executor's own code, goes through warm-up steps and then timed ones.  A step's time is that of
its slowest rank, from a barrier on.  Each turn is one line of the job's output; a job that was broken off goes on
with the turns that are missing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import Field, PositiveInt

from benchmarks.against_torch import torch_step
from benchmarks.testbed.quotas import GROUP, set_share
from executor.device import leave
from executor.engine import Engine
from executor.memory import saved_tensor_bytes, static_tensors
from specs.base import Document, load_document
from specs.options import OptimizerOptions
from specs.plan import Plan


class Job(Document):
    """Plans by name and file; how often; where the lines go; shares of a core while a plan runs, by rank.

    `torch` names those of the plans whose layout torch's own pieces run: TP, DP or PP (benchmarks/against_torch.py).
    """

    plans: dict[str, Path]
    torch: dict[str, str] = Field(default_factory=dict)
    shares: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    out: Path
    num_turns: PositiveInt = 5
    num_warm_up_steps: PositiveInt = 1
    num_steps: PositiveInt = 2


def done_turns(out: Path) -> set[tuple[str, int]]:
    """(plan, turn) that are in the output already."""
    if not out.exists():
        return set()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {(line["plan"], line["turn"]) for line in lines}


def order(names: list[str], turn: int) -> list[str]:
    """Every turn begins with another plan, and every second goes backwards: no plan always follows the same one."""
    shift = turn * 7 % len(names)
    turned = names[shift:] + names[:shift]
    return turned[::-1] if turn % 2 else turned


def one_turn(job: Job, plan: Plan, store: dist.Store, name: str, turn: int) -> list[float]:
    """Seconds of the timed steps; all ranks together."""
    rank = int(os.environ["RANK"])
    # A fresh group each turn: the sockets and threads of the plan before are gone.
    prefix = dist.PrefixStore(f"{turn}/{name}", store)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=plan.world_size, timeout=timedelta(minutes=10))
    shape = (plan.training.global_batch, plan.training.seq_len + 1)
    tokens = torch.randint(plan.model.vocab, shape, generator=torch.Generator().manual_seed(0))
    train, engine = _step_of(job, plan, name, tokens)
    timed, activations = [], None
    for step in range(1, job.num_warm_up_steps + job.num_steps + 1):
        dist.barrier()
        begin = time.perf_counter()
        if engine is not None and step == 1 and turn == 0:
            with saved_tensor_bytes(static_tensors(engine)) as saved:
                train(step)
            activations = saved.peak_bytes
        else:
            train(step)
        slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if step > job.num_warm_up_steps:
            timed.append(float(slowest))
    line: dict[str, object] = {"plan": name, "turn": turn, "seconds": timed}
    if activations is not None:
        kept: list[int] = [0] * plan.world_size
        dist.all_gather_object(kept, activations)
        line["activation_bytes"] = kept
    dist.barrier()
    # Destroying joins gloo's threads with the interpreter held (torch 2.13), which a thread may want to let go of the
    # last work's tensors: both would wait for ever.  So let it first.
    time.sleep(0.05)
    dist.destroy_process_group()
    if rank == 0:
        with job.out.open("a") as out:
            out.write(json.dumps(line) + "\n")
    return timed


def _step_of(job: Job, plan: Plan, name: str, tokens: torch.Tensor) -> tuple[Callable[[int], object], Engine | None]:
    """What trains the step of a number, by the executor or by torch's pieces."""
    if name in job.torch:
        rank, batch = int(os.environ["RANK"]), plan.training.global_batch
        step = torch_step(job.torch[name], rank, plan.world_size, spec=plan.model, batch=batch)
        return lambda _: step(tokens), None
    options = OptimizerOptions(learning_rate=1e-5, num_steps=10**6)
    engine = Engine(plan, options, device=torch.device("cpu"), seed=0)
    return lambda number: engine.step(number, lambda first, count: tokens[first : first + count]), engine


def main() -> None:
    """All turns that are missing."""
    job = load_document(Job, Path(sys.argv[1]), "job")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + 1,
        world_size=size,
        is_master=rank == 0,
        timeout=timedelta(minutes=10),
    )
    plans = {name: load_document(Plan, path, "plan") for name, path in job.plans.items()}
    done = done_turns(job.out)
    for turn in range(job.num_turns):
        for name in order(sorted(plans), turn):
            if (name, turn) not in done:
                if name in job.shares:
                    set_share(Path(os.environ[GROUP]), job.shares[name][rank])
                one_turn(job, plans[name], store, name, turn)
    # The store lives in rank 0: it stays until all have left.
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < size:
        time.sleep(0.02)
    leave()


if __name__ == "__main__":
    main()
