"""Once-a-step costs per element: lower bounds of gradient sync and optimizer that add up over modules.

Collectives and optimizer have fixed parts, so their seconds per element fall with size; the rate at the most
favourable size that can occur is never too high.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from cost_models.buckets import BUCKET_ELEMENTS
from cost_models.interface import CostModel
from cost_models.memory import GRADIENT_BYTES, WEIGHT_BYTES
from cost_models.topology import Span
from planner.blocks import blocks_of, stage_degrees
from planner.space import Grid, Topology
from specs.cluster import CollectiveOp
from specs.plan import TrainingSpec

# A backward pass long enough to hide whatever can be hidden.
LONG_SECONDS = 1e6


class SyncRate(NamedTuple):
    """Seconds of gradient collectives are at least `per_element` x elements - `less`."""

    per_element: float
    less: float


class MicroBatchRate(NamedTuple):
    """Exposed seconds per element of one gathering of weights, and of one scattering of gradients."""

    gather: float
    scatter: float


NOTHING = MicroBatchRate(0.0, 0.0)


class Exposure(NamedTuple):
    """Exposed seconds of gradient sync are at least `of_sync` x all of them - `of_backward` x the last backward."""

    of_sync: float
    of_backward: float


class Rates:
    """Rates for one model of `num_elements` on one cluster; asks the cost model once per group."""

    def __init__(
        self,
        training: TrainingSpec,
        costs: CostModel,
        topology: Topology,
        num_elements: int,
        kv_heads: frozenset[int] = frozenset(),
    ) -> None:
        self._weight_bytes = WEIGHT_BYTES[training.precision]
        self._costs = costs
        self._topology = topology
        self._num_elements = num_elements
        self._kv_heads = kv_heads
        self._spans: dict[tuple[int, int, int, str, int], set[Span]] = {}
        self._sync: dict[tuple[Span, int], SyncRate] = {}
        self._of_stages: dict[tuple[int, int, int, str, int, int], SyncRate] = {}
        self._least: dict[tuple[Span, CollectiveOp], float] = {}

    @cached_property
    def update(self) -> float:
        """Optimizer seconds per element that a rank owns."""
        sizes = {max(1, self._num_elements >> shift) for shift in range(12)}
        return min(self._costs.optimizer(size) / size for size in sizes)

    def sync(self, grid: Grid, degree: int) -> SyncRate:
        """Of any stage's gradient collectives, hidden or not, of tensors that blocks of a degree cut.

        A rank shares its part with one rank of each equal block, and halves of it with two of each other block.
        """
        key = (grid.num_stages, grid.num_ranks, grid.num_replicas, grid.order, degree, grid.zero)
        if key not in self._of_stages:
            rates = [self._sync_of(span, grid.zero) for span in self._groups(grid, degree)]
            buckets = 1 if grid.num_ranks % degree == 0 else 2
            # Shared KV heads are summed in buckets of their own, at the rate of a smaller degree.
            buckets += any(heads % other for heads in self._kv_heads for other in stage_degrees(grid.num_ranks))
            least, less = min(rate.per_element for rate in rates), max(rate.less for rate in rates)
            self._of_stages[key] = SyncRate(least, buckets * less)
        return self._of_stages[key]

    def micro_batch(self, grid: Grid, degree: int) -> MicroBatchRate:
        """Of any stage beside each micro-batch's passes: what sharded gradients and weights leave exposed at best."""
        if grid.zero < 2:
            return NOTHING
        exposed = self._costs.exposed_gradient_sync(1.0, LONG_SECONDS, sharded=True)
        spans = self._groups(grid, degree)
        scatter = min(self._least_per_element(span, "reduce_scatter", GRADIENT_BYTES) for span in spans)
        gather = 0.0
        if grid.zero == 3:
            gather = min(self._least_per_element(span, "all_gather", self._weight_bytes) for span in spans)
        return MicroBatchRate(exposed * gather, exposed * scatter)

    def shared(self, grid: Grid, degree: int) -> tuple[float, MicroBatchRate]:
        """Per element that several ranks of a block hold: of the sync, and beside micro-batches.

        Those ranks are in one group, as those that blocks of a smaller degree have in their place; a collective of
        more ranks of a domain can be faster.
        """
        fewer = [other for other in stage_degrees(grid.num_ranks) if other <= degree]
        beside = [self.micro_batch(grid, other) for other in fewer]
        least = min(self.sync(grid, other).per_element for other in fewer)
        return least, MicroBatchRate(min(r.gather for r in beside), min(r.scatter for r in beside))

    def _groups(self, grid: Grid, degree: int) -> set[Span]:
        """The kinds of groups that sum a stage's gradients: one rank of every block in all replicas, at places whose
        parts of a weight overlap.

        # place i of t ranks holds i / t to (i + 1) / t; it overlaps places i - 1 and i of t - 1
        """
        shape = (grid.num_stages, grid.num_ranks, grid.num_replicas, grid.order, degree)
        if shape not in self._spans:
            blocks = np.array(blocks_of(degree, grid.num_ranks))
            firsts = np.cumsum(blocks) - blocks
            places = [(place, place) for place in range(degree)]
            if blocks[-1] < degree:
                places = [(place, other) for other in range(degree - 1) for place in (other, other + 1)]
            elif self._topology.block_level(degree) == "scale_up":
                places = places[:1]  # the others lie on the same nodes
            stages = grid.all_positions()
            self._spans[shape] = set()
            for place, other in places:
                owners = stages[:, :, firsts + np.where(blocks == degree, place, other)]
                self._spans[shape] |= self._topology.spans(owners.reshape(grid.num_stages, -1))
        return self._spans[shape]

    def _sync_of(self, span: Span, zero: int) -> SyncRate:
        key = (span, zero)
        if key not in self._sync:
            self._sync[key] = self._sync_rate(span, zero) if span.num_ranks > 1 and zero < 3 else SyncRate(0.0, 0.0)
        return self._sync[key]

    def _least_per_element(self, span: Span, op: CollectiveOp, size: int) -> float:
        """Seconds per element at the most favourable size."""
        if span.num_ranks == 1:
            return 0.0
        key = (span, op)
        if key not in self._least:
            most = min(self._num_elements, BUCKET_ELEMENTS * 3 // 2)
            sizes = {max(1, most >> shift) for shift in range(12)}
            self._least[key] = min(self._collective(span, op, size * number) / number for number in sizes)
        return self._least[key]

    def exposures(self, zero: int) -> tuple[Exposure, Exposure]:
        """Two bounds of the exposed part: beside a backward pass so long that nothing more can hide, and beside one
        so short that it is full.  (What hides grows with both, ever more slowly.)
        """
        sharded = bool(zero)
        hidden_at_best = self._costs.exposed_gradient_sync(1.0, LONG_SECONDS, sharded=sharded)
        alone = self._costs.exposed_gradient_sync(LONG_SECONDS, 0.0, sharded=sharded)
        beside = self._costs.exposed_gradient_sync(LONG_SECONDS, 1.0, sharded=sharded)
        return Exposure(hidden_at_best, 0.0), Exposure(alone / LONG_SECONDS, alone - beside)

    def _sync_rate(self, span: Span, zero: int) -> SyncRate:
        """# t(n) >= r n - c    n elements; r = t(B) / B at a full bucket B (or the whole model, if smaller); c the most
        #   by which a single collective of n elements is below r n.  Buckets go in pieces of B elements, rounded, so
        #   that several pieces together are no further below than one.
        """
        full = min(self._num_elements, BUCKET_ELEMENTS)
        most = min(self._num_elements, BUCKET_ELEMENTS * 3 // 2)

        def seconds(num_elements: int) -> float:
            if zero == 2:  # scattered already
                whole = self._collective(span, "all_gather", self._weight_bytes * num_elements)
            elif zero:
                whole = self._collective(span, "reduce_scatter", GRADIENT_BYTES * num_elements)
                whole += self._collective(span, "all_gather", self._weight_bytes * num_elements)
            else:
                whole = self._collective(span, "all_reduce", GRADIENT_BYTES * num_elements)
            return whole

        rate = seconds(full) / full
        sizes = {max(1, most >> shift) for shift in range(12)}
        return SyncRate(rate, max(0.0, *(rate * size - seconds(size) for size in sizes)))

    def _collective(self, span: Span, op: CollectiveOp, payload_bytes: int) -> float:
        return self._costs.collective(
            op,
            num_ranks=span.num_ranks,
            payload_bytes=payload_bytes,
            level=span.level,
            ranks_per_domain=span.ranks_per_domain,
        )
