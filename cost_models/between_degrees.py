"""A profile asked for degrees that it does not have: between those that it has, marked estimated.

A profile is taken with all ranks in equal blocks, so eight ranks never show what a block of seven does; that is asked
when one of them is lost.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cost_models.activations import activation_bytes
from cost_models.flops import largest_units
from cost_models.interface import ModuleCost
from cost_models.measured import MeasuredCosts
from cost_models.share import Share
from cost_models.working import working_bytes
from specs.cluster import LinkLevel
from specs.errors import BadInputError
from specs.layout import Interval
from specs.model import Module, num_units
from specs.plan import Recompute

# Degrees looked at above the one that is asked for, as a multiple of it.
FURTHEST = 2


class BetweenDegrees(MeasuredCosts):
    """Measured costs; a degree without measurement lies between its neighbours' at the same tokens per block.

    # c(t) = c'(a)^(1 - x) c'(b)^x, x = log(t / a) / log(b / a);  c' scaled to t:
    #   computing by the largest share of units, u(t) / u(a);  communication by (t - 1) / t over (a - 1) / a
    #   a, b the next measured degrees below and above; alone the one that there is.  Exact where seconds are in
    #   proportion to units and to bytes.
    """

    def module(
        self,
        module: Module,
        *,
        degree: int,
        block_tokens: int,
        seq_len: int,
        recompute: Recompute,
        level: LinkLevel,
        units: Interval | None = None,
    ) -> ModuleCost:
        def measured(size: int) -> ModuleCost:
            own = units if size == degree else None
            return super(BetweenDegrees, self).module(
                module,
                degree=size,
                block_tokens=block_tokens,
                seq_len=seq_len,
                recompute=recompute,
                level=level,
                units=own,
            )

        try:
            return measured(degree)
        except BadInputError as error:
            missing = error
        below, above = self.degrees_beside(module, degree, seq_len)
        found = [(size, measured(size)) for size in (below, above) if size is not None]
        if not found:
            raise missing
        own = largest_units(module, degree) if units is None else units
        scaled = [_scaled(cost, module, size, degree, own.size) for size, cost in found]
        along = 0.0
        if below is not None and above is not None:
            along = math.log(degree / below) / math.log(above / below)
        between = _between(scaled[0], scaled[-1], along)
        share = Share.of(module, degree, block_tokens, seq_len, own)
        return replace(
            between,
            activation_bytes=activation_bytes(module, share, self._training.precision, recompute),
            working_bytes=working_bytes(module, share, self._training.precision, recompute),
            estimated=True,
        )

    def degrees_beside(self, module: Module, degree: int, seq_len: int) -> tuple[int | None, int | None]:
        """The next measured degrees below and above; of those above at most `FURTHEST` times as large."""
        precision = self._training.precision
        known = [d for m, d, s, p in self._modules if (m, s, p) == (module, seq_len, precision)]
        below = max((d for d in known if d < degree), default=None)
        most = min(num_units(module), FURTHEST * degree)
        return below, min((d for d in known if degree < d <= most), default=None)


def _scaled(cost: ModuleCost, module: Module, size: int, degree: int, units: int) -> ModuleCost:
    """A cost at a measured degree, as it would be at another if nothing but units and bytes mattered."""
    work = units / largest_units(module, size).size
    talk = (degree - 1) / degree / ((size - 1) / size) if size > 1 else 0.0
    return replace(
        cost,
        forward_seconds=cost.forward_seconds * work,
        backward_seconds=cost.backward_seconds * work,
        forward_communication_seconds=cost.forward_communication_seconds * talk,
        backward_communication_seconds=cost.backward_communication_seconds * talk,
    )


def _between(low: ModuleCost, high: ModuleCost, along: float) -> ModuleCost:
    """Log-linear between two costs; what one of them does not have (communication at degree 1) is the other's."""

    def middle(a: float, b: float) -> float:
        return a ** (1.0 - along) * b**along if a > 0.0 and b > 0.0 else max(a, b)

    return replace(
        low,
        forward_seconds=middle(low.forward_seconds, high.forward_seconds),
        backward_seconds=middle(low.backward_seconds, high.backward_seconds),
        forward_communication_seconds=middle(low.forward_communication_seconds, high.forward_communication_seconds),
        backward_communication_seconds=middle(low.backward_communication_seconds, high.backward_communication_seconds),
    )
