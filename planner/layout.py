"""From counts to names: turn a solved grid point into the pipelines and replicas of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.chain import Chain
from planner.space import Grid, Topology
from specs.model import Attention
from specs.plan import ModulePlacement, Pipeline, Recompute, Replica, Stage


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a module on its stage's ranks."""

    blocks: tuple[int, ...]
    recompute: Recompute

    @property
    def degree(self) -> int:
        return max(self.blocks)


# For every distinct module of a stage: (option, how many of the modules take it).
Assignment = tuple[tuple[tuple[Option, int], ...], ...]


@dataclass(frozen=True)
class Layout:
    """A solved grid point: where the stages begin (module indices, plus the length) and what their modules do.

    With V virtual stages, these are the P V runs of the chain: run i lies on stage i mod P.
    """

    grid: Grid
    boundaries: tuple[int, ...]
    stages: tuple[Assignment, ...]


def make_pipeline(layout: Layout, chain: Chain) -> Pipeline:
    """Modules of one kind take their options in runs along the chain, larger degrees and less recompute first."""
    grid = layout.grid
    runs = []
    for (start, stop), assignment in zip(pairwise(layout.boundaries), layout.stages, strict=True):
        waiting = {kind: _in_order(chosen) for kind, chosen in enumerate(assignment)}
        placements = []
        for index in range(start, stop):
            option = waiting[chain.kinds[index]].pop()
            placements.append(
                ModulePlacement(
                    module=chain.names[index],
                    blocks=option.blocks,
                    recompute=option.recompute,
                    zero=grid.zero,
                )
            )
        runs.append(tuple(placements))
    stages = []
    for stage in range(grid.num_stages):
        own = runs[stage :: grid.num_stages]
        stages.append(
            Stage(
                num_ranks=grid.num_ranks,
                modules=tuple(placement for run in own for placement in run),
                virtual_stages=tuple(map(len, own)) if grid.num_virtual > 1 else None,
            )
        )
    shared = any(
        isinstance(chain.modules[kind], Attention) and grid.micro_batch * option.degree % grid.num_ranks
        for assignment in layout.stages
        for kind, chosen in enumerate(assignment)
        for option, _ in chosen
    )
    return Pipeline(
        micro_batch=grid.micro_batch,
        stages=tuple(stages),
        context_parallel=grid.context if shared else 1,
        schedule=grid.schedule,
    )


def make_replicas(grid: Grid, topology: Topology) -> tuple[Replica, ...]:
    """Ranks of every replica, in stage order."""
    sequences = grid.micro_batch * grid.num_micro_batches
    positions = np.concatenate([grid.stage_positions(stage) for stage in range(grid.num_stages)], axis=1)
    rows = topology.ranks[positions].tolist()
    return tuple(Replica(pipeline=0, ranks=tuple(row), sequences=sequences) for row in rows)


def _in_order(chosen: Sequence[tuple[Option, int]]) -> list[Option]:
    """Options one by one, in reverse, so that `pop` takes the first."""
    weight = {"keep": -1, "none": 0, "selective": 1, "full": 2}
    ordered = sorted(chosen, key=lambda pair: (pair[0].degree, -weight[pair[0].recompute], pair[0].blocks))
    return [option for option, number in ordered for _ in range(number)]
