"""The last rung: from the fastest plan to the one that delivers most.

    maximise    tokens per step / step seconds x G x X
    G renewal factor, X degraded-operation factor (`cost_models.goodput`)

G X depends on a layout only through its replicas and the ranks that a stage spans, so it is one number for a grid
point.  With "seconds delivered" = step seconds / (G X) the search of step time serves unchanged: each grid point
sees the incumbent in its own step seconds (`WorthView`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cost_models.goodput import factors_of
from planner.grid_search import Incumbent
from planner.layout import Layout
from planner.space import Grid

Worth = Callable[[Grid, float], float]


@dataclass
class WorthView:
    """An incumbent in seconds delivered, as a grid point of a given worth (G X) sees it: in step seconds."""

    incumbent: Incumbent
    worth: float

    @property
    def seconds(self) -> float:
        return self.incumbent.seconds * self.worth

    def offer(self, layout: Layout, at_least: float) -> None:
        """As the incumbent's, for a bound in step seconds."""
        self.incumbent.offer(layout, at_least / self.worth)


def make_worth(*, num_ranks: int, devices_per_node: int, state_bytes_per_rank: int) -> Worth:
    """G X of a grid point whose step takes some seconds, as `price` will find it."""

    def worth(grid: Grid, step_seconds: float) -> float:
        return factors_of(
            num_ranks=num_ranks,
            num_replicas=grid.num_replicas,
            devices_per_node=devices_per_node,
            ranks_per_group=grid.num_ranks,
            step_seconds=step_seconds,
            state_bytes_per_rank=state_bytes_per_rank,
        ).factor

    return worth
