"""Step time beside torch's own building blocks for the same uniform layout, in turns in the same processes.

    python -m benchmarks.against_torch [--ranks 2] [--turns 8] [--json FILE]

TP: parallelize_module with column- and row-wise parts and loss_parallel; DP: DistributedDataParallel with gradients
accumulated under no_sync; PP: torch.distributed.pipelining with Schedule1F1B.  Both sides train the same decoder from
the same weights on the same tokens with fused AdamW and global-norm clipping, and must report the same losses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.plain_decoder import LAYERS, MODEL, VOCAB, PlainDecoder
from executor.device import device_name
from executor.engine import Engine
from specs.cluster import ClusterSpec, Device, Link, NodeGroup
from specs.layout import balanced_cuts
from specs.model import ModelSpec
from specs.options import OptimizerOptions
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Replica, Stage, TrainingSpec

SEQ_LEN, GLOBAL_BATCH = 256, 8
STEPS_PER_TURN, WARM_UP_TURNS = 3, 1
OPTIONS = OptimizerOptions(learning_rate=1e-3, warmup_steps=0, final_fraction=1.0, num_steps=10**6)


def uniform_plan(kind: str, ranks: int) -> Plan:
    """The layout that both sides train."""
    names = [name for name, _ in MODEL.modules()]
    if kind == "PP":
        # torch's stages hold whole layers; the same cut here.
        cuts = balanced_cuts(LAYERS, ranks)
        bounds = [0, *(1 + 2 * cut for cut in cuts[1:-1]), len(names)]
        stages = tuple(
            Stage(num_ranks=1, modules=tuple(ModulePlacement(module=n, blocks=(1,)) for n in names[a:b]))
            for a, b in pairwise(bounds)
        )
    else:
        num_ranks = ranks if kind == "TP" else 1
        stages = (
            Stage(num_ranks=num_ranks, modules=tuple(ModulePlacement(module=n, blocks=(num_ranks,)) for n in names)),
        )
    pipeline = Pipeline(micro_batch=1 if kind == "PP" else 4, stages=stages)
    replicas = ranks // pipeline.num_ranks
    device = Device(
        name="any",
        kind="cpu",
        memory_bytes=2**34,
        memory_bytes_per_second=1e10,
        peak_flop_per_second={"fp32": 1e11},
        source="not used",
    )
    link = Link(name="any", bytes_per_second=1e9, latency_seconds=0, source="not used")
    return Plan(
        made=Provenance(created_by="benchmarks/against_torch.py", created_at=datetime.now(timezone.utc).isoformat()),
        model=MODEL,
        cluster=ClusterSpec(
            name="any",
            devices={"any": device},
            nodes=(NodeGroup(count=1, devices_per_node=ranks, device="any"),),
            links={"scale_up": link},
        ),
        training=TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, precision="fp32"),
        pipelines=(pipeline,),
        replicas=tuple(
            Replica(
                pipeline=0,
                ranks=tuple(range(i * pipeline.num_ranks, (i + 1) * pipeline.num_ranks)),
                sequences=GLOBAL_BATCH // replicas,
            )
            for i in range(replicas)
        ),
    )


Step = Callable[[torch.Tensor], float]


def torch_step(kind: str, rank: int, ranks: int, *, spec: ModelSpec = MODEL, batch: int = GLOBAL_BATCH) -> Step:
    """A function that trains one step with torch's own parts and returns the mean loss of the global batch."""
    torch.manual_seed(0)
    if kind == "PP":
        return _pipeline_step(rank, ranks, spec, batch)
    model: nn.Module = PlainDecoder(model=spec)
    if kind == "TP":
        plan: dict[str, object] = {"head": ColwiseParallel(use_local_output=False)}
        for i in range(spec.num_layers):
            for name in ("query", "key", "value", "gate", "up"):
                plan[f"layers.{i}.{name}"] = ColwiseParallel()
            for name in ("output", "down"):
                plan[f"layers.{i}.{name}"] = RowwiseParallel()
        model = parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    adam = _adam(model)

    def step(tokens: torch.Tensor) -> float:
        own = tokens if kind == "TP" else tokens.chunk(ranks)[rank]
        parts = own.split(4)
        total = 0.0
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            silent = model.no_sync() if kind == "DP" and not last else contextlib.nullcontext()
            sharded = loss_parallel() if kind == "TP" else contextlib.nullcontext()
            with silent, sharded:
                logits = model(part[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].reshape(-1)) / len(parts)
                loss.backward()
            total += float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)
        # The same loss on every rank (TP), or each replica's own (DP).
        return float(_finish(model, adam, shared=torch.tensor(total / ranks), summed_plain=False))

    return step


def _adam(model: nn.Module) -> torch.optim.AdamW:
    """Fused AdamW; DTensors and plain tensors in groups of their own, which fused steps need."""
    groups = []
    for decay in (True, False):
        for sharded in (True, False):
            chosen = [p for p in model.parameters() if (p.dim() > 1) is decay and isinstance(p, DTensor) is sharded]
            if chosen:
                groups.append({"params": chosen, "weight_decay": OPTIONS.weight_decay if decay else 0.0})
    betas = (OPTIONS.beta1, OPTIONS.beta2)
    return torch.optim.AdamW(groups, lr=OPTIONS.learning_rate, betas=betas, eps=OPTIONS.epsilon, fused=True)


