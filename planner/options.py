"""What every distinct module may do at a grid point, with its costs: the tables that the inner search reads.

Seconds and bytes are those of the slowest and the fullest rank of a block.  Gradient sync and optimizer are lower
bounds (`rates`); a finished layout is always priced by `cost_models.step.price`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from cost_models.buckets import BUCKET_ELEMENTS
from cost_models.flops import largest_units, local_kv_heads
from cost_models.interface import CostModel, ModuleCost
from cost_models.memory import ACTIVATION_BYTES, WEIGHT_BYTES, StaticBytes, static_bytes
from planner.chain import Chain
from planner.layout import Option
from planner.rates import Rates
from planner.space import Grid, Topology, divisors
from planner.stage import OptionTable
from specs.errors import BadInputError
from specs.layout import Interval, balanced_cuts, interval_of, refine
from specs.model import Attention, Embedding, Head, Module, num_units
from specs.plan import Recompute, TrainingSpec
from specs.tensors import local_rows, num_parameters, tensors_of

_MODES: dict[str, tuple[Recompute, ...]] = {
    "embedding": ("none",),
    "attention": ("none", "selective", "full"),
    "mlp": ("none", "selective", "full"),
    "moe": ("none", "full"),
    "head": ("none", "full"),
}


@dataclass(frozen=True)
class Menu:
    """For every distinct module its options, and their costs in the same order."""

    options: tuple[tuple[Option, ...], ...]
    tables: tuple[OptionTable, ...]

    @property
    def longer_share(self) -> float:
        """Least share of an option's seconds that the longer of its two passes takes."""
        shares = [np.maximum(t.forward, t.backward) / np.maximum(t.forward + t.backward, 1e-300) for t in self.tables]
        return max(0.5, min(float(share.min()) for share in shares))


@dataclass(frozen=True)
class Restriction:
    """Limits of a menu: these degrees only, this recompute mode only (of modules that have it; never the head)."""

    degrees: tuple[int, ...] | None = None
    recompute: Recompute | None = None


@dataclass(frozen=True)
class _Costs:
    """One option's entries, in the order of `OptionTable`."""

    forward: float
    backward: float
    sync: float
    update: float
    spread: float
    static: float
    activation: float
    working: float


