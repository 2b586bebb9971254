"""The outer search: branch and bound over grid points, for one freedom of the ladder.

Grid points are visited in the order of a bound that needs no memory; each is then bounded by its relaxed partition
and searched (`grid_search`) only while that bound is below the best layout so far.  The least bound left is the bound
of the whole space.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from cost_models.interface import CostModel
from planner.blocks import stage_degrees
from planner.chain import Chain, make_chain
from planner.constraints import Rules
from planner.goal import Worth, WorthView
from planner.grid_search import Best, GridSearch, Incumbent
from planner.interleaved import Interleaved
from planner.menu import Menu
from planner.options import OptionSource
from planner.outcome import Outcome
from planner.quick_bounds import QuickBounds
from planner.restriction import Restriction
from planner.shape_bound import shape_bound
from planner.space import Grid, Topology, enumerate_grids, variants
from planner.uniform import EvenSplits
from specs.model import ModelSpec
from specs.plan import TrainingSpec

if TYPE_CHECKING:
    from planner.program import Program

# Relative distance between bound and layout at which a search stops and calls the layout optimal.
TOLERANCE = 2e-4

# How close to its bound a layout is to be that the other searches begin with.
ROUGHLY = 0.02

# Labels and dynamic programming (`grid_search`), or an integer program (`program`).
Engine = Literal["dp", "ilp"]
Freedom = Literal["uniform", "layers", "stages", "modules", "cuts", "interleaved"]
FREEDOMS: tuple[Freedom, ...] = ("uniform", "layers", "stages", "modules", "cuts", "interleaved")


class WithoutChance(NamedTuple):
    """Grid points that cannot beat an incumbent under a freedom, with cause and bound; bounds of shapes made for it."""

    freedom: Freedom
    discarded: dict[Grid, tuple[str, float]]
    shapes: dict[tuple[Freedom, Grid], float]


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
        context: int = 1,
        rules: Rules | None = None,
        engine: Engine = "dp",
    ) -> None:
        """`rules`: the user's constraints; None for none.  `engine` searches inside grid points."""
        self.model = model
        self.training = training
        self.topology = topology
        self.capacity = capacity
        self.engine = engine
        self.rules = Rules(()) if rules is None else rules
        self.chain = make_chain(model, rules=rules)
        self.source = OptionSource(self.chain, training, costs, topology)
        self.grids = [
            grid
            for grid in enumerate_grids(
                topology,
                training,
                max_stages=min(topology.num_ranks, self.chain.num_positions - 1),
                max_ranks_per_stage=max_ranks_per_stage,
                context=context,
            )
            if (self.rules.boundaries is None or grid.num_stages == len(self.rules.boundaries) - 1)
            # A tied weight that lies on two stages is used at two moments, so it cannot be gathered for both.
            and not (grid.zero == 3 and grid.num_stages > 1 and self.source.tied)
        ]
        self._discarded: dict[Grid, tuple[str, float]] = {}
        self._fine: Chain | None = None
        self.quick = QuickBounds(self.source)
        self.quick_bound, self.evenly = self.quick.seconds, self.quick.evenly
        # Step seconds that no layout of a grid point beats, as far as searches of a freedom have shown.
        self._known: dict[tuple[Freedom, Grid], float] = {}
        self._shapes: dict[tuple[Freedom, Grid], float] = {}
        # Inner searches by freedom, variant and way to count memory: going on with one is cheaper than beginning anew.
        self._inner: dict[tuple[Freedom, Grid, bool], list[GridSearch | Program]] = {}

    def within(self, capacity: float) -> Searcher:
        """The same problem in other bytes per rank; costs are not asked for again."""
        other = copy.copy(self)
        other.capacity, other._discarded, other._known, other._inner, other._shapes = capacity, {}, {}, {}, {}
        other.__dict__.pop("interleaved", None)
        return other

    def branch(self) -> Searcher:
        """The same problem, to be searched beside this: it knows what this one knows, and then each learns its own."""
        other = self.within(self.capacity)
        other._discarded, other._known, other._shapes = self._discarded.copy(), self._known.copy(), self._shapes.copy()
        return other

    @cached_property
    def interleaved(self) -> Interleaved:
        """The interleaved layouts of the problem, as far as searches have looked at them."""
        return Interleaved(self)

    def search(
        self,
        freedom: Freedom,
        incumbent: Incumbent,
        *,
        deadline: float,
        tolerance: float = TOLERANCE,
        worth: Worth | None = None,
        hopeless: Callable[[], WithoutChance] | None = None,
    ) -> Outcome:
        """The best layout of a freedom, starting from what the incumbent already has.

        With `worth` the one that delivers most: incumbent, outcome and bound in seconds delivered.  Uses what a search
        of the same freedom by step time has shown.  `hopeless` is asked as late as can be what to leave out.
        """
        outcome = Outcome(None, float("inf"), float("inf"), complete=True)
        before = len(incumbent.priced)
        if freedom == "interleaved":
            self.interleaved.search(incumbent, outcome, worth, tolerance=tolerance, deadline=deadline)
        if hopeless is not None:
            self.leave_out(hopeless())
        if freedom == "uniform":
            EvenSplits(self).search(incumbent, outcome, worth, deadline=deadline)
        elif worth is None:
            self._best_first(_of_stages(freedom), incumbent, outcome, tolerance, deadline)
        else:
            self._deliver(_of_stages(freedom), incumbent, worth, outcome, tolerance, deadline)
        outcome.evaluated = len(incumbent.priced) - before
        outcome.layout, outcome.seconds = incumbent.layout, incumbent.seconds
        outcome.bound = min(outcome.bound, outcome.seconds)
        return outcome

    def begin(self, freedom: Freedom, incumbent: Incumbent, *, deadline: float) -> None:
        """Some good layout, found quickly: of grid points that promise most, to within `ROUGHLY` of their bounds."""
        some = Outcome(None, float("inf"), float("inf"), complete=False)
        for grid in sorted(self.grids, key=self._promise):
            enough = incumbent.seconds * (1.0 - ROUGHLY)
            if self._promise(grid) >= enough or time.monotonic() > deadline:
                break
            why, _ = self._relaxed_bound(grid, freedom, enough)
            if why is None:
                self._search_variants(grid, freedom, incumbent, some, ROUGHLY, deadline)

    def without_chance(
        self, freedom: Freedom, incumbent: Incumbent, *, deadline: float, tolerance: float = TOLERANCE
    ) -> WithoutChance:
        """The grid points that cannot beat the incumbent even under this freedom, nor under those below it."""
        freedom = _of_stages(freedom)
        enough = incumbent.seconds * (1.0 - tolerance)
        known, discarded = set(self._shapes), dict[Grid, tuple[str, float]]()
        for grid in [grid for grid in self.grids if self.quick_bound(grid) < enough]:
            if time.monotonic() > deadline:
                break
            cause, bound = self._relaxed_bound(grid, freedom, enough)
            if cause is not None:
                discarded[grid] = (cause, bound)
        return WithoutChance(freedom, discarded, {key: self._shapes[key] for key in self._shapes.keys() - known})

    def leave_out(self, found: WithoutChance) -> None:
        """Of later searches, which are to be of its freedom or of those below it."""
        self._shapes.update(found.shapes)
        self._discarded.update(found.discarded)
        self._known.update({(found.freedom, grid): bound for grid, (_, bound) in found.discarded.items()})

    def _deliver(
        self,
        freedom: Freedom,
        incumbent: Incumbent,
        worth: Worth,
        outcome: Outcome,
        tolerance: float,
        deadline: float,
    ) -> None:
        ordered, enough = [], incumbent.seconds * (1.0 - tolerance)
        for grid in self.grids:
            known = max(self.quick_bound(grid), self._known.get((freedom, grid), 0.0))
            if known >= enough:  # and G X is at most 1
                outcome.pruned["seconds delivered"] += 1
                outcome.bound = min(outcome.bound, known)
            else:
                value = worth(grid, known)
                ordered.append((known / value, value, grid))
        ordered.sort(key=lambda entry: entry[0])
        for position, (lower, value, grid) in enumerate(ordered):
            late = time.monotonic() > deadline
            if late or lower >= incumbent.seconds * (1.0 - tolerance):
                outcome.complete = not late
                outcome.pruned["time limit" if late else "seconds delivered"] += len(ordered) - position
                outcome.bound = min(outcome.bound, lower)
                break
            view = WorthView(incumbent, value)
            why, bound = self._relaxed_bound(grid, freedom, view.seconds * (1.0 - tolerance))
            if why is not None:
                outcome.pruned[why] += 1
            else:
                bound = self._search_variants(grid, freedom, view, outcome, tolerance, deadline)
            outcome.bound = min(outcome.bound, max(lower, bound / value))

    def _best_first(
        self, freedom: Freedom, incumbent: Incumbent, outcome: Outcome, tolerance: float, deadline: float
    ) -> None:
        for cause, bound in self._discarded.values():
            outcome.pruned[cause] += 1
            outcome.bound = min(outcome.bound, bound)
        left = [grid for grid in self.grids if grid not in self._discarded]
        left.sort(key=self._promise)
        for grid in left:
            bound = max(self.quick_bound(grid), self._known.get((freedom, grid), 0.0))
            enough = incumbent.seconds * (1.0 - tolerance)
            if bound >= enough:
                outcome.pruned["seconds without memory"] += 1
            elif time.monotonic() > deadline:
                outcome.complete = False
                outcome.pruned["time limit"] += 1
            else:
                why, bound = self._relaxed_bound(grid, freedom, enough)
                if why is not None:
                    outcome.pruned[why] += 1
                else:
                    bound = self._search_variants(grid, freedom, incumbent, outcome, tolerance, deadline)
                self._known[freedom, grid] = bound
            outcome.bound = min(outcome.bound, bound)

    def _promise(self, grid: Grid) -> float:
        """What a grid point may take with its pipeline filled and drained: no bound, but tells which to try first."""
        bubble = (grid.num_stages - 1) / grid.num_micro_batches
        return self.evenly(grid) * (1.0 + bubble * (0.4 if grid.schedule == "zb-h1" else 1.0))

    def _relaxed_bound(self, grid: Grid, freedom: Freedom, enough: float) -> tuple[str | None, float]:
        """Why no variant of a grid point can be below `enough` (None: one may be), and the bound that says so."""
        if grid.num_stages > 1:
            least = self._shape_bound(grid, freedom, enough)
            if least >= enough:
                return "seconds of any schedule", least
        least, why = float("inf"), "divisibility"
        for menus in self.menus(grid, freedom, optimistic=True):
            if not self._may_fit(grid, menus):
                why = "memory"
                continue
            bound = self._grid_search(grid, freedom, menus, optimistic=True, with_sync=False).quick_bound(enough)
            if bound < enough:
                return None, bound
            least, why = min(least, bound), "memory" if bound == float("inf") else "seconds within memory"
        return why, least

    def _shape_bound(self, grid: Grid, freedom: Freedom, enough: float) -> float:
        """A bound for all schedules of a shape, from a search of one of them; `inf` where none fits."""
        shape = replace(grid, schedule="1f1b")
        known = self._shapes.get((freedom, shape))
        if known is None:
            capacity = self.capacity - self.source.edge_bytes(shape, optimistic=True)
            known = min(
                (
                    shape_bound(self.chain_of(freedom), shape, menus, self.source, capacity=capacity, enough=enough)
                    for menus in self.menus(shape, freedom, optimistic=True)
                    if self._may_fit(shape, menus)
                ),
                default=float("inf"),
            )
            self._shapes[freedom, shape] = known
        return known

    def _search_variants(
        self,
        grid: Grid,
        freedom: Freedom,
        incumbent: Best,
        outcome: Outcome,
        tolerance: float,
        deadline: float,
    ) -> float:
        """Search with memory that is never counted too low; where it may be too high, bound with less."""
        bound = float("inf")
        for variant in self.distinct_variants(grid):
            uncertain = self.source.memory_is_uncertain(variant, self.capacity)
            for optimistic in (False, True) if uncertain else (False,):
                key = (freedom, variant, optimistic)
                if key not in self._inner:
                    all_menus = self.menus(variant, freedom, optimistic=optimistic)
                    self._inner[key] = [
                        self._grid_search(variant, freedom, menus, optimistic=optimistic) for menus in all_menus
                    ]
                for search in self._inner[key]:
                    labels, nodes = search.num_labels, search.num_nodes
                    found = search.run(incumbent, tolerance, deadline)
                    outcome.labels += search.num_labels - labels
                    outcome.nodes += search.num_nodes - nodes
                    if optimistic == uncertain:
                        bound = min(bound, found)
        return bound

    def _grid_search(
        self, grid: Grid, freedom: Freedom, menus: Sequence[Menu], *, optimistic: bool = False, with_sync: bool = True
    ) -> GridSearch | Program:
        capacity = self.capacity - self.source.edge_bytes(grid, optimistic=optimistic)
        chain = self.chain_of(freedom)
        if self.engine == "ilp":
            from planner.program import Program  # PuLP and HiGHS take long to import

            return Program(chain, grid, menus, self.source, capacity=capacity, with_sync=with_sync)
        return GridSearch(chain, grid, menus, self.source, capacity=capacity, with_sync=with_sync)

    def distinct_variants(self, grid: Grid) -> list[Grid]:
        """Variants of a grid that cost something different."""
        found: dict[object, Grid] = {}
        for variant in variants(grid):
            rates = tuple(self.source.rates.sync(variant, degree) for degree in stage_degrees(grid.num_ranks))
            found.setdefault((variant.zero, rates, self.source.transfer_seconds(variant)), variant)
        return list(found.values())

    def _may_fit(self, grid: Grid, menus: Sequence[Menu]) -> bool:
        """False when even the smallest option of every module leaves the stages together too full."""
        held = min(grid.flights(stage)[0].kept for stage in (0, grid.num_stages - 1))
        least = np.minimum.reduce([m.least(m.every.static + held * m.every.activation) for m in menus])
        return float(self.chain.totals @ least) <= grid.num_stages * (
            self.capacity - self.source.edge_bytes(grid, optimistic=True)
        )

    def menus(self, grid: Grid, freedom: Freedom, *, optimistic: bool = False) -> Iterator[list[Menu]]:
        """The menus that the stages of a grid point choose among: one list for each way to meet the user's rules that
        tie modules together (one in all without such rules), none of them empty.
        """
        usual = stage_degrees(grid.num_ranks)
        for family in self.rules.families([grid.num_ranks] if freedom == "layers" else usual):
            degrees = family.degrees
            if freedom == "layers":
                degrees = (grid.num_ranks,)
            choices = [(d,) for d in (degrees or usual)] if freedom == "stages" else [degrees]
            restrictions = [Restriction(choice, groups=family.groups) for choice in choices]
            if self.source.tied and grid.num_stages == 1:
                restrictions += [replace(one, tied=degree) for one in restrictions for degree in one.degrees or usual]
            found = (self.source.menu(grid, restriction, optimistic=optimistic) for restriction in restrictions)
            if menus := [menu for menu in found if menu is not None]:
                yield menus

    def chain_of(self, freedom: Freedom) -> Chain:
        """The chain with the stage boundaries that a freedom allows."""
        if freedom != "cuts":
            return self.chain
        if self._fine is None:
            self._fine = make_chain(self.model, "modules", self.rules if self.rules.by_module else None)
        return self._fine


def _of_stages(freedom: Freedom) -> Freedom:
    """Of the layouts that are not interleaved."""
    return "cuts" if freedom == "interleaved" else freedom
