"""The inner search as an integer program in PuLP, solved by HiGHS: an engine that shares no search code with the
dynamic program.

For one grid point (P stages of D ranks, m micro-batches) and the menus of options c of distinct modules k:

    q[s,r]   equal positions of run r of the chain that stage s takes      integer   `_add_stages`
    e[s,r]   run r is complete by the end of stage s                       0 or 1
    n[s,c]   modules of stage s that take option c (of module k(c))        integer   `_add_options`
    d[s,u]   stage s uses menu u                                           0 or 1    `_add_menus`
    w[s,v]   the largest working memory of stage s is level v              0 or 1    `_add_memory`
    F, B, W[s]  seconds of a micro-batch forward and backward, and what is split off `_add_seconds`
    t[a]     end of action a of the schedule                                         `_add_actions`
    Y        end of all passes and of the gradient sync                              `_add_schedule`
    E, U, V  exposed gradient sync, optimizer, waiting for stragglers                `_add_once`

    minimise    Y + U + V + constant
    subject to  sum over s of q[s,r] = length of r; run r + 1 begins when r is complete; no stage is empty
                sum over c of k of n[s,c] = modules k in what stage s takes
                n[s,c] <= (number of k) d[s,u(c)];  sum over u of d[s,u] = 1
                sum over c of (static + in flight x activation) n[s,c] + sum over v of level w[s,v] <= capacity,
                at every moment that may be the stage's fullest
                n[s,c] <= (number of k) x sum of w[s,v] over levels v >= working of c;  sum over v of w[s,v] = 1
                t[a] >= t[before a on its stage] + seconds of a;  t[a] >= t[source of a] + transfer + seconds of a
                Y >= every t, of the first stage t + E;  E >= both lines of exposed sync
                U >= update of each stage;  V >= chord of its root

The schedule is exact (up to MAX_ACTIONS actions; beyond, the path families of `planner.paths` stand in for it).
Exposed sync, optimizer and stragglers are lower bounds, so the program's optimum is a bound of the price; the layout
that reaches it is priced by the cost models like any other.  Memory and seconds are scaled to about 1.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pulp

from cost_models.stragglers import expected_maximum
from planner.blocks import stage_degrees
from planner.chain import Chain
from planner.grid_search import Best
from planner.layout import Assignment, Layout, Option
from planner.menu import Menu
from planner.options import OptionSource
from planner.paths import PipelineShape
from planner.rates import Exposure
from planner.space import Grid
from specs.schedule import stage_actions

# Actions of a step that are modelled one by one.
MAX_ACTIONS = 600
# What HiGHS may be off by, relative to 1; subtracted from bounds.
ROUNDING = 1e-8
Expression: TypeAlias = Any  # of PuLP, which has no types


@contextmanager
def _silence() -> Iterator[None]:
    """Nothing on standard output meanwhile: HiGHS prints a banner when it is first made, whatever its options say."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


