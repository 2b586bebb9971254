"""How the choice between the layouts that were priced changes with the failure rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cost_models.break_even import Candidate, best_by_rate, candidate_of
from planner.describe import describe
from planner.layout import Layout
from specs.evidence import RateChoice
from specs.plan import Plan, Prediction

# Layouts with other stages, ranks or replicas that are compared, the fastest ones.
MOST_SHAPES = 5


def rate_choices(plan: Plan, predictions: Mapping[Layout, Prediction], chosen: Layout) -> tuple[RateChoice, ...]:
    """Best layouts from rare failures to frequent ones.  `plan` is the chosen one's; `predictions` are those that fit.

    Goodput depends on a layout only through its speed, its replicas and the ranks of a stage, so that of every such
    shape the fastest layout stands for all.
    """
    fastest: dict[tuple[int, int, int], Layout] = {}
    for layout in sorted(predictions, key=lambda layout: predictions[layout].step_time_seconds):
        grid = layout.grid
        fastest.setdefault((grid.num_stages, grid.num_ranks, grid.num_replicas), layout)
    layouts = list(dict.fromkeys([chosen, *fastest.values()]))[: MOST_SHAPES + 1]
    base = candidate_of(plan, predictions[chosen])
    found = best_by_rate([_candidate(base, layout, predictions[layout]) for layout in layouts])
    return _as_choices(found, layouts, predictions, chosen)


def _candidate(base: Candidate, layout: Layout, predicted: Prediction) -> Candidate:
    """The chosen plan's candidate with another layout's speed and shape."""
    return Candidate(
        tokens_per_second=predicted.tokens_per_second,
        num_ranks=base.num_ranks,
        num_replicas=layout.grid.num_replicas,
        devices_per_node=base.devices_per_node,
        step_seconds=predicted.step_time_seconds,
        state_bytes_per_rank=base.state_bytes_per_rank,
        ranks_per_group=layout.grid.num_ranks,
        spare_nodes=base.spare_nodes,
    )


def _as_choices(
    found: Sequence[tuple[int, float]],
    layouts: Sequence[Layout],
    predictions: Mapping[Layout, Prediction],
    chosen: Layout,
) -> tuple[RateChoice, ...]:
    return tuple(
        RateChoice(
            layout=describe(layouts[index]),
            chosen=layouts[index] == chosen,
            step_time_seconds=predictions[layouts[index]].step_time_seconds,
            until_days=None if math.isinf(rate) else 1.0 / rate,
        )
        for index, rate in found
    )
