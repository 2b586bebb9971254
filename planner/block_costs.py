"""What a distinct module costs in a composition of blocks; the cost model is asked once for every kind of block.

Seconds and bytes are those of the slowest and the fullest rank of any block.  What is called `own` is the stage's last
rank's: it has as large a share as any rank of the smallest block, and no fullest rank holds less than it does of all
its modules together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cost_models.activations import ACTIVATION_BYTES, activation_bytes, deferred_bytes
from cost_models.context import with_exchange
from cost_models.flops import largest_units, weight_gradient_share
from cost_models.interface import CostModel, ModuleCost
from cost_models.memory import WEIGHT_BYTES, static_bytes
from cost_models.passes import weight_seconds
from cost_models.share import Share
from cost_models.working import working_bytes
from planner.blocks import Blocks, Part
from planner.chain import Chain
from planner.module_shares import all_shares, copied_elements, distinct_shares
from planner.space import Topology
from specs.errors import BadInputError
from specs.layout import Interval
from specs.model import Attention, Embedding, Head, Module
from specs.plan import Recompute, TrainingSpec


class Passes(NamedTuple):
    """What an option costs per micro-batch, whatever the number of stages and replicas."""

    forward: float
    backward: float
    spread: float
    activation: float
    working: float
    own_activation: float
    own_working: float


class Split(NamedTuple):
    """What an option does for its weight gradients alone: seconds, how much less is left of backward, and bytes that
    wait, at most and of its own.
    """

    seconds: float
    less: float
    waiting: float
    own_waiting: float


class Static(NamedTuple):
    """What an option holds: bytes on the fullest rank and on its own, elements whose optimizer state that one owns."""

    total: float
    own: float
    owned: float


class BlockCosts:
    """`unmeasured` collects what the cost model had no number for, with its reason."""

    def __init__(self, chain: Chain, training: TrainingSpec, costs: CostModel, topology: Topology) -> None:
        self.unmeasured: dict[str, str] = {}
        self._chain = chain
        self._training = training
        self._costs = costs
        self._topology = topology
        head = chain.modules[chain.kinds[-1]]
        self._tied = isinstance(head, Head) and head.tied
        self._passes: dict[tuple[int, Part, Recompute], Passes | None] = {}
        self._splits: dict[tuple[int, Part, Recompute], Split] = {}
        self._static: dict[tuple[int, Blocks, int, int], Static] = {}

    def passes(self, kind: int, parts: Sequence[Part], recompute: Recompute) -> Passes | None:
        """None where the cost model has no measurement; the reason is kept."""
        if len(parts) == 1:
            return self._passes_of(kind, parts[0], recompute)
        found = [self._passes_of(kind, part, recompute) for part in parts]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        most = Passes(*(max(values) for values in zip(*known, strict=True)))
        return most._replace(own_activation=known[-1].own_activation, own_working=known[-1].own_working)

    def split(self, kind: int, parts: Sequence[Part], recompute: Recompute) -> Split:
        """Of an option that has been measured, where the backward pass is split."""
        if len(parts) == 1:
            return self._split_of(kind, parts[0], recompute)
        found = [self._split_of(kind, part, recompute) for part in parts]
        less, more = max(one.less for one in found), max(one.seconds - one.less for one in found)
        return Split(less + more, less, max(one.waiting for one in found), found[-1].own_waiting)

    def static(self, kind: int, blocks: Blocks, num_replicas: int, zero: int) -> Static:
        """`blocks` of every replica's stage."""
        key = (kind, blocks, num_replicas, zero)
        if key not in self._static:
            self._static[key] = self._static_of(*key)
        return self._static[key]

    def _static_of(self, kind: int, blocks: Blocks, num_replicas: int, zero: int) -> Static:
        module, precision = self._chain.modules[kind], self._training.precision
        copies = {size: number * num_replicas for size, number in Counter(blocks).items()}
        held = [
            static_bytes(
                module,
                degree=size,
                num_copies=number,
                precision=precision,
                zero=zero,
                units=units,
                others=tuple(other for other in copies.items() if other[0] != size),
            )
            for size, number in copies.items()
            for units in all_shares(module, size)
        ]
        state_bytes = 8 if precision == "fp32" else 12  # per element: two moments, and master weights beside bf16
        own, owned = float(held[-1].total), held[-1].optimizer / state_bytes
        if self._tied and isinstance(module, Embedding | Head):
            if zero:
                owned /= 2.0  # the ranks of both modules share the tied weight's state
            if isinstance(module, Head):
                own = owned = 0.0  # in one stage, cut alike, it is the embedding's
        copied = copied_elements(module, blocks) * WEIGHT_BYTES[precision]
        return Static(float(max(item.total for item in held) + copied), own, owned)

    def _passes_of(self, kind: int, part: Part, recompute: Recompute) -> Passes | None:
        key = (kind, part, recompute)
        if key not in self._passes:
            module, precision, degree = self._chain.modules[kind], self._training.precision, part.size
            shares = distinct_shares(module, degree)
            held = [self._share(module, part, units) for units in shares]
            own = self._share(module, part, all_shares(module, degree)[-1])
            try:
                costs = [self._cost(module, part, recompute, units) for units in shares]
            except BadInputError as error:
                self.unmeasured[f"{module.kind} at degree {degree}, {part.tokens} tokens per block"] = str(error)
                self._passes[key] = None
            else:
                self._passes[key] = Passes(
                    forward=max(cost.forward_seconds + cost.forward_communication_seconds for cost in costs),
                    backward=max(cost.backward_seconds + cost.backward_communication_seconds for cost in costs),
                    spread=max(cost.forward_seconds**2 + cost.backward_seconds**2 for cost in costs),
                    activation=float(max(activation_bytes(module, one, precision, recompute) for one in held)),
                    working=float(max(working_bytes(module, one, precision, recompute) for one in held)),
                    own_activation=float(activation_bytes(module, own, precision, recompute)),
                    own_working=float(working_bytes(module, own, precision, recompute)),
                )
        return self._passes[key]

    def _split_of(self, kind: int, part: Part, recompute: Recompute) -> Split:
        key = (kind, part, recompute)
        if key not in self._splits:
            module, seq_len, precision = self._chain.modules[kind], self._training.seq_len, self._training.precision
            less = more = 0.0
            for units in distinct_shares(module, part.size):
                of_weights = weight_gradient_share(
                    module, block_tokens=part.tokens, seq_len=seq_len, units=units, recompute=recompute
                )
                if of_weights:
                    cost = self._cost(module, part, recompute, units)
                    talk = cost.backward_communication_seconds
                    less = max(less, weight_seconds(of_weights, cost.backward_seconds, talk, recompute))
                    more = max(more, self._costs.overhead.split_backward_overhead * cost.backward_seconds)
            waiting = [
                float(deferred_bytes(module, self._share(module, part, units), precision, recompute))
                for units in all_shares(module, part.size)
            ]
            self._splits[key] = Split(less + more, less, max(waiting), waiting[-1])
        return self._splits[key]

    def _share(self, module: Module, part: Part, units: Interval) -> Share:
        return Share.of(module, part.size, part.tokens, self._training.seq_len, units)

    def _cost(self, module: Module, part: Part, recompute: Recompute, units: Interval) -> ModuleCost:
        largest = units.size == largest_units(module, part.size).size
        cost = self._costs.module(
            module,
            degree=part.size,
            block_tokens=part.tokens,
            seq_len=self._training.seq_len,
            recompute=recompute,
            level=part.level,
            units=None if largest else units,
        )
        if not isinstance(module, Attention) or part.tokens >= self._training.seq_len:
            return cost
        share = self._share(module, part, units)
        span = self._topology.span(np.arange(share.context) * part.size)
        size = ACTIVATION_BYTES[self._training.precision]
        return with_exchange(cost, self._costs, module, share, span, size, recompute)
