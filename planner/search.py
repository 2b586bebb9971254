"""The outer search: branch and bound over grid points, for one freedom of the ladder.

Grid points are visited in the order of a bound that needs no memory; each is then bounded by its relaxed partition
and searched (`grid_search`) only while that bound is below the best layout so far.  The least bound left is the bound
of the whole space.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cost_models.interface import CostModel
from planner.chain import Boundaries, Chain, even_boundaries, make_chain
from planner.grid_search import GridSearch, Incumbent
from planner.layout import Layout
from planner.options import Menu, OptionSource, Restriction
from planner.space import Grid, Topology, divisors, enumerate_grids
from specs.model import ModelSpec
from specs.plan import Recompute, TrainingSpec

# Relative distance between bound and layout at which a search stops and calls the layout optimal.
TOLERANCE = 2e-4

Freedom = Literal["uniform", "layers", "stages", "modules", "cuts"]
FREEDOMS: tuple[Freedom, ...] = ("uniform", "layers", "stages", "modules", "cuts")
_MODES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass
class Outcome:
    """What a search found.  `seconds` and `bound` are `inf` when nothing fits."""

    layout: Layout | None
    seconds: float
    bound: float
    complete: bool
    labels: int = 0
    evaluated: int = 0
    pruned: Counter[str] = field(default_factory=Counter)

    @property
    def gap(self) -> float:
        return max(0.0, (self.seconds - self.bound) / self.seconds) if self.layout is not None else 0.0


class Searcher:
    """Searches one problem under different freedoms; costs are asked for once."""

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        costs: CostModel,
        topology: Topology,
        *,
        capacity: float,
        max_ranks_per_stage: int,
    ) -> None:
        self.model = model
        self.training = training
        self.topology = topology
        self.capacity = capacity
        self.chain = make_chain(model)
        self.source = OptionSource(self.chain, training, costs, topology)
        self.grids = list(
            enumerate_grids(
                topology,
                training,
                max_stages=min(topology.num_ranks, self.chain.num_positions - 1),
                max_ranks_per_stage=max_ranks_per_stage,
            )
        )
        self._chains: dict[object, Chain | None] = {"layers": self.chain}
        self._quick: dict[tuple[int, int, bool], float] = {}

    def search(
        self, freedom: Freedom, incumbent: Incumbent, *, deadline: float, tolerance: float = TOLERANCE
    ) -> Outcome:
        """The best layout of a freedom, starting from what the incumbent already has."""
        outcome = Outcome(None, float("inf"), float("inf"), complete=True)
        before = len(incumbent.priced)
        ordered = sorted(((self.quick_bound(grid), index) for index, grid in enumerate(self.grids)))
        for position, (quick, index) in enumerate(ordered):
            enough = incumbent.seconds * (1.0 - tolerance)
            if quick >= enough:
                outcome.pruned["time"] += len(ordered) - position
                outcome.bound = min(outcome.bound, quick)
                break
            if time.monotonic() > deadline:
                outcome.complete = False
                outcome.bound = min(outcome.bound, quick)
                break
            for search in self._searches(self.grids[index], freedom, outcome):
                bound = search.run(incumbent, tolerance, deadline)
                outcome.labels += search.num_labels
                if bound == float("inf"):
                    outcome.pruned["memory"] += 1
                outcome.bound = min(outcome.bound, bound)
        outcome.evaluated = len(incumbent.priced) - before
        outcome.layout, outcome.seconds = incumbent.layout, incumbent.seconds
        outcome.bound = min(outcome.bound, outcome.seconds)
        return outcome

    def quick_bound(self, grid: Grid) -> float:
        """Step seconds that no layout of a grid point beats, memory aside: all work, spread evenly over the stages."""
        once = self._quick_seconds(grid)
        host = 2.0 * self.source.costs.overhead.other_seconds_per_action
        m, stages = grid.num_micro_batches, grid.num_stages
        if grid.schedule == "gpipe":
            pipeline = once * (1.0 + (m - 1) / stages) + host * (stages + m - 1)
        else:
            pipeline = max(once + host * stages, m * (once / stages + host))
        return pipeline + self.source.costs.overhead.other_seconds_per_step

    def _quick_seconds(self, grid: Grid) -> float:
        """Least seconds of one micro-batch through all modules."""
        key = (grid.num_ranks, grid.micro_batch, grid.num_stages > 1)
        if key not in self._quick:
            menu = self.source.menu(grid, Restriction())
            total = float("inf")
            if menu is not None:
                least = [float((table.forward + table.backward).min()) for table in menu.tables]
                total = sum(n * seconds for n, seconds in zip(self.chain.totals.tolist(), least, strict=True))
            self._quick[key] = total
        return self._quick[key]

    def _searches(self, grid: Grid, freedom: Freedom, outcome: Outcome) -> Iterator[GridSearch]:
        """The inner searches that together make up a freedom at a grid point."""
        chain = self._chain(freedom, grid.num_stages)
        if chain is None:
            outcome.pruned["more stages than layers"] += 1
            return
        capacity = self.capacity - self.source.gathered_bytes(grid)
        for restrictions in _restrictions(freedom, grid):
            menus = self._menus(grid, restrictions)
            if menus:
                yield GridSearch(chain, grid, menus, self.source, capacity=capacity)
            else:
                outcome.pruned["divisibility"] += 1

    def _menus(self, grid: Grid, restrictions: Sequence[Restriction]) -> list[Menu]:
        found = (self.source.menu(grid, restriction) for restriction in restrictions)
        return [menu for menu in found if menu is not None]

    def _chain(self, freedom: Freedom, num_stages: int) -> Chain | None:
        """The chain with the stage boundaries that a freedom allows."""
        key: object = num_stages if freedom == "uniform" else "modules" if freedom == "cuts" else "layers"
        if key not in self._chains:
            if freedom == "uniform":
                even = even_boundaries(self.model, num_stages)
                self._chains[key] = None if even is None else make_chain(self.model, fixed=even)
            else:
                boundaries: Boundaries = "modules" if freedom == "cuts" else "layers"
                self._chains[key] = make_chain(self.model, boundaries)
        return self._chains[key]


def _restrictions(freedom: Freedom, grid: Grid) -> list[list[Restriction]]:
    """Each inner list is one inner search, whose stages choose among its menus."""
    whole = (grid.num_ranks,)
    if freedom == "uniform":
        return [[Restriction(whole, mode)] for mode in _MODES]
    if freedom == "layers":
        return [[Restriction(whole)]]
    if freedom == "stages":
        return [[Restriction((degree,)) for degree in divisors(grid.num_ranks)]]
    return [[Restriction()]]
