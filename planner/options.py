"""What every distinct module may do at a grid point, with its costs: the tables that the inner search reads.

Seconds and bytes are those of the slowest and the fullest rank of a block.  Gradient sync and optimizer are lower
bounds (`rates`); a finished layout is always priced by `cost_models.step.price`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cost_models.activations import ACTIVATION_BYTES
from cost_models.buckets import BUCKET_ELEMENTS
from cost_models.flops import largest_units
from cost_models.interface import CostModel
from cost_models.memory import matrix_elements, sharding_bytes
from planner.block_costs import BlockCosts, Split
from planner.blocks import blocks_of, holds_sequences, parts_of, stage_degrees
from planner.chain import Chain
from planner.constraints import MODES, Rule
from planner.dominance import undominated
from planner.layout import Option
from planner.module_shares import cut_elements, whole_elements
from planner.rates import Rates
from planner.space import SHARDED, Grid, Topology
from planner.stage import OptionTable
from specs.model import SEQUENCE_KINDS, Embedding, Head, Module, num_units
from specs.plan import Recompute, TrainingSpec
from specs.tensors import num_parameters

Floats = npt.NDArray[np.float64]
_WHOLE = Split(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Menu:
    """For every distinct module its options, and their costs in the same order."""

    options: tuple[tuple[Option, ...], ...]
    tables: tuple[OptionTable, ...]


@dataclass(frozen=True)
class Restriction:
    """Limits of a menu: these degrees only, this recompute mode only (of modules that have it; never the head), these
    degrees of the user's equal groups.  What the user pinned outranks them.

    `tied`: the degree of an embedding and a head that share their weight in one stage.
    """

    degrees: tuple[int, ...] | None = None
    recompute: Recompute | None = None
    groups: tuple[int, ...] = ()
    tied: int | None = None

    def degrees_of(self, rule: Rule, num_ranks: int) -> list[int]:
        """Degrees of a module under a rule."""
        if rule.degree is not None:
            return [rule.degree]
        if rule.group >= 0 and self.groups:
            return [] if self.groups[rule.group] in rule.no_degrees else [self.groups[rule.group]]
        usual = stage_degrees(num_ranks) if self.degrees is None else self.degrees
        return [degree for degree in usual if degree not in rule.no_degrees]

    def modes_of(self, module: Module, rule: Rule) -> list[Recompute]:
        """Recompute modes of a module under a rule."""
        if rule.recompute is not None:
            return [rule.recompute]
        modes = MODES[module.kind]
        if self.recompute is not None:
            available = self.recompute in modes and not isinstance(module, Head)
            modes = (self.recompute,) if available else ("none",)
        return [mode for mode in modes if mode not in rule.no_recompute]


class OptionSource:
    """Menus of all grid points of one problem; the cost model is asked once for every module and kind of block."""

    def __init__(self, chain: Chain, training: TrainingSpec, costs: CostModel, topology: Topology) -> None:
        self.chain = chain
        self.training = training
        self.costs = costs
        self.topology = topology
        named = zip(chain.names, (chain.modules[kind] for kind in chain.kinds), strict=True)
        self.num_elements = num_parameters(tuple(named))
        self.rates = Rates(training, costs, topology, self.num_elements)
        head = chain.modules[chain.kinds[-1]]
        self.tied = isinstance(head, Head) and head.tied
        self._transfers: dict[tuple[int, int, int, str, int], tuple[float, ...]] = {}
        self._menus: dict[tuple[Grid, Restriction, bool], Menu | None] = {}
        self._blocks = BlockCosts(chain, training, costs, topology)

    @property
    def unmeasured(self) -> dict[str, str]:
        """What the cost model had no number for, with its reason."""
        return self._blocks.unmeasured

    def menu(self, grid: Grid, restriction: Restriction, *, optimistic: bool = False) -> Menu | None:
        """The options at a grid point; None when some module has none.

        Memory is that of each module's fullest rank: never below the price, and above it where shares are unequal
        and the ranks that have more of one module have less of another.  `optimistic` takes the last rank's, which no
        fullest rank is below.
        """
        same = replace(grid, schedule="1f1b") if grid.schedule == "gpipe" else grid  # with the same options
        key = (same, restriction, optimistic)
        if key not in self._menus:
            self._menus[key] = self._menu(*key)
        return self._menus[key]

    def _menu(self, grid: Grid, restriction: Restriction, optimistic: bool) -> Menu | None:
        options: list[tuple[Option, ...]] = []
        tables = []
        for kind, module in enumerate(self.chain.modules):
            rows = list(self._rows(kind, module, grid, restriction, optimistic))
            if not rows:
                return None
            costs = np.array([row[1] for row in rows])
            kept = undominated(costs)
            options.append(tuple(rows[index][0] for index in kept))
            tables.append(OptionTable(*np.ascontiguousarray(costs[kept].T)))
        return Menu(tuple(options), tuple(tables))

    def memory_is_uncertain(self, grid: Grid, capacity: float) -> bool:
        """Whether the two ways to count memory may differ by more than a thousandth of what there is."""
        if grid.zero in SHARDED:
            return True
        careful, bold = self.menu(grid, Restriction()), self.menu(grid, Restriction(), optimistic=True)
        if careful is None or bold is None:
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
        rates = {degree: self.rates.micro_batch(grid, degree) for degree in stage_degrees(grid.num_ranks)}
        total = 0.0
        for module, number in zip(self.chain.modules, self.chain.totals.tolist(), strict=True):
            if not (self.tied and isinstance(module, Head)):
                total += number * min(
                    cut_elements(module, blocks_of(degree, grid.num_ranks)[-1], matrices=True)
                    * (rate.gather + rate.scatter)
                    for degree, rate in rates.items()
                    if degree <= num_units(module)
                )
        return total

    def _gathered_bytes(self, module: Module, degree: int) -> float:
        """Buffers of the weights that are gathered around a use."""
        elements = sum(matrix_elements(module, largest_units(module, degree)))
        return float(sharding_bytes(0, 0, elements, self.training.precision))

    def _chunk_bytes(self, grid: Grid) -> float:
        tokens = -(-grid.micro_batch * self.training.seq_len // grid.num_ranks)
        return float(tokens * self.chain.modules[0].hidden * ACTIVATION_BYTES[self.training.precision])

    def _rows(
        self, kind: int, module: Module, grid: Grid, restriction: Restriction, optimistic: bool
    ) -> Iterator[tuple[Option, tuple[float, ...]]]:
        """Options with their entries, in the order of `OptionTable`."""
        rule = self.chain.rules[kind]
        modes = restriction.modes_of(module, rule)
        outer = isinstance(module, Embedding | Head) and grid.num_stages > 1
        one_edge_less = 2.0 * self._chunk_bytes(grid) if outer else 0.0
        reads = isinstance(module, Embedding) or (isinstance(module, Head) and grid.num_stages > 1)
        data = self.costs.overhead.data_seconds_per_sequence * grid.micro_batch if reads else 0.0
        pair = self.tied and isinstance(module, Embedding | Head)
        whole = whole_elements(module) * self.rates.sync(grid, 1).per_element  # summed over all ranks of the stage
        for degree in restriction.degrees_of(rule, grid.num_ranks):
            if pair and restriction.tied not in (None, degree):
                continue
            if degree > num_units(module) or degree not in stage_degrees(grid.num_ranks):
                continue
            blocks = blocks_of(degree, grid.num_ranks)
            if module.kind in SEQUENCE_KINDS and not holds_sequences(module, blocks, grid):
                continue
            smallest, parts = blocks[-1], parts_of(blocks, grid, self.training.seq_len, self.topology)
            held = self._blocks.static(kind, blocks, grid.num_replicas, grid.zero)
            if pair and restriction.tied and isinstance(module, Head):
                held = held._replace(total=0.0, own=0.0)
            once = not (self.tied and isinstance(module, Head))  # a tied weight is summed with the embedding
            elements = cut_elements(module, smallest) if once else 0
            matrices = cut_elements(module, smallest, matrices=True) if once else 0
            sync = elements * self.rates.sync(grid, degree).per_element
            if once:  # and what is not cut
                sync += whole
            rate = self.rates.micro_batch(grid, degree)
            gathered, scattered = matrices * rate.gather, elements * rate.scatter
            again = 0.0 if isinstance(module, Embedding | Head) else gathered
            shelf = self._gathered_bytes(module, smallest) if grid.zero == 3 and not optimistic else 0.0
            for mode in modes:
                if mode == "keep" and degree == 1 and len(modes) > 1:
                    continue  # nothing is gathered: the same as none
                passes = self._blocks.passes(kind, parts, mode)
                if passes is None:
                    continue
                split = self._blocks.split(kind, parts, mode) if grid.schedule == "zb-h1" else _WHOLE
                yield (
                    Option(blocks, mode),
                    (
                        passes.forward + data + gathered,
                        passes.backward - split.less + again + scattered,
                        sync,
                        held.owned * self.rates.update,
                        passes.spread,
                        (held.own if optimistic else held.total) - one_edge_less,
                        passes.own_activation if optimistic else passes.activation,
                        (passes.own_working if optimistic else passes.working) + shelf,
                        split.seconds,
                        split.own_waiting if optimistic else split.waiting,
                    ),
                )
