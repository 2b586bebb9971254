"""A plan as JSON for scripts, its modules in runs that are placed alike.  Without what draws tables, slow to import."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from specs.plan import ModulePlacement, Plan, Stage


def as_json(plan: Plan) -> dict[str, Any]:
    """The keys that scripts read, and the whole layout."""
    names = {"predicted", "certificate", "ladder", "alternatives", "rate_choices", "contingencies"}
    found = plan.model_dump(mode="json", include=names)
    pipelines = [
        {
            "micro_batch": pipeline.micro_batch,
            "schedule": pipeline.schedule,
            "stages": [
                {
                    "num_ranks": stage.num_ranks,
                    "virtual_stages": stage.virtual_stages,
                    "modules": [_run(stage, run) for run in runs(stage)],
                }
                for stage in pipeline.stages
            ],
        }
        for pipeline in plan.pipelines
    ]
    return {
        "model": plan.model.name,
        "cluster": plan.cluster.name,
        "world_size": plan.world_size,
        "num_replicas": len(plan.replicas),
        "pipelines": pipelines,
        **found,
    }


def runs(stage: Stage) -> list[list[ModulePlacement]]:
    """Modules of a stage by kind, split where the placement changes, in order of their first module."""
    kinds: dict[str, list[ModulePlacement]] = {}
    for placement in stage.modules:
        kinds.setdefault(placement.module.rsplit(".", 1)[-1], []).append(placement)
    found = [
        list(run)
        for of_kind in kinds.values()
        for _, run in groupby(of_kind, key=lambda p: (p.blocks, p.cuts, p.recompute, p.zero))
    ]
    position = {placement.module: index for index, placement in enumerate(stage.modules)}
    return sorted(found, key=lambda run: position[run[0].module])


def names(stage: Stage, run: list[ModulePlacement]) -> str:
    """`layers 0-31 attention`, `layer 3 mlp`, `embedding`; `layers 0-3, 16-19 mlp` on two virtual stages."""
    parts = run[0].module.split(".")
    if len(parts) == 1:
        return parts[0]
    turns = {placement.module: turn for turn, own in enumerate(stage.runs()) for placement in own}
    layers = [
        [placement.module.split(".")[1] for placement in own] for _, own in groupby(run, lambda p: turns[p.module])
    ]
    ranges = [own[0] if own[0] == own[-1] else f"{own[0]}-{own[-1]}" for own in layers]
    one = layers[0][0] == layers[-1][-1]
    return f"{'layer' if one else 'layers'} {', '.join(ranges)} {parts[2]}"


def _run(stage: Stage, run: list[ModulePlacement]) -> dict[str, Any]:
    return {
        "modules": names(stage, run),
        "count": len(run),
        "blocks": list(run[0].blocks),
        "recompute": run[0].recompute,
        "zero": run[0].zero,
    }
