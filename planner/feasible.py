"""Does any layout exist within a memory and a step time?  A search that ends with the first."""

from __future__ import annotations

from dataclasses import dataclass

from planner.grid_search import Incumbent
from planner.layout import Layout
from planner.search import Freedom, Searcher


@dataclass
class FirstWithin(Incumbent):
    """Takes the first layout below `seconds`; none is better after that."""

    def offer(self, layout: Layout, at_least: float) -> None:
        super().offer(layout, at_least)
        if self.layout is not None:
            self.seconds = 0.0


def some_layout(searcher: Searcher, incumbent: FirstWithin, freedom: Freedom, *, deadline: float) -> Layout | None:
    """Any layout that the incumbent accepts: uniform ones first, then under a freedom."""
    searcher.search("uniform", incumbent, deadline=deadline)
    if incumbent.layout is None and freedom != "uniform":
        searcher.search(freedom, incumbent, deadline=deadline)
    return incumbent.layout
