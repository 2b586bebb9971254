"""Every plan of a tiny problem, one by one, priced by the cost models: the oracle of the solver's tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

from pydantic import ValidationError

from cost_models.interface import CostModel
from cost_models.step import price
from specs.cluster import ClusterSpec
from specs.model import ModelSpec, num_units
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Replica, Stage, TrainingSpec

MADE = Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z")


def all_pipelines(
    model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec, known: frozenset[tuple[str, int, str]]
) -> Iterator[tuple[Pipeline, tuple[Replica, ...]]]:
    """Everything in the space of the freedom `modules`, with the options in `known` (kind, degree, recompute)."""
    ranks = cluster.ranks()
    total = len(ranks)
    for num_ranks in (d for d in range(1, cluster.nodes[0].devices_per_node + 1) if total % d == 0):
        for num_stages in (p for p in range(1, total // num_ranks + 1) if total // num_ranks % p == 0):
            num_replicas = total // num_ranks // num_stages
            if training.global_batch % num_replicas:
                continue
            share = training.global_batch // num_replicas
            for micro_batch in (b for b in range(1, share + 1) if share % b == 0):
                for stages in _stages(model, num_ranks, num_stages, known):
                    several = num_stages > 1 and share > micro_batch
                    for schedule in ("1f1b", "gpipe", "zb-h1") if several else ("1f1b",):
                        for order in ("replica", "stage") if num_stages > 1 and num_replicas > 1 else ("replica",):
                            yield (
                                Pipeline(micro_batch=micro_batch, stages=stages, schedule=schedule),
                                _replicas(ranks, num_stages, num_ranks, num_replicas, share, order),
                            )


def compositions(num_ranks: int) -> list[tuple[int, ...]]:
    """Blocks whose sizes differ by at most one, the larger first; of those with the same largest one the fewest.  Only
    equal ones where the ranks are a power of two.
    """
    found: dict[int, tuple[int, ...]] = {}
    for number in range(1, num_ranks + 1):
        blocks = tuple(sorted(num_ranks * (i + 1) // number - num_ranks * i // number for i in range(number))[::-1])
        if len(set(blocks)) == 1 or num_ranks not in (1, 2, 4, 8):
            found.setdefault(max(blocks), blocks)
    return list(found.values())


def _stages(
    model: ModelSpec, num_ranks: int, num_stages: int, known: frozenset[tuple[str, int, str]]
) -> Iterator[tuple[Stage, ...]]:
    """All cuts between layers, all options of all modules, optimizer (1), gradients (2) and weights (3) sharded."""
    named = model.modules()
    starts = [i for i in range(1, len(named)) if _layer(named[i].name) != _layer(named[i - 1].name)]
    options = []
    for _, module in named:
        modes = sorted({mode for kind, _, mode in known if kind == module.kind})
        options.append(
            [
                (blocks, mode)
                for blocks in compositions(num_ranks)
                for mode in modes
                if max(blocks) <= num_units(module) and all((module.kind, size, mode) in known for size in blocks)
            ]
        )
    for inner in combinations(starts, num_stages - 1):
        for chosen in product(*options):
            for zero in (0, 1, 2, 3):
                placed = [
                    ModulePlacement(module=name, blocks=blocks, recompute=mode, zero=zero)
                    for (name, _), (blocks, mode) in zip(named, chosen, strict=True)
                ]
                yield tuple(
                    Stage(num_ranks=num_ranks, modules=tuple(placed[a:b])) for a, b in pairwise((0, *inner, len(named)))
                )


def _layer(name: str) -> str:
    return name.rsplit(".", 1)[0]


def _replicas(
    ranks: tuple[int, ...], num_stages: int, num_ranks: int, num_replicas: int, share: int, order: str
) -> tuple[Replica, ...]:
    found = []
    for r in range(num_replicas):
        blocks = [s * num_replicas + r if order == "stage" else r * num_stages + s for s in range(num_stages)]
        own = tuple(ranks[block * num_ranks + i] for block in blocks for i in range(num_ranks))
        found.append(Replica(pipeline=0, ranks=own, sequences=share))
    return tuple(found)


def all_plans(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    costs: CostModel,
    known: frozenset[tuple[str, int, str]],
) -> list[tuple[Pipeline, float, int]]:
    """(pipeline, step seconds, peak bytes) of every plan that can be."""
    found = []
    for pipeline, replicas in all_pipelines(model, cluster, training, known):
        try:
            plan = Plan(
                made=MADE, model=model, cluster=cluster, training=training, pipelines=(pipeline,), replicas=replicas
            )
        except ValidationError:
            continue
        prediction = price(plan, costs)
        found.append((pipeline, prediction.step_time_seconds, prediction.peak_memory_bytes))
    return found