class OptionSource:
    """Asks the cost model once for every module, degree and block size, over all grid points.

    `unmeasured` collects what the cost model had no number for, with its reason.
    """

    def __init__(self, chain: Chain, training: TrainingSpec, costs: CostModel, topology: Topology) -> None:
        self.chain = chain
        self.training = training
        self.costs = costs
        self.topology = topology
        self.unmeasured: dict[str, str] = {}
        named = zip(chain.names, (chain.modules[kind] for kind in chain.kinds), strict=True)
        self.num_elements = num_parameters(tuple(named))
        self.rates = Rates(training, costs, topology, self.num_elements)
        head = chain.modules[chain.kinds[-1]]
        self.tied = isinstance(head, Head) and head.tied
        self._known: dict[tuple[object, ...], ModuleCost | None] = {}

    def menu(self, grid: Grid, restriction: Restriction) -> Menu | None:
        """The options at a grid point; None when some module has none."""
        options: list[tuple[Option, ...]] = []
        tables = []
        for kind in range(len(self.chain.modules)):
            rows = self._rows(self.chain.modules[kind], grid, restriction)
            if not rows:
                return None
            kept = _undominated(rows)
            options.append(tuple(option for option, _ in kept))
            tables.append(OptionTable(*np.array([astuple(costs) for _, costs in kept]).T.copy()))
        return Menu(tuple(options), tuple(tables))

    def menus(self, grid: Grid, restrictions: Sequence[Restriction]) -> list[Menu]:
        """The menus that a stage may choose from."""
        found = (self.menu(grid, restriction) for restriction in restrictions)
        return [menu for menu in found if menu is not None]

    def transfer_seconds(self, grid: Grid) -> tuple[float, ...]:
        """Seconds between neighbouring stages of the first replica."""
        tokens = -(-grid.micro_batch * self.training.seq_len // grid.num_ranks)
        payload = tokens * self.chain.modules[0].hidden * ACTIVATION_BYTES[self.training.precision]
        firsts = [grid.stage_positions(stage)[0, 0] for stage in range(grid.num_stages)]
        levels = [self.topology.span(np.array(pair)).level for pair in pairwise(firsts)]
        return tuple(
            self.costs.collective("point_to_point", num_ranks=2, payload_bytes=payload, level=level) for level in levels
        )

    def gathered_bytes(self, grid: Grid) -> float:
        """Buffer in which sharded weights are gathered: the largest bucket there can be."""
        if not grid.zero:
            return 0.0
        return float(min(BUCKET_ELEMENTS, self.num_elements) * WEIGHT_BYTES[self.training.precision])

    def _rows(self, module: Module, grid: Grid, restriction: Restriction) -> list[tuple[Option, _Costs]]:
        modes = _MODES[module.kind]
        if restriction.recompute is not None:
            available = restriction.recompute in modes and not isinstance(module, Head)
            modes = (restriction.recompute,) if available else ("none",)
        degrees = restriction.degrees if restriction.degrees is not None else divisors(grid.num_ranks)
        found = []
        for degree in degrees:
            if degree > num_units(module) or grid.num_ranks % degree:
                continue
            if isinstance(module, Attention) and grid.micro_batch * degree % grid.num_ranks:
                continue
            for mode in modes:
                costs = self._costs(module, grid, degree, mode)
                if costs is not None:
                    found.append((Option((degree,) * (grid.num_ranks // degree), mode), costs))
        return found

    def _costs(self, module: Module, grid: Grid, degree: int, recompute: Recompute) -> _Costs | None:
        block_tokens = -(-grid.micro_batch * self.training.seq_len * degree // grid.num_ranks)
        shares = distinct_shares(module, degree)
        known = [self._cost(module, degree, block_tokens, recompute, units) for units in shares]
        costs = [cost for cost in known if cost is not None]
        if len(costs) < len(shares):
            return None
        forward = max(cost.forward_seconds + cost.forward_communication_seconds for cost in costs)
        if isinstance(module, Embedding) or (isinstance(module, Head) and grid.num_stages > 1):
            forward += self.costs.overhead.data_seconds_per_sequence * grid.micro_batch
        precision = self.training.precision
        held = [self._static(module, grid, degree, units) for units in shares]
        state_bytes = 8 if precision == "fp32" else 12  # per element: two moments, and master weights beside bf16
        owned = min(item.optimizer for item in held) / state_bytes
        if self.tied and isinstance(module, Embedding | Head) and grid.zero:
            owned /= 2.0  # both stages' ranks share the tied weight's state
        cut = min(_cut_elements(module, units) for units in shares)
        return _Costs(
            forward=forward,
            backward=max(cost.backward_seconds + cost.backward_communication_seconds for cost in costs),
            sync=0.0 if isinstance(module, Head) else cut * self.rates.sync(grid, degree),
            update=owned * self.rates.update,
            spread=max(cost.forward_seconds**2 + cost.backward_seconds**2 for cost in costs),
            static=max(item.total for item in held) + copied_elements(module, degree) * WEIGHT_BYTES[precision],
            activation=max(cost.activation_bytes for cost in costs),
            working=max(cost.working_bytes for cost in costs),
        )

    def _static(self, module: Module, grid: Grid, degree: int, units: Interval) -> StaticBytes:
        return static_bytes(
            module,
            degree=degree,
            num_copies=grid.num_replicas * grid.num_ranks // degree,
            precision=self.training.precision,
            zero=grid.zero,
            units=units,
        )

    def _cost(
        self, module: Module, degree: int, block_tokens: int, recompute: Recompute, units: Interval
    ) -> ModuleCost | None:
        """None where the cost model has no measurement; the reason is kept."""
        level = self.topology.block_level(degree)
        largest = units.size == largest_units(module, degree).size
        key = (module, degree, block_tokens, recompute, units, level)
        if key not in self._known:
            try:
                self._known[key] = self.costs.module(
                    module,
                    degree=degree,
                    block_tokens=block_tokens,
                    seq_len=self.training.seq_len,
                    recompute=recompute,
                    level=level,
                    units=None if largest else units,
                )
            except BadInputError as error:
                self.unmeasured[f"{module.kind} at degree {degree}, {block_tokens} tokens per block"] = str(error)
                self._known[key] = None
        return self._known[key]


@lru_cache(maxsize=4096)
def distinct_shares(module: Module, degree: int) -> tuple[Interval, ...]:
    """One interval of units for every different amount of work that ranks of an evenly cut block have."""
    cuts = balanced_cuts(num_units(module), degree)
    found: dict[tuple[int, int], Interval] = {}
    for part in range(degree):
        units = interval_of(cuts, part)
        heads = local_kv_heads(module, units) if isinstance(module, Attention) else 0
        found.setdefault((units.size, heads), units)
    return tuple(found.values())


@lru_cache(maxsize=4096)
def copied_elements(module: Module, degree: int) -> int:
    """Most weight elements that a rank keeps twice, because neighbours hold other parts of the same rows (KV heads)."""
    cuts = balanced_cuts(num_units(module), degree)
    copied = [0] * degree
    for tensor in tensors_of(module):
        if tensor.cut != "kv":
            continue
        rows = [local_rows(module, tensor, interval_of(cuts, part)) for part in range(degree)]
        atoms = set(refine(set(rows)))
        for part, own in enumerate(rows):
            if own not in atoms:
                copied[part] += own.size * max(tensor.cols, 1)
    return max(copied)


def _cut_elements(module: Module, units: Interval) -> int:
    """Elements that a rank holds of tensors that the block cuts."""
    return sum(
        local_rows(module, tensor, units).size * max(tensor.cols, 1)
        for tensor in tensors_of(module)
        if tensor.cut != "whole"
    )


def _undominated(rows: Sequence[tuple[Option, _Costs]]) -> list[tuple[Option, _Costs]]:
    """Drop options that another one equals or beats in everything."""
    kept: list[tuple[Option, _Costs]] = []
    for option, costs in sorted(rows, key=lambda row: astuple(row[1])):
        own = astuple(costs)
        if not any(all(a <= b for a, b in zip(astuple(other), own, strict=True)) for _, other in kept):
            kept.append((option, costs))
    return kept
