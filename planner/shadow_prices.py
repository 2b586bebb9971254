"""Shadow prices: what one more GiB, a faster link, faster devices or one constraint less would buy.

Honest finite differences: the problem is solved again with the change.  With S the step seconds found and B <= S the
proven bound, before (0) and after (1) the change, the true gain lies between B0 - S1 and S0 - B1.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from cost_models.interface import CostModel, ModuleCost
from planner.constraints import Constraints
from planner.describe import describe
from planner.grid_search import Incumbent
from planner.layout import Layout
from planner.problem import Pricer, Problem, make_searcher
from planner.search import FREEDOMS, Freedom, Searcher
from specs.cluster import CollectiveOp, LinkLevel
from specs.layout import Interval
from specs.model import Module
from specs.plan import Plan, Recompute
from specs.profile import StepOverhead

MORE_BYTES = 2**30
# How much faster links and devices are tried.
FASTER = 1.1
LEVEL_NAMES: dict[LinkLevel, str] = {"scale_up": "links within a domain", "scale_out": "links between domains"}


@dataclass(frozen=True)
class ShadowPrice:
    """What a change buys, as fractions of the step: as found, and the range that is proven to hold the true gain.

    `layout` is the best one after the change, when it is another.
    """

    change: str
    gain: float
    least_gain: float
    most_gain: float
    layout: str | None


def shadow_prices(plan: Plan, costs: CostModel, *, seconds_each: float = 10.0) -> tuple[ShadowPrice, ...]:
    """Prices of memory, of each link level, of devices and of each of the user's constraints, by step time.

    The plan's certificate says which freedom and constraints hold (without one: every freedom, no constraints).
    Empty when the search finds nothing that fits.
    """
    found = plan.certificate
    texts = found.constraints if found is not None else ()
    named = [freedom for freedom in FREEDOMS if found is not None and freedom == found.freedom]
    freedom = named[0] if named else FREEDOMS[-1]
    problem = Problem(
        plan.model,
        plan.cluster,
        plan.training,
        plan.made,
        plan.memory_cap_bytes,
        constraints=Constraints.of_texts(texts),
    )
    searcher = make_searcher(problem, costs)
    before = _best(searcher, Pricer(problem, searcher), freedom, None, seconds_each)
    prices: list[ShadowPrice] = []
    if before.layout is None:
        return ()
    for change, other, pricer in _changes(problem, searcher, texts):
        alike = other.chain.kinds == searcher.chain.kinds  # else a layout means something else
        after = _best(other, pricer, freedom, before.layout if alike else None, seconds_each)
        prices.append(
            ShadowPrice(
                change,
                gain=max(0.0, before.seconds - after.seconds) / before.seconds,
                least_gain=max(0.0, before.bound - after.seconds) / before.seconds,
                most_gain=max(0.0, before.seconds - after.bound) / before.seconds,
                layout=describe(after.layout) if after.layout not in (None, before.layout) else None,
            )
        )
    return tuple(prices)


@dataclass(frozen=True)
class _Best:
    seconds: float
    bound: float
    layout: Layout | None


def _best(searcher: Searcher, pricer: Pricer, freedom: Freedom, start: Layout | None, seconds: float) -> _Best:
    """The fastest layout; `start` is one that is known to fit."""
    deadline = time.monotonic() + seconds
    incumbent = Incumbent(pricer.seconds)
    if start is not None:
        incumbent.offer(start, 0.0)
    else:
        searcher.search("uniform", incumbent, deadline=deadline)
    outcome = searcher.search(freedom, incumbent, deadline=deadline)
    return _Best(outcome.seconds, outcome.bound, outcome.layout)


def _changes(problem: Problem, searcher: Searcher, texts: tuple[str, ...]) -> Iterator[tuple[str, Searcher, Pricer]]:
    """What may change, one thing at a time."""
    more = problem.memory_bytes + MORE_BYTES
    roomy = searcher.within(searcher.capacity + MORE_BYTES)
    yield "1 GiB more on every rank", roomy, Pricer(problem, roomy, more)
    costs = searcher.source.costs
    percent = f"{100.0 * (FASTER - 1.0):.0f} % faster"
    for level in problem.cluster.links:
        faster = make_searcher(problem, FasterCosts(costs, level))
        yield f"{LEVEL_NAMES[level]} {percent}", faster, Pricer(problem, faster)
    faster = make_searcher(problem, FasterCosts(costs, "devices"))
    yield f"devices {percent}", faster, Pricer(problem, faster)
    for text in texts:
        rest = Constraints.of_texts(tuple(other for other in texts if other != text))
        freer = make_searcher(replace(problem, constraints=rest), costs)
        yield f"without {text}", freer, Pricer(problem, freer)


class FasterCosts:
    """The costs of a machine that is faster in one part: communication of one link level, or its devices.

    What shows of a module's communication shrinks in proportion; that more of it might then hide is left out.
    """

    def __init__(self, costs: CostModel, part: LinkLevel | Literal["devices"]) -> None:
        self._costs = costs
        self._part = part
        self.overhead: StepOverhead = costs.overhead
        self.reserved_bytes: int = costs.reserved_bytes
        self.estimated: bool = costs.estimated
        self.jitter: float = costs.jitter

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
        cost = self._costs.module(
            module,
            degree=degree,
            block_tokens=block_tokens,
            seq_len=seq_len,
            recompute=recompute,
            level=level,
            units=units,
        )
        if self._part == "devices":
            return replace(
                cost,
                forward_seconds=cost.forward_seconds / FASTER,
                backward_seconds=cost.backward_seconds / FASTER,
            )
        if self._part != level:
            return cost
        return replace(
            cost,
            forward_communication_seconds=cost.forward_communication_seconds / FASTER,
            backward_communication_seconds=cost.backward_communication_seconds / FASTER,
        )

    def collective(
        self, op: CollectiveOp, *, num_ranks: int, payload_bytes: int, level: LinkLevel, ranks_per_domain: int = 1
    ) -> float:
        seconds = self._costs.collective(
            op, num_ranks=num_ranks, payload_bytes=payload_bytes, level=level, ranks_per_domain=ranks_per_domain
        )
        return seconds / FASTER if self._part == level else seconds

    def optimizer(self, num_elements: int) -> float:
        seconds = self._costs.optimizer(num_elements)
        return seconds / FASTER if self._part == "devices" else seconds

    def exposed_gradient_sync(self, seconds: float, backward_seconds: float, *, sharded: bool = False) -> float:
        return self._costs.exposed_gradient_sync(seconds, backward_seconds, sharded=sharded)
