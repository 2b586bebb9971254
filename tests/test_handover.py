"""State taken over from memory: through unlike layouts, without lost ranks, and not at all when a part is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from executor.handover import _routes
from specs.layout import Interval
from specs.plan import Plan
from tests.handovers import begin, train_on
from tests.layouts import ReplicaShape, StageShape, build, small_model
from tests.parity import run_reference

if TYPE_CHECKING:
    from tests.gloo import GlooPool

MODEL = small_model(tied=True)
MIXED = {"attention": (2, 2), "mlp": (4,), "embedding": (1, 1, 1, 1), "head": (2, 2)}
TWO, ONE = StageShape(2), StageShape(1)


def _plan(*replicas: ReplicaShape, zero: int = 0) -> Plan:
    return build(MODEL, list(replicas), zero=zero)


@pytest.mark.gloo
def test_training_goes_on_without_lost_ranks(gloo_pool: GlooPool) -> None:
    """(plan, processes whose memory is gone): each generation finds every element with a survivor of the one before."""
    generations = [
        (_plan(ReplicaShape([StageShape(4, MIXED)], 2, 4), ReplicaShape([TWO], 1, 4)), ()),
        (_plan(ReplicaShape([StageShape(3)], 1, 4), ReplicaShape([TWO], 1, 4)), (4,)),  # one of the pair is gone
        (_plan(ReplicaShape([TWO, TWO], 1, 8)), (0,)),  # the pair's other member still had a copy of its part
        (_plan(ReplicaShape([TWO], 1, 3), ReplicaShape([TWO], 1, 5), zero=1), ()),
        (_plan(ReplicaShape([StageShape(5)], 1, 8)), (4,)),  # one that had nothing
    ]
    gloo_pool.run(begin, 8)
    losses: list[float] = []
    for plan, lost in generations:
        results = gloo_pool.run(train_on, plan.world_size, plan.model_dump_json(), lost, 2)
        assert {outcome.step for outcome, _ in results} == {len(losses)}
        losses += results[0][1]
    whole = run_reference(MODEL, 8, 8, torch.float64, 2 * len(generations))
    assert losses == pytest.approx(whole.losses, rel=1e-9)


@pytest.mark.gloo
@pytest.mark.parametrize(("zero", "shape"), [(1, [ReplicaShape([ONE], 1, 4)] * 2), (0, [ReplicaShape([TWO], 1, 8)])])
def test_a_part_that_nobody_holds_is_missed_by_everyone(
    gloo_pool: GlooPool, zero: int, shape: list[ReplicaShape]
) -> None:
    gloo_pool.run(begin, 8)
    plan = _plan(*shape, zero=zero).model_dump_json()
    gloo_pool.run(train_on, 2, plan, (), 1)
    outcomes = [outcome for outcome, _ in gloo_pool.run(train_on, 2, plan, (1,), 1)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].step is None
    assert outcomes[0].missing > 0
    assert outcomes[0].example


def test_every_needed_element_comes_from_one_holder() -> None:
    have = [[Interval(0, 6)], [Interval(4, 10)], []]
    need = [[Interval(0, 3)], [Interval(3, 10)], [Interval(2, 9)]]
    routes = _routes(have, need)
    assert routes.missing == 0
    taken: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for source, taker, elements in routes.moves:
        assert any(i.start <= elements.start and elements.stop <= i.stop for i in have[source])
        if any(i.start <= elements.start and elements.stop <= i.stop for i in have[taker]):
            assert source == taker  # what is here already is not sent
        taken[taker] += range(*elements)
    assert {taker: sorted(elements) for taker, elements in taken.items()} == {
        0: [0, 1, 2],
        1: [3, 4, 5, 6, 7, 8, 9],
        2: [2, 3, 4, 5, 6, 7, 8],
    }
    assert _routes([[Interval(0, 4)], []], [[Interval(0, 4)], [Interval(2, 6)]]).missing == 2
