"""What gradient sync costs beside the backward pass: steps of replicas, with it after backward and beside it.

Both kinds of step run in turns with the executor's own code, so that their difference holds what is hidden and what
hiding slows down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from executor.clock import Clock
from executor.engine import Engine
from profiles.options import ProfileOptions
from profiles.statistics import gathered_timing
from specs.cluster import ClusterSpec
from specs.model import ModelSpec
from specs.options import OptimizerOptions
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Replica, Stage, TrainingSpec
from specs.profile import OverlapTiming

NUM_WARM_UP_STEPS = 2


def replicated_plan(
    model: ModelSpec, cluster: ClusterSpec, options: ProfileOptions, *, num_replicas: int, zero: Literal[0, 1]
) -> Plan:
    """Replicas of one block of the smallest degree, one micro-batch of the smallest number of sequences each."""
    sequences, degree = min(options.block_sequences), min(options.degrees)
    modules = tuple(ModulePlacement(module=name, blocks=(degree,), zero=zero) for name, _ in model.modules())
    return Plan(
        made=Provenance(created_by="plait profile", created_at=options.created_at),
        model=model,
        cluster=cluster,
        training=TrainingSpec(
            global_batch=sequences * num_replicas, seq_len=options.seq_len, precision=options.precision
        ),
        pipelines=(Pipeline(micro_batch=sequences, stages=(Stage(num_ranks=degree, modules=modules),)),),
        replicas=tuple(
            Replica(pipeline=0, ranks=tuple(range(first, first + degree)), sequences=sequences)
            for first in range(0, num_replicas * degree, degree)
        ),
    )


@dataclass
class _Samples:
    """Seconds per step: whole, in gradient collectives, in backward."""

    step: list[float] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)


@dataclass
class OverlapTimings:
    """Collects samples over rounds, for gradients that are summed and for such that are scattered."""

    options: ProfileOptions
    cluster: ClusterSpec
    model: ModelSpec
    device: torch.device
    _samples: defaultdict[tuple[int, bool], _Samples] = field(default_factory=lambda: defaultdict(_Samples))

    @property
    def num_replicas(self) -> int:
        """With one there is nothing to sum, and nothing is measured."""
        return dist.get_world_size() // min(self.options.degrees)

    @property
    def num_units(self) -> int:
        """Times that `run` yields."""
        return 4 * (NUM_WARM_UP_STEPS + self.options.num_steps) if self.num_replicas > 1 else 0

    def run(self) -> Iterator[None]:
        """One round over all kinds of step, yielding after every step."""
        if self.num_replicas == 1:
            return
        tokens = torch.randint(
            self.model.vocab,
            (self.num_replicas * min(self.options.block_sequences), self.options.seq_len + 1),
            generator=torch.Generator().manual_seed(0),
        )
        levels: tuple[Literal[0, 1], ...] = (0, 1)
        for zero in levels:
            plan = replicated_plan(self.model, self.cluster, self.options, num_replicas=self.num_replicas, zero=zero)
            for overlap in (False, True):
                yield from self._steps(plan, zero, overlap, tokens)

    def _steps(self, plan: Plan, zero: int, overlap: bool, tokens: torch.Tensor) -> Iterator[None]:
        optimizer = OptimizerOptions(learning_rate=1e-5, num_steps=10**6)
        engine = Engine(plan, optimizer, device=self.device, seed=0, clock=Clock(self.device), overlap=overlap)
        samples = self._samples[zero, overlap]
        for step in range(1, NUM_WARM_UP_STEPS + self.options.num_steps + 1):
            dist.barrier()
            seconds = engine.step(step, lambda first, count: tokens[first : first + count]).seconds
            if step > NUM_WARM_UP_STEPS:
                samples.step.append(sum(seconds.values()))
                samples.sync.append(seconds.get("gradient_sync", 0.0))
                samples.backward.append(seconds.get("backward", 0.0))
            yield

    def timings(self) -> tuple[OverlapTiming, ...]:
        """Over all ranks; a collective."""
        return tuple(
            OverlapTiming(
                sharded=bool(zero),
                sync_seconds=gathered_timing(self._samples[zero, False].sync).mean_seconds,
                backward_seconds=gathered_timing(self._samples[zero, False].backward).mean_seconds,
                apart=gathered_timing(self._samples[zero, False].step),
                overlapped=gathered_timing(self._samples[zero, True].step),
            )
            for zero in sorted({zero for zero, _ in self._samples})
        )


class ReservedMemory:
    """Bytes of a GPU that tensors cannot have: context, communicators, and what the allocator holds beyond them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slack = 0

    def begin(self) -> None:
        """Before a layout: forget what earlier ones left in the allocator."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        """After a layout: keep the largest difference between what was reserved and what was used at most."""
        if self._device.type == "cuda":
            held = torch.cuda.max_memory_reserved(self._device) - torch.cuda.max_memory_allocated(self._device)
            self._slack = max(self._slack, held)

    def total(self) -> int:
        """Of the fullest rank; a collective.  0 on a CPU.  Assumes that no other process uses the device."""
        if self._device.type != "cuda":
            return 0
        free, whole = torch.cuda.mem_get_info(self._device)
        outside = whole - free - torch.cuda.memory_reserved(self._device)
        fullest = torch.tensor(outside + self._slack, device=self._device)
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
        return int(fullest)
