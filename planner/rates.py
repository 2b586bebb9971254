"""Once-a-step costs per element: lower bounds of gradient sync and optimizer that add up over modules.

Collectives and optimizer have fixed parts, so their seconds per element fall with size; the rate at the most
favourable size that can occur is never too high.
"""

from __future__ import annotations

from functools import cached_property

from cost_models.buckets import BUCKET_ELEMENTS
from cost_models.interface import CostModel
from cost_models.memory import GRADIENT_BYTES, WEIGHT_BYTES
from cost_models.topology import Span
from planner.space import Grid, Topology
from specs.plan import TrainingSpec
from specs.profile import CollectiveOp

# A backward pass long enough to hide whatever can be hidden.
LONG_SECONDS = 1e12


class Rates:
    """Rates for one model of `num_elements` on one cluster; asks the cost model once per group."""

    def __init__(self, training: TrainingSpec, costs: CostModel, topology: Topology, num_elements: int) -> None:
        self._weight_bytes = WEIGHT_BYTES[training.precision]
        self._costs = costs
        self._topology = topology
        self._num_elements = num_elements
        self._sync: dict[tuple[Span, int], float] = {}

    @cached_property
    def update(self) -> float:
        """Optimizer seconds per element that a rank owns."""
        sizes = {max(1, self._num_elements >> shift) for shift in range(12)}
        return min(self._costs.optimizer(size) / size for size in sizes)

    def sync(self, grid: Grid, degree: int) -> float:
        """Exposed seconds of the first stage's gradient collectives per element that a rank holds of a cut tensor."""
        positions = grid.stage_positions(0)[:, ::degree].reshape(-1)
        if len(positions) == 1:
            return 0.0
        key = (self._topology.span(positions), grid.zero)
        if key not in self._sync:
            self._sync[key] = self._sync_rate(*key)
        return self._sync[key]

    def _sync_rate(self, span: Span, zero: int) -> float:
        """# seconds per element = min over n of t(n) / n,  n elements of one collective: what the model has, but at
        #   most one and a half buckets, as larger ones go in pieces of about BUCKET_ELEMENTS
        """
        most = min(self._num_elements, BUCKET_ELEMENTS * 3 // 2)

        def seconds(num_elements: int) -> float:
            if zero:
                return self._collective(span, "reduce_scatter", GRADIENT_BYTES * num_elements) + self._collective(
                    span, "all_gather", self._weight_bytes * num_elements
                )
            whole = self._collective(span, "all_reduce", GRADIENT_BYTES * num_elements)
            return self._costs.exposed_gradient_sync(whole, LONG_SECONDS)

        return min(seconds(size) / size for size in {max(1, most >> shift) for shift in range(8)})

    def _collective(self, span: Span, op: CollectiveOp, payload_bytes: int) -> float:
        return self._costs.collective(
            op,
            num_ranks=span.num_ranks,
            payload_bytes=payload_bytes,
            level=span.level,
            ranks_per_domain=span.ranks_per_domain,
        )
