"""What every distinct module may do at a grid point, with its costs: the tables that the inner search reads.

Seconds and bytes are those of the slowest and the fullest rank of a block.  Gradient sync and optimizer are lower
bounds (`rates`); a finished layout is always priced by `cost_models.step.price`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.activations import ACTIVATION_BYTES, activation_bytes, deferred_bytes
from cost_models.buckets import BUCKET_ELEMENTS
from cost_models.context import with_exchange
from cost_models.flops import largest_units, weight_gradient_share
from cost_models.interface import CostModel, ModuleCost
from cost_models.memory import WEIGHT_BYTES, matrix_elements, sharding_bytes, static_bytes
from cost_models.passes import weight_seconds
from cost_models.share import Share
from cost_models.working import working_bytes
from planner.chain import Chain
from planner.constraints import MODES, Rule
from planner.dominance import undominated
from planner.layout import Option
from planner.module_shares import all_shares, copied_elements, cut_elements, distinct_shares, whole_elements
from planner.rates import Rates
from planner.space import SHARDED, Grid, Topology, divisors
from planner.stage import OptionTable
from specs.cluster import LinkLevel
from specs.errors import BadInputError
from specs.layout import Interval
from specs.model import SEQUENCE_KINDS, Attention, Embedding, Head, Module, num_units
from specs.plan import Recompute, TrainingSpec
from specs.tensors import num_parameters

Floats = npt.NDArray[np.float64]


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
        usual = divisors(num_ranks) if self.degrees is None else self.degrees
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


class _Passes(NamedTuple):
    """What an option costs per micro-batch, whatever the number of stages and replicas."""

    forward: float
    backward: float
    spread: float
    activation: float
    working: float
    mean_activation: float
    least_working: float


class _Split(NamedTuple):
    """What an option does for its weight gradients alone: seconds, how much less is left of backward, and bytes that
    wait, at most and on average.
    """

    seconds: float
    less: float
    waiting: float
    mean_waiting: float


_WHOLE = _Split(0.0, 0.0, 0.0, 0.0)


class _Static(NamedTuple):
    """What an option holds: bytes on the fullest rank and on average, elements whose optimizer state a rank owns."""

    total: float
    mean: float
    owned: float


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
        self._transfers: dict[tuple[int, int, int, str, int], tuple[float, ...]] = {}
        self._known: dict[tuple[int, int, int, str], _Passes | None] = {}
        self._menus: dict[tuple[Grid, Restriction, bool], Menu | None] = {}
        self._splits: dict[tuple[int, int, int, str], _Split] = {}
        self._held: dict[tuple[int, int, int, int], _Static] = {}

    def menu(self, grid: Grid, restriction: Restriction, *, optimistic: bool = False) -> Menu | None:
        """The options at a grid point; None when some module has none.

        Memory is that of each module's fullest rank: never below the price, and above it where shares are unequal
        and the ranks that have more of one module have less of another.  `optimistic` takes means over ranks, which
        no fullest rank is below.
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
        rates = [(degree, self.rates.micro_batch(grid, degree)) for degree in divisors(grid.num_ranks)]
        return min(self._whole_elements(degree) * (rate.gather + rate.scatter) for degree, rate in rates)

    def _whole_elements(self, degree: int) -> int:
        """Fewest elements of cut tensors that a rank has of the whole model; modules of fewer units are left out."""
        pairs = zip(self.chain.modules, self.chain.totals.tolist(), strict=True)
        return sum(
            n * cut_elements(module, degree, matrices=True)
            for module, n in pairs
            if degree <= num_units(module) and not (self.tied and isinstance(module, Head))
        )

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
        for degree in restriction.degrees_of(rule, grid.num_ranks):
            if pair and restriction.tied not in (None, degree):
                continue
            if degree > num_units(module) or grid.num_ranks % degree:
                continue
            if module.kind in SEQUENCE_KINDS and not _holds_sequences(module, degree, grid):
                continue
            block_tokens = -(-grid.micro_batch * self.training.seq_len * degree // grid.num_ranks)
            held = self._static(kind, degree, grid.num_replicas * grid.num_ranks // degree, grid.zero)
            if pair and restriction.tied and isinstance(module, Head):
                held = held._replace(total=0.0, mean=0.0)
            once = not (self.tied and isinstance(module, Head))  # a tied weight is summed with the embedding
            elements = cut_elements(module, degree) if once else 0
            matrices = cut_elements(module, degree, matrices=True) if once else 0
            sync = elements * self.rates.sync(grid, degree).per_element
            if once:  # what is not cut is summed over all ranks of the stage
                sync += whole_elements(module) * self.rates.sync(grid, 1).per_element
            rate = self.rates.micro_batch(grid, degree)
            gathered, scattered = matrices * rate.gather, elements * rate.scatter
            again = 0.0 if isinstance(module, Embedding | Head) else gathered
            shelf = self._gathered_bytes(module, degree) if grid.zero == 3 and not optimistic else 0.0
            blocks = (degree,) * (grid.num_ranks // degree)
            for mode in modes:
                if mode == "keep" and degree == 1 and len(modes) > 1:
                    continue  # nothing is gathered: the same as none
                passes = self._passes(kind, degree, block_tokens, mode)
                if passes is None:
                    continue
                split = self._split(kind, degree, block_tokens, mode) if grid.schedule == "zb-h1" else _WHOLE
                yield (
                    Option(blocks, mode),
                    (
                        passes.forward + data + gathered,
                        passes.backward - split.less + again + scattered,
                        sync,
                        held.owned * self.rates.update,
                        passes.spread,
                        (held.mean if optimistic else held.total) - one_edge_less,
                        passes.mean_activation if optimistic else passes.activation,
                        (passes.least_working if optimistic else passes.working) + shelf,
                        split.seconds,
                        split.mean_waiting if optimistic else split.waiting,
                    ),
                )

    def _static(self, kind: int, degree: int, num_copies: int, zero: int) -> _Static:
        key = (kind, degree, num_copies, zero)
        if key not in self._held:
            module, precision = self.chain.modules[kind], self.training.precision
            shares = all_shares(module, degree)
            by_share = {
                units: static_bytes(
                    module, degree=degree, num_copies=num_copies, precision=precision, zero=zero, units=units
                )
                for units in set(shares)
            }
            state_bytes = 8 if precision == "fp32" else 12  # per element: two moments, and master weights beside bf16
            owned = min(item.optimizer for item in by_share.values()) / state_bytes
            mean = sum(by_share[units].total for units in shares) / degree
            if self.tied and isinstance(module, Embedding | Head):
                if zero:
                    owned /= 2.0  # the ranks of both modules share the tied weight's state
                if isinstance(module, Head):
                    mean = owned = 0.0  # in one stage, cut alike, it is the embedding's
            copied = copied_elements(module, degree) * WEIGHT_BYTES[precision]
            fullest = float(max(item.total for item in by_share.values()) + copied)
            self._held[key] = _Static(fullest, mean, owned)
        return self._held[key]

    def _passes(self, kind: int, degree: int, block_tokens: int, recompute: Recompute) -> _Passes | None:
        """None where the cost model has no measurement; the reason is kept."""
        level = self.topology.block_level(degree)
        key = (kind, degree, block_tokens, recompute)
        if key not in self._known:
            module = self.chain.modules[kind]
            shares, precision = distinct_shares(module, degree), self.training.precision
            seq_len = self.training.seq_len
            held = [Share.of(module, degree, block_tokens, seq_len, units) for units in shares]
            try:
                costs = [self._cost(module, degree, block_tokens, recompute, level, units) for units in shares]
            except BadInputError as error:
                self.unmeasured[f"{module.kind} at degree {degree}, {block_tokens} tokens per block"] = str(error)
                self._known[key] = None
            else:
                self._known[key] = _Passes(
                    forward=max(cost.forward_seconds + cost.forward_communication_seconds for cost in costs),
                    backward=max(cost.backward_seconds + cost.backward_communication_seconds for cost in costs),
                    spread=max(cost.forward_seconds**2 + cost.backward_seconds**2 for cost in costs),
                    activation=float(max(activation_bytes(module, own, precision, recompute) for own in held)),
                    working=float(max(working_bytes(module, own, precision, recompute) for own in held)),
                    mean_activation=sum(
                        activation_bytes(
                            module, Share.of(module, degree, block_tokens, seq_len, units), precision, recompute
                        )
                        for units in all_shares(module, degree)
                    )
                    / degree,
                    least_working=float(min(working_bytes(module, own, precision, recompute) for own in held)),
                )
        return self._known[key]

    def _split(self, kind: int, degree: int, block_tokens: int, recompute: Recompute) -> _Split:
        """Of an option that has been measured, where the backward pass is split."""
        key = (kind, degree, block_tokens, recompute)
        if key not in self._splits:
            module, level = self.chain.modules[kind], self.topology.block_level(degree)
            seq_len, precision = self.training.seq_len, self.training.precision
            less = more = 0.0
            for units in distinct_shares(module, degree):
                part = weight_gradient_share(
                    module, block_tokens=block_tokens, seq_len=seq_len, units=units, recompute=recompute
                )
                if part:
                    cost = self._cost(module, degree, block_tokens, recompute, level, units)
                    talk = cost.backward_communication_seconds
                    less = max(less, weight_seconds(part, cost.backward_seconds, talk, recompute))
                    more = max(more, self.costs.overhead.split_backward_overhead * cost.backward_seconds)
            waiting = [
                deferred_bytes(module, Share.of(module, degree, block_tokens, seq_len, units), precision, recompute)
                for units in all_shares(module, degree)
            ]
            self._splits[key] = _Split(less + more, less, float(max(waiting)), sum(waiting) / degree)
        return self._splits[key]

    def _cost(
        self, module: Module, degree: int, block_tokens: int, recompute: Recompute, level: LinkLevel, units: Interval
    ) -> ModuleCost:
        largest = units.size == largest_units(module, degree).size
        seq_len = self.training.seq_len
        cost = self.costs.module(
            module,
            degree=degree,
            block_tokens=block_tokens,
            seq_len=seq_len,
            recompute=recompute,
            level=level,
            units=None if largest else units,
        )
        if not isinstance(module, Attention) or block_tokens >= seq_len:
            return cost
        share = Share.of(module, degree, block_tokens, seq_len, units)
        span = self.topology.span(np.arange(share.context) * degree)
        size = ACTIVATION_BYTES[self.training.precision]
        return with_exchange(cost, self.costs, module, share, span, size, recompute)


def _holds_sequences(module: Module, degree: int, grid: Grid) -> bool:
    """Whether blocks of a degree hold whole sequences, or equal whole parts of one as the grid point lets them."""
    if grid.micro_batch * degree % grid.num_ranks == 0:
        return True
    sharing, rest = divmod(grid.num_ranks, grid.micro_batch * degree)
    return isinstance(module, Attention) and rest == 0 and grid.context % sharing == 0