class Program:
    """One grid point whose stages each use the options of one of `menus`; `capacity` in bytes for modules alone.

    The same interface as `planner.grid_search.GridSearch`.
    """

    def __init__(
        self,
        chain: Chain,
        grid: Grid,
        menus: Sequence[Menu],
        source: OptionSource,
        *,
        capacity: float,
        with_sync: bool = True,
    ) -> None:
        self.num_labels = 0
        self.num_nodes = 0
        self._chain, self._grid, self._menus, self._source = chain, grid, menus, source
        self._fits = capacity > 0.0
        self._capacity = capacity
        self._stages = range(grid.num_stages)
        steps = [int(chain.contents[i, i + 1]) for i in range(chain.num_positions - 1)]
        # Runs of equal positions: what one position holds, and how many there are.
        self._runs = [(chain.counts[content], len(list(same))) for content, same in groupby(steps)]
        # Options: (menu, kind, index), in one list for all stages.
        self._options = [
            (menu, kind, option)
            for menu, of in enumerate(menus)
            for kind, table in enumerate(of.tables)
            for option in range(table.forward.size)
        ]
        self._unit: float = sum(
            count * min(float((menu.tables[kind].forward + menu.tables[kind].backward).min()) for menu in menus)
            for kind, count in enumerate(chain.totals.tolist())
        )
        self._problem = pulp.LpProblem("stages", pulp.LpMinimize)
        self._add_stages()
        self._add_options()
        self._add_menus()
        self._add_memory()
        self._add_seconds()
        self._add_schedule()
        self._add_once(with_sync)

    def run(self, incumbent: Best, tolerance: float, deadline: float) -> float:
        """Offer the program's layout to the incumbent; return a lower bound of this grid point's step seconds
        (`inf`: none fits).
        """
        enough = incumbent.seconds * (1.0 - tolerance)
        relaxed = self.quick_bound(enough)
        if relaxed >= enough or relaxed == np.inf:
            return relaxed
        left = deadline - time.monotonic()
        if left <= 0.0:
            return relaxed
        bound = max(relaxed, self._solve(mip=True, enough=enough, seconds=left, gap=tolerance / 4.0))
        if self._problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            incumbent.offer(self._layout(), relaxed)
        return bound

    def quick_bound(self, enough: float) -> float:  # noqa: ARG002 (as `GridSearch` has it)
        """The bound of the linear relaxation; `inf` when even that has no solution."""
        return self._solve(mip=False, enough=np.inf, seconds=None, gap=None) if self._fits else np.inf

    def _solve(self, *, mip: bool, enough: float, seconds: float | None, gap: float | None) -> float:
        """A lower bound of step seconds, at most `enough`."""
        problem = self._problem
        self._objective.upBound = (enough - self._constant) / self._unit if np.isfinite(enough) else None
        solver = pulp.HiGHS(
            mip=mip,
            msg=False,
            timeLimit=seconds,
            gapRel=gap,
            threads=1,
            primal_feasibility_tolerance=1e-8,
            mip_feasibility_tolerance=1e-7,  # at 1e-9 HiGHS up to 1.16 corrupts its heap (FlexMeasures issue 2527)
        )
        with _silence():
            problem.solve(solver)
        info = problem.solverModel.getInfo()
        if problem.status == pulp.LpStatusInfeasible:
            return enough
        if mip:
            self.num_nodes += max(0, int(info.mip_node_count))
        value = float(info.mip_dual_bound if mip else info.objective_function_value)
        if not np.isfinite(value):  # out of time before the first relaxation
            return 0.0
        return self._unit * (value - ROUNDING) + self._constant

    def _add_stages(self) -> None:
        """Contiguous stages, none empty."""
        last = self._stages[-1]
        reached = [
            [self._variable(f"q_{s}_{r}", 0, length, "Integer") for r, (_, length) in enumerate(self._runs)]
            for s in self._stages
        ]
        self._taken: list[list[Expression]] = []
        for s in self._stages:
            before = reached[s - 1] if s else [0.0] * len(self._runs)
            self._taken.append([reached[s][r] - before[r] for r in range(len(self._runs))])
            for r, (_, length) in enumerate(self._runs):
                self._problem += self._taken[s][r] >= 0
                if s == last:
                    self._problem += reached[s][r] == length
                elif r + 1 < len(self._runs):
                    complete = self._variable(f"e_{s}_{r}", cat="Binary")
                    self._problem += reached[s][r] >= length * complete
                    self._problem += reached[s][r + 1] <= self._runs[r + 1][1] * complete
            self._problem += pulp.lpSum(self._taken[s]) >= 1

    def _add_options(self) -> None:
        """Every module of a stage runs one way."""
        totals = self._chain.totals.tolist()
        self._number = [
            [self._variable(f"n_{s}_{u}_{k}_{c}", 0, totals[k], "Integer") for u, k, c in self._options]
            for s in self._stages
        ]
        for s in self._stages:
            for kind in range(len(totals)):
                of_kind = [n for n, (_, k, _) in zip(self._number[s], self._options, strict=True) if k == kind]
                has = pulp.lpSum(
                    int(content[kind]) * taken
                    for taken, (content, _) in zip(self._taken[s], self._runs, strict=True)
                    if content[kind]
                )
                self._problem += pulp.lpSum(of_kind) == has

    def _add_menus(self) -> None:
        """All modules of a stage choose from one menu."""
        if len(self._menus) == 1:
            return
        totals = self._chain.totals.tolist()
        for s in self._stages:
            uses = [self._variable(f"d_{s}_{u}", cat="Binary") for u in range(len(self._menus))]
            self._problem += pulp.lpSum(uses) == 1
            for number, (menu, kind, _) in zip(self._number[s], self._options, strict=True):
                self._problem += number <= totals[kind] * uses[menu]

    def _add_memory(self) -> None:
        """Every stage fits, with the largest working memory among its modules."""
        totals = self._chain.totals.tolist()
        working = self._column("working")
        static, activation, deferred = (np.array(self._column(name)) for name in ("static", "activation", "deferred"))
        levels = sorted(set(working))
        for s in self._stages:
            most: Expression | float = levels[-1]
            if len(levels) > 1:
                at = [self._variable(f"w_{s}_{v}", cat="Binary") for v in range(len(levels))]
                self._problem += pulp.lpSum(at) == 1
                most = pulp.lpSum(level * a for level, a in zip(levels, at, strict=True))
                for number, (_, kind, _), work in zip(self._number[s], self._options, working, strict=True):
                    if work > levels[0]:
                        enough = pulp.lpSum(a for level, a in zip(levels, at, strict=True) if level >= work)
                        self._problem += number <= totals[kind] * enough
            for kept, waiting in self._grid.flights(s):
                held = static + kept * activation + waiting * deferred
                used = self._sum(held / max(self._capacity, 1.0), s)
                self._problem += used + most * (1.0 / max(self._capacity, 1.0)) <= 1.0

    def _add_seconds(self) -> None:
        host = self._source.costs.overhead.other_seconds_per_action / self._unit
        self._forward, self._backward, self._weight = (
            [self._variable(f"{name}_{s}", 0) for s in self._stages] for name in "FBW"
        )
        for s in self._stages:
            self._problem += self._forward[s] == self._sum(self._seconds("forward"), s) + host
            self._problem += self._backward[s] == self._sum(self._seconds("backward"), s) + host
            own = self._sum(self._seconds("weight"), s) + host if self._grid.schedule == "zb-h1" else 0.0
            self._problem += self._weight[s] == own

    def _add_schedule(self) -> None:
        """No action begins before its stage is free and its input is there; the first stage's sync follows its last."""
        grid, end = self._grid, self._variable("Y", 0)
        self._summed, self._exposed = end, self._variable("E", 0)
        transfers = [seconds / self._unit for seconds in self._source.transfer_seconds(grid)]
        if grid.num_stages == 1:
            self._problem += end >= grid.num_micro_batches * (self._forward[0] + self._backward[0]) + self._exposed
        elif 2 * grid.num_stages * grid.num_micro_batches > MAX_ACTIONS:
            self._add_paths(transfers)
        else:
            self._add_actions(transfers)

    def _add_actions(self, transfers: Sequence[float]) -> None:
        """Every action of the schedule with its end; a stage is one run of the chain."""
        grid, last = self._grid, self._stages[-1]
        ends: dict[tuple[int, str, int], Expression] = {}
        orders = []
        for s in self._stages:
            actions = stage_actions(
                grid.schedule, stage=s, num_stages=grid.num_stages, num_micro_batches=grid.num_micro_batches
            )
            orders.append([(s, action[0], action[1]) for action in actions])
            ends.update({key: self._variable(f"t_{key[0]}_{key[1]}_{key[2]}", 0) for key in orders[s]})
        seconds = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weight}
        for s, order in zip(self._stages, orders, strict=True):
            for before, (_, kind, i) in zip([None, *order], order, strict=False):
                end, lasts = ends[s, kind, i], seconds[kind][s]
                self._problem += end >= lasts + (0.0 if before is None else ends[before])
                if kind == "F" and s > 0:
                    self._problem += end >= ends[s - 1, "F", i] + transfers[s - 1] + lasts
                elif kind in "BI":
                    at_neighbour = ends[s, "F", i] if s == last else ends[s + 1, kind, i] + transfers[s]
                    self._problem += end >= at_neighbour + lasts
            self._problem += self._summed >= ends[order[-1]] + (0.0 if s else self._exposed)

    def _add_paths(self, transfers: Sequence[float]) -> None:
        grid, m = self._grid, self._grid.num_micro_batches
        shape = PipelineShape(grid.num_stages, m, tuple(transfers), grid.schedule)
        seconds = [f + b for f, b in zip(self._forward, self._backward, strict=True)]
        for s in self._stages:
            before = pulp.lpSum(seconds[:s]) + shape.transfers_before(s)
            for path in shape.paths(s):
                around = path.returns * (pulp.lpSum(seconds[s + 1 :]) + shape.transfers_after(s))
                short = int(shape.shorts[path.row])
                visited = pulp.lpSum(seconds[s + 1 : grid.num_stages - short])
                around += path.turns * (visited + shape.transfers_after(s, short))
                own = path.forward * self._forward[s] + path.backward * self._backward[s]
                own += path.weight * self._weight[s] + (self._weight[0] if grid.schedule == "zb-h1" else 0.0)
                self._problem += self._summed >= before + around + own + self._exposed

    def _add_once(self, with_sync: bool) -> None:
        """What a step has once: exposed gradient sync of the first stage, optimizer, waiting for stragglers."""
        grid, source = self._grid, self._source
        exposed, update, straggler = self._exposed, self._variable("U", 0), self._variable("V", 0)
        exposures = source.rates.exposures(grid.zero) if with_sync else (Exposure(0.0, 0.0),)
        less = sum(source.rates.sync(grid, degree).less for degree in stage_degrees(grid.num_ranks)) / self._unit
        for line in exposures:
            sync = self._sum(self._seconds("sync"), 0) - less
            beside = self._backward[0] + self._weight[0]
            self._problem += exposed >= line.of_sync * sync - line.of_backward * beside
        for s in self._stages:
            self._problem += update >= self._sum(self._seconds("update"), s)
        self._add_stragglers(straggler)
        self._objective = self._variable("Z")
        self._problem += self._objective == self._summed + update + straggler
        self._problem += self._objective
        self._constant = source.costs.overhead.other_seconds_per_step

    def _add_stragglers(self, straggler: Expression) -> None:
        """# V = jitter E[max] sqrt(m S), S the largest spread of a stage; a chord of the root is never above it."""
        grid, totals = self._grid, self._chain.totals.tolist()
        factor = self._source.costs.jitter * expected_maximum(grid.num_replicas) / self._unit
        if factor <= 0.0:
            return

        spreads = [np.concatenate([menu.tables[kind].spread for menu in self._menus]) for kind in range(len(totals))]
        low = sum(n * float(spread.min()) for n, spread in zip(totals, spreads, strict=True)) / grid.num_stages
        high = sum(n * float(spread.max()) for n, spread in zip(totals, spreads, strict=True))
        at_low, at_high = (factor * (grid.num_micro_batches * spread) ** 0.5 for spread in (low, high))
        slope = (at_high - at_low) / (high - low) if high > low else 0.0
        self._problem += straggler >= at_low
        if slope > 0.0:
            for s in self._stages:
                spread = self._sum(np.array(self._column("spread")) * slope, s)
                self._problem += straggler >= at_low + spread - slope * low

    def _variable(self, name: str, low: float = 0.0, high: float | None = None, cat: str = "Continuous") -> Expression:
        return self._problem.add_variable(name, low, high, cat)

    def _column(self, name: str) -> list[float]:
        """A column of the option tables, for all options."""
        return [float(getattr(self._menus[u].tables[k], name)[c]) for u, k, c in self._options]

    def _seconds(self, name: str) -> list[float]:
        return [value / self._unit for value in self._column(name)]

    def _sum(self, values: Sequence[float] | npt.NDArray[np.float64], stage: int) -> Expression:
        return pulp.LpAffineExpression([(n, float(v)) for n, v in zip(self._number[stage], values, strict=True) if v])

    def _layout(self) -> Layout:
        """The solution; whole numbers come back as floats that are nearly whole."""
        boundaries, position = [0], 0
        stages: list[Assignment] = []
        for s in self._stages:
            position += sum(round(pulp.value(taken)) for taken in self._taken[s])
            boundaries.append(self._chain.positions[position])
            chosen: list[list[tuple[Option, int]]] = [[] for _ in self._chain.modules]
            for number, (menu, kind, option) in zip(self._number[s], self._options, strict=True):
                if number.varValue > 0.5:
                    chosen[kind].append((self._menus[menu].options[kind][option], round(number.varValue)))
            stages.append(tuple(tuple(of_kind) for of_kind in chosen))
        return Layout(self._grid, tuple(boundaries), tuple(stages))
