"""The ways to run a distinct module on a stage's ranks, with what they cost: all that menus of many grid points share.

Seconds and bytes of a micro-batch depend on the stage's ranks and the micro-batch alone (`Ways`), what is held always
and done once a step on ranks, replicas and sharding alone (`State`).
"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.flops import largest_units
from cost_models.interface import CostModel
from cost_models.memory import matrix_elements, sharding_bytes
from planner.block_costs import BlockCosts, Split
from planner.blocks import blocks_of, holds_sequences, parts_of, stage_degrees
from planner.chain import Chain
from planner.layout import Option
from planner.menu import OptionTable
from planner.module_shares import cut_elements, shared_elements, whole_elements
from planner.rates import Rates
from planner.restriction import Restriction
from planner.space import Grid, Topology
from specs.model import SEQUENCE_KINDS, Embedding, Head, num_units
from specs.plan import Recompute, TrainingSpec

Floats = npt.NDArray[np.float64]
_WHOLE = Split(0.0, 0.0, 0.0, 0.0)
NUM_COSTS = len(fields(OptionTable))


class Ways(NamedTuple):
    """Options of a module and their costs of a micro-batch, [row of `OptionTable`, option].

    `at`: an option's degree, as its place in `stage_degrees`; `numbers`: of each degree and mode its option.  `careful`
    has the fullest rank's bytes, `bold` the last rank's, which no fullest rank is below; `certain`: they are the same.
    """

    options: tuple[Option, ...]
    at: npt.NDArray[np.int64]
    numbers: dict[tuple[int, Recompute], int]
    certain: bool
    careful: Floats
    bold: Floats


class State(NamedTuple):
    """What a module costs whatever the micro-batch, [row of `OptionTable`, degree]: gradient sync and optimizer; bytes
    held; seconds for gathered weights before each pass and for scattered gradients, and the bytes they are gathered in.
    `careful`, `bold` and `certain` as of `Ways`.
    """

    certain: bool
    careful: Floats
    bold: Floats


class WaySource:
    """Asks the cost model once for every distinct module and kind of block."""

    def __init__(
        self, chain: Chain, training: TrainingSpec, costs: CostModel, topology: Topology, rates: Rates, *, tied: bool
    ) -> None:
        """`tied`: embedding and head share their weight."""
        self.blocks = BlockCosts(chain, training, costs, topology)
        self._chain = chain
        self._training = training
        self._costs = costs
        self._topology = topology
        self._rates = rates
        self._tied = tied
        self._ways: dict[tuple[object, ...], Ways] = {}
        self._states: dict[tuple[object, ...], State] = {}

    def of(self, kind: int, grid: Grid) -> Ways:
        """The options of a distinct module that the user's rules leave, in order of degrees."""
        inside = self._topology.block_level(grid.num_ranks) == "scale_up"
        shape = () if inside else (grid.num_stages, grid.num_replicas)  # which stages leave their domain
        splits, alone = grid.schedule == "zb-h1", grid.num_stages == 1
        key = (kind, grid.num_ranks, grid.micro_batch, grid.context, splits, alone, shape)
        if key not in self._ways:
            self._ways[key] = self._ways_of(kind, grid)
        return self._ways[key]

    def state(self, kind: int, grid: Grid) -> State:
        """By degree, in the order of `stage_degrees`; nothing at degrees that the module has no units for."""
        key = (kind, grid.num_stages, grid.num_ranks, grid.num_replicas, grid.zero, grid.order)
        if key not in self._states:
            self._states[key] = self._state_of(kind, grid)
        return self._states[key]

    def _ways_of(self, kind: int, grid: Grid) -> Ways:
        module, rule, every = self._chain.modules[kind], self._chain.rules[kind], Restriction()
        modes, degrees = every.modes_of(module, rule), every.degrees_of(rule, grid.num_ranks)
        reads = isinstance(module, Embedding) or (isinstance(module, Head) and grid.num_stages > 1)
        data = self._costs.overhead.data_seconds_per_sequence * grid.micro_batch if reads else 0.0
        options, at = list[Option](), list[int]()
        numbers = dict[tuple[int, Recompute], int]()
        careful, bold = list[tuple[float, ...]](), list[tuple[float, ...]]()
        for place, degree in enumerate(stage_degrees(grid.num_ranks)):
            if degree not in degrees or degree > num_units(module):
                continue
            blocks = blocks_of(degree, grid.num_ranks)
            if module.kind in SEQUENCE_KINDS and not holds_sequences(module, blocks, grid):
                continue
            parts = parts_of(blocks, grid, self._training.seq_len, self._topology)
            for mode in modes:
                if mode == "keep" and degree == 1 and len(modes) > 1:
                    continue  # nothing is gathered: the same as none
                passes = self.blocks.passes(kind, parts, mode)
                if passes is None:
                    continue
                split = self.blocks.split(kind, parts, mode) if grid.schedule == "zb-h1" else _WHOLE
                numbers[degree, mode] = len(options)
                options.append(Option(blocks, mode))
                at.append(place)
                seconds = (passes.forward + data, passes.backward - split.less, 0.0, 0.0, passes.spread)
                careful.append((*seconds, 0.0, passes.activation, passes.working, split.seconds, split.waiting))
                bold.append(
                    (*seconds, 0.0, passes.own_activation, passes.own_working, split.seconds, split.own_waiting)
                )
        rows = [np.ascontiguousarray(np.array(own).reshape(-1, NUM_COSTS).T) for own in (careful, bold)]
        certain = bool((rows[0] == rows[1]).all())
        return Ways(tuple(options), np.array(at, dtype=np.int64), numbers, certain, *rows)

    def _state_of(self, kind: int, grid: Grid) -> State:
        module = self._chain.modules[kind]
        once = not (self._tied and isinstance(module, Head))  # a tied weight is summed with the embedding
        outer = isinstance(module, Embedding | Head)
        whole = whole_elements(module) * self._rates.sync(grid, 1).per_element  # summed over all ranks of the stage
        degrees = stage_degrees(grid.num_ranks)
        careful, bold = np.zeros((2, NUM_COSTS, len(degrees)))
        for place, degree in enumerate(degrees):
            if degree > num_units(module):
                continue
            blocks = blocks_of(degree, grid.num_ranks)
            smallest = blocks[-1]
            held = self.blocks.static(kind, blocks, grid.num_replicas, grid.zero)
            elements = cut_elements(module, smallest) if once else 0
            matrices = cut_elements(module, smallest, matrices=True) if once else 0
            sync = elements * self._rates.sync(grid, degree).per_element
            if once:  # and what is not cut
                sync += whole
            rate = self._rates.micro_batch(grid, degree)
            gathered, scattered = matrices * rate.gather, elements * rate.scatter
            shared = shared_elements(module, smallest)
            if shared:
                per_element, beside = self._rates.shared(grid, degree)
                sync -= shared * (self._rates.sync(grid, degree).per_element - per_element)
                scattered -= shared * (rate.scatter - beside.scatter)
                gathered -= shared_elements(module, smallest, matrices=True) * (rate.gather - beside.gather)
            shelf = 0.0
            if grid.zero == 3:
                elements_at_once = sum(matrix_elements(module, largest_units(module, smallest)))
                shelf = float(sharding_bytes(0, 0, elements_at_once, self._training.precision))
            passes = (gathered, scattered if outer else gathered + scattered)
            once_a_step = (sync, held.owned * self._rates.update)
            careful[:, place] = (*passes, *once_a_step, 0.0, held.total, 0.0, shelf, 0.0, 0.0)
            bold[:, place] = (*passes, *once_a_step, 0.0, held.own, 0.0, 0.0, 0.0, 0.0)
        return State(bool((careful == bold).all()), careful, bold)
