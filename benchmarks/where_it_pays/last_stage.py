"""Head and loss make the last stage of an even pipeline the straggler: even stages, uneven ones, degrees per module.

Published: uneven stages, with the loss layer in the last, are a cause in 39 % of slow jobs (arXiv 2505.05713).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.where_it_pays.cases import MADE, preset
from benchmarks.where_it_pays.shapes import gemma_shape
from cost_models.sources import device_costs
from planner.constraints import Constraints
from planner.describe import describe
from planner.grid_search import Incumbent
from planner.make import Problem
from planner.problem import Pricer, make_searcher
from planner.search import Freedom
from specs.model import ModelSpec
from specs.plan import TrainingSpec
from specs.presets import cluster_preset


@dataclass(frozen=True)
class LongPipeline:
    """A job on so many stages."""

    model: Callable[[], ModelSpec]
    cluster: str
    stages: int
    global_batch: int
    seq_len: int


PIPELINES = (
    LongPipeline(preset("llama-3-8b"), "h100x32", 4, 256, 8192),
    LongPipeline(gemma_shape, "a100-40gx32", 4, 256, 4096),
)


def even_stages(model: ModelSpec, stages: int) -> Constraints:
    """Stages of equally many layers, the longer ones first: the last has the head already."""
    each, more = divmod(model.num_layers, stages)
    cuts = [each * stage + min(stage, more) for stage in range(stages + 1)]
    return Constraints(stages=",".join(f"{a}-{b - 1}" for a, b in pairwise(cuts)))


def fastest(job: LongPipeline, freedom: Freedom, *, even: bool, time_limit_seconds: float) -> tuple[float, str, float]:
    """Seconds, layout and gap of the fastest plan with that many stages."""
    model = job.model()
    problem = Problem(
        model=model,
        cluster=cluster_preset(job.cluster),
        training=TrainingSpec(global_batch=job.global_batch, seq_len=job.seq_len),
        provenance=MADE,
        constraints=even_stages(model, job.stages) if even else Constraints(),
    )
    searcher = make_searcher(problem, device_costs(problem.cluster, problem.training))
    searcher.grids = [grid for grid in searcher.grids if grid.num_stages == job.stages]
    incumbent = Incumbent(Pricer(problem, searcher).seconds)
    outcome = searcher.search(freedom, incumbent, deadline=time.monotonic() + time_limit_seconds)
    assert outcome.layout is not None
    return outcome.seconds, describe(outcome.layout), outcome.gap


def show_last_stage(time_limit_seconds: float) -> None:
    for job in PIPELINES:
        print(
            f"last-stage: {job.model().name} on {job.cluster}, {job.stages} stages, {job.global_batch} x {job.seq_len}"
        )
        first = None
        rows: list[tuple[str, Freedom, bool]] = [
            ("stages of equally many layers", "layers", True),
            ("uneven stages", "layers", False),
            ("degrees per module", "modules", False),
        ]
        for name, freedom, even in rows:
            seconds, layout, gap = fastest(job, freedom, even=even, time_limit_seconds=time_limit_seconds)
            first = first or seconds
            saved = f"saves {100 * (1 - seconds / first):.2f} % (gap {100 * gap:.2f} %)"
            print(f"  {name:30} {seconds:7.3f} s, {saved}: {layout}", flush=True)
        print()
