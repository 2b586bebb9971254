"""Shapes that promise most on a cluster that is not as even as the search takes it to be, and the best layout of each.

The search rules out all shapes that lose with equal ranks.  Where ranks are slow or missing one of those may win, so
the rungs above it take shapes by a guess of their own, and search each by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from planner.grid_search import Incumbent
from planner.layout import Layout
from planner.search import Searcher
from planner.space import Grid

# How close to its bound each of them is searched.
CLOSE = 2e-3


Shape = tuple[int, ...]


def shape_of(grid: Grid) -> Shape:
    """Stages, ranks of each, replicas."""
    return grid.num_stages, grid.num_ranks, grid.num_replicas


def promising(
    searcher: Searcher, slowed: Callable[[Grid], float], shape: Callable[[Grid], Shape] = shape_of
) -> list[tuple[float, list[Grid]]]:
    """Grid points by shape, with what one may take at best (a guess: seconds with equal ranks times `slowed`), shortest
    first.
    """
    groups: defaultdict[Shape, list[Grid]] = defaultdict(list)
    for grid in searcher.grids:
        groups[shape(grid)].append(grid)
    guessed = [(min(map(searcher.evenly, own)) * slowed(own[0]), own) for own in groups.values()]
    return sorted((one for one in guessed if one[0] < float("inf")), key=lambda one: one[0])


def best_of(
    grids: list[Grid], searcher: Searcher, price: Callable[[Layout], float], *, within: float, deadline: float
) -> Layout | None:
    """The fastest layout of some grid points, degrees per module, if it takes less than `within` seconds."""
    own = searcher.within(searcher.capacity)
    incumbent = Incumbent(price, within)
    own.grids = grids
    own.search("modules", incumbent, deadline=deadline, tolerance=CLOSE)
    return incumbent.layout