def _local_gradients(model: nn.Module, *, sharded: bool) -> list[torch.Tensor]:
    found = [p.grad for p in model.parameters() if p.grad is not None and isinstance(p, DTensor) is sharded]
    return [g.to_local() if isinstance(g, DTensor) else g for g in found]


def _square_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(gradients)).square().sum() if gradients else torch.zeros(())


def _finish(model: nn.Module, adam: torch.optim.AdamW, *, shared: torch.Tensor, summed_plain: bool) -> torch.Tensor:
    """Clip by the global norm, step; returns `shared` summed over ranks in the same collective as the norm.

    `summed_plain`: plain gradients are each rank's own (pipeline stages), not copies of one another.
    """
    plain, sharded = (_local_gradients(model, sharded=s) for s in (False, True))
    norms = [_square_norm(part) for part in (plain, sharded)]
    total = torch.stack((norms[1] + (norms[0] if summed_plain else 0.0), shared))
    dist.all_reduce(total)
    square = total[0] + (0.0 if summed_plain else norms[0])
    clip = OPTIONS.max_gradient_norm / (float(square.sqrt()) + 1e-6)
    if clip < 1.0:
        torch._foreach_mul_([*plain, *sharded], clip)
    adam.step()
    adam.zero_grad()
    return total[1]


def _pipeline_step(rank: int, ranks: int, spec: ModelSpec, batch: int) -> Step:
    cuts = balanced_cuts(spec.num_layers, ranks)
    part = PlainDecoder(cuts[rank], cuts[rank + 1], spec)
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1))

    schedule = Schedule1F1B(stage, n_microbatches=batch, loss_fn=loss_of)
    adam = _adam(part)

    def step(tokens: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        ids = (tokens[:, :-1].contiguous(),) if rank == 0 else ()
        targets = {"target": tokens[:, 1:].contiguous(), "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*ids, **targets)
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        return float(_finish(part, adam, shared=mean, summed_plain=True))

    return step


def plait_step(kind: str, ranks: int) -> Step:
    """The same step by the executor."""
    engine = Engine(uniform_plan(kind, ranks), OPTIONS, device=torch.device("cpu"), seed=0)
    number = iter(range(1, 10**9))
    return lambda tokens: engine.step(next(number), lambda first, count: tokens[first : first + count]).loss


def _measure(rank: int, ranks: int, port: int, turns: int, results: object) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found: dict[str, dict[str, list[float]]] = {}
    for kind in ("TP", "DP", "PP"):
        sides = {"torch": torch_step(kind, rank, ranks), "plait": plait_step(kind, ranks)}
        seconds: dict[str, list[float]] = {"torch": [], "plait": []}
        losses: dict[str, list[float]] = {"torch": [], "plait": []}
        for turn in range(WARM_UP_TURNS + turns):
            for side, step in sides.items():
                generator = torch.Generator().manual_seed(turn)
                for _ in range(STEPS_PER_TURN):
                    tokens = torch.randint(VOCAB, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
                    dist.barrier()
                    begin = time.perf_counter()
                    losses[side].append(step(tokens))
                    if turn >= WARM_UP_TURNS:
                        seconds[side].append(time.perf_counter() - begin)
        worst = max(abs(a - b) for a, b in zip(losses["torch"], losses["plait"], strict=True))
        assert worst < 2e-3, f"{kind}: the two sides' losses differ by {worst}"
        found[kind] = seconds
    if rank == 0:
        results.put(found)  # type: ignore[attr-defined]
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Measure, print the ratios, optionally write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8, choices=range(2, 1000), metavar="N")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=_measure, args=(rank, options.ranks, port, options.turns, results))
        for rank in range(options.ranks)
    ]
    for worker in workers:
        worker.start()
    while True:
        with contextlib.suppress(queue.Empty):
            found = results.get(timeout=1)
            break
        if any(worker.exitcode not in (None, 0) for worker in workers):
            sys.exit("a worker failed; its message is above")
    for worker in workers:
        worker.join()
    rows = []
    print(f"{'layout':<8}{'torch ms':>10}{'plait ms':>10}{'ratio':>8}   ratio of turns, 10 % .. 90 %")
    for kind, seconds in found.items():
        by_turn = {
            side: [statistics.median(s[i : i + STEPS_PER_TURN]) for i in range(0, len(s), STEPS_PER_TURN)]
            for side, s in seconds.items()
        }
        ratios = [b / a for a, b in zip(by_turn["torch"], by_turn["plait"], strict=True)]
        tenths = statistics.quantiles(ratios, n=10, method="inclusive")
        medians = {side: statistics.median(s) for side, s in seconds.items()}
        row = {"layout": kind, **medians, "ratio": statistics.median(ratios), "p10": tenths[0], "p90": tenths[-1]}
        rows.append(row)
        print(
            f"{kind + ' ' + str(options.ranks):<8}{1e3 * medians['torch']:>10.0f}{1e3 * medians['plait']:>10.0f}"
            f"{row['ratio']:>8.2f}   {tenths[0]:.2f} .. {tenths[-1]:.2f}"
        )
    if options.json:
        about = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "device": device_name(torch.device("cpu")),
            "torch": torch.__version__,
            "turns": options.turns,
        }
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
