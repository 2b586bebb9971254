"""What every distinct module may do at a grid point, with its costs: the tables that the inner search reads.

Seconds and bytes are those of the slowest and the fullest rank of a block.  Gradient sync and optimizer are lower
bounds (`rates`); a finished layout is always priced by `cost_models.step.price`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cost_models.activations import ACTIVATION_BYTES
from cost_models.buckets import BUCKET_ELEMENTS
from cost_models.interface import CostModel
from cost_models.memory import sharding_bytes
from planner.blocks import blocks_of, stage_degrees
from planner.chain import Chain
from planner.dominance import undominated
from planner.layout import Option
from planner.menu import Menu, OptionTable
from planner.module_shares import cut_elements, shared_elements
from planner.rates import Rates
from planner.restriction import Restriction
from planner.space import SHARDED, Grid, Topology
from planner.ways import Ways, WaySource
from specs.model import Attention, Embedding, Head, Module, num_units
from specs.plan import TrainingSpec
from specs.tensors import num_parameters

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_STATIC = [one.name for one in fields(OptionTable)].index("static")


class OptionSource:
    """Menus of all grid points of one problem; the cost model is asked once for every module and kind of block."""

    def __init__(self, chain: Chain, training: TrainingSpec, costs: CostModel, topology: Topology) -> None:
        self.chain = chain
        self.training = training
        self.costs = costs
        self.topology = topology
        named = zip(chain.names, (chain.modules[kind] for kind in chain.kinds), strict=True)
        self.num_elements = num_parameters(tuple(named))
        heads = frozenset(module.num_kv_heads for module in chain.modules if isinstance(module, Attention))
        self.rates = Rates(training, costs, topology, self.num_elements, heads)
        head = chain.modules[chain.kinds[-1]]
        self.tied = isinstance(head, Head) and head.tied
        self.ways = WaySource(chain, training, costs, topology, self.rates, tied=self.tied)
        self._transfers: dict[tuple[int, int, int, str, int], tuple[float, ...]] = {}
        self._gathered: dict[tuple[int, int, int, str, int], float] = {}
        self._some: dict[tuple[int, Restriction], Ints] = {}
        self._menus: dict[tuple[Grid, Restriction, bool], Menu | None] = {}

    @property
    def unmeasured(self) -> dict[str, str]:
        """What the cost model had no number for, with its reason."""
        return self.ways.blocks.unmeasured

    def menu(self, grid: Grid, restriction: Restriction, *, optimistic: bool = False) -> Menu | None:
        """The options at a grid point; None when some module has none.

        Memory is that of each module's fullest rank: never below the price, and above it where shares are unequal
        and the ranks that have more of one module have less of another.  `optimistic` takes the last rank's, which no
        fullest rank is below.
        """
        same = replace(grid, schedule="1f1b") if grid.schedule == "gpipe" else grid  # with the same options
        key = (same, restriction, optimistic and not self._certain(same))
        if key not in self._menus:
            self._menus[key] = self._menu(*key)
        return self._menus[key]

    def _certain(self, grid: Grid) -> bool:
        """Whether the two ways to count memory are the same."""
        kinds = range(len(self.chain.modules))
        return all(self.ways.state(kind, grid).certain and self.ways.of(kind, grid).certain for kind in kinds)

    def _menu(self, grid: Grid, restriction: Restriction, optimistic: bool) -> Menu | None:
        options, of_kinds = list[tuple[Option, ...]](), list[Floats]()
        for kind, module in enumerate(self.chain.modules):
            ways, pair = self.ways.of(kind, grid), self.tied and isinstance(module, Embedding | Head)
            some = self._chosen(kind, ways, pair, grid.num_ranks, restriction)
            if not some.size:
                return None
            state = self.ways.state(kind, grid)
            if optimistic:
                costs = ways.bold[:, some] + state.bold[:, ways.at[some]]
            else:
                costs = ways.careful[:, some] + state.careful[:, ways.at[some]]
            if self.tied and restriction.tied and isinstance(module, Head):
                costs[_STATIC] = 0.0
            if isinstance(module, Embedding | Head) and grid.num_stages > 1:
                costs[_STATIC] -= 2.0 * self._chunk_bytes(grid)  # one edge less
            kept = undominated(costs.T)
            options.append(tuple(ways.options[index] for index in some[kept].tolist()))
            of_kinds.append(costs[:, kept])
        return Menu.of(options, of_kinds)

    def _chosen(self, kind: int, ways: Ways, pair: bool, num_ranks: int, restriction: Restriction) -> Ints:
        """Which of the ways a restriction leaves."""
        key = (id(ways), restriction)  # their source keeps them
        if key not in self._some:
            module, rule = self.chain.modules[kind], self.chain.rules[kind]
            modes = restriction.modes_of(module, rule)
            some = [
                ways.numbers[degree, mode]
                for degree in restriction.degrees_of(rule, num_ranks)
                if not pair or restriction.tied in (None, degree)
                for mode in modes
                if (degree, mode) in ways.numbers
            ]
            self._some[key] = np.array(some, dtype=np.int64)
        return self._some[key]

    def memory_is_uncertain(self, grid: Grid, capacity: float) -> bool:
        """Whether the two ways to count memory may differ by more than a thousandth of what there is."""
        if grid.zero in SHARDED:
            return True
        careful, bold = self.menu(grid, Restriction()), self.menu(grid, Restriction(), optimistic=True)
        if careful is None or bold is None or careful is bold:
            return False
        return any(
            a.static.size != b.static.size
            or float((a.static + a.activation + a.working - b.static - b.activation - b.working).max())
            > 1e-3 * capacity / len(self.chain.names)
            for a, b in zip(careful.tables, bold.tables, strict=True)
        )

    def transfer_seconds(self, grid: Grid) -> tuple[float, ...]:
        """Seconds between neighbouring stages of the first replica."""
        key = (grid.num_stages, grid.num_ranks, grid.num_replicas, grid.order, grid.micro_batch)
        if key not in self._transfers:
            payload = round(self._chunk_bytes(grid))
            firsts = [grid.stage_positions(stage)[0, 0] for stage in range(grid.num_stages)]
            self._transfers[key] = tuple(
                self.costs.collective(
                    "point_to_point",
                    num_ranks=2,
                    payload_bytes=payload,
                    level=self.topology.span(np.array(pair)).level,
                )
                for pair in pairwise(firsts)
            )
        return self._transfers[key]

    def edge_bytes(self, grid: Grid, *, optimistic: bool = False) -> float:
        """Chunks on their way in and out at both edges of a stage (the first and the last have one edge less), and the
        buffers of gradients that are scattered in every micro-batch; without these when `optimistic`.
        """
        edges = 4.0 * self._chunk_bytes(grid) if grid.num_stages > 1 else 0.0
        if optimistic or grid.zero < 2:
            return edges
        average = self.num_elements // (grid.num_stages * grid.num_ranks)
        return edges + sharding_bytes(average, BUCKET_ELEMENTS, 0, self.training.precision)

    def least_gathered_seconds(self, grid: Grid) -> float:
        """What sharding adds at least to the passes of a micro-batch, all stages together."""
        key = (grid.num_stages, grid.num_ranks, grid.num_replicas, grid.order, grid.zero)
        if key not in self._gathered:
            self._gathered[key] = self._least_gathered(grid)
        return self._gathered[key]

    def _least_gathered(self, grid: Grid) -> float:
        rates = {degree: self.rates.micro_batch(grid, degree) for degree in stage_degrees(grid.num_ranks)}
        of_shared = {degree: self.rates.shared(grid, degree)[1] for degree in rates}

        def seconds(module: Module, degree: int) -> float:
            smallest, rate, together = blocks_of(degree, grid.num_ranks)[-1], rates[degree], of_shared[degree]
            shared = shared_elements(module, smallest, matrices=True)
            own = cut_elements(module, smallest, matrices=True) - shared
            return own * (rate.gather + rate.scatter) + shared * (together.gather + together.scatter)

        total = 0.0
        for module, number in zip(self.chain.modules, self.chain.totals.tolist(), strict=True):
            if not (self.tied and isinstance(module, Head)):
                total += number * min(seconds(module, degree) for degree in rates if degree <= num_units(module))
        return total

    def _chunk_bytes(self, grid: Grid) -> float:
        tokens = -(-grid.micro_batch * self.training.seq_len // grid.num_ranks)
        return float(tokens * self.chain.modules[0].hidden * ACTIVATION_BYTES[self.training.precision])
