"""Mixtures of experts apart from their parity: operations counted, routing, unused experts."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from cost_models.dispatch import dispatched_tokens
from cost_models.flops import matrix_flop
from executor.clock import Clock
from executor.collectives import Block
from executor.layout import Layout
from executor.moe import MoeModule
from profiles.flops import counted_flop
from specs.layout import Interval, balanced_cuts
from specs.model import Moe
from specs.plan import Plan
from tests.layouts import SEQ_LEN, ReplicaShape, StageShape, build
from tests.test_parity_families import experts

if TYPE_CHECKING:
    from tests.gloo import GlooPool


def _plan(num_ranks: int) -> Plan:
    return build(experts(), [ReplicaShape([StageShape(num_ranks)], 7, 7)])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_counted_operations_are_those_of_the_cost_model(num_ranks: int) -> None:
    for rank in range(num_ranks):
        for layout in Layout(_plan(num_ranks), rank).modules:
            if isinstance(layout.module, Moe):
                moe, tokens = layout.module, sum(layout.token_counts)
                expected = matrix_flop(moe, tokens, layout.units)
                # Every rank routes its own tokens only, and the shared experts see no others.
                own = layout.token_counts[layout.position]
                expected += 2.0 * moe.hidden * (own * moe.num_experts - tokens * layout.units.size)
                fraction = moe.shared_ffn * layout.units.size / moe.num_experts
                expected += 6.0 * moe.hidden * (own * moe.shared_ffn - tokens * fraction)
                assert counted_flop(layout, seq_len=SEQ_LEN) == pytest.approx(expected)


def test_routing_is_softmax_over_the_chosen_and_unused_experts_get_no_gradient() -> None:
    layout = next(m for m in Layout(_plan(1), 0).modules if isinstance(m.module, Moe) and not m.module.shared_ffn)
    block = Block(None, 0, layout.token_counts, Clock(torch.device("cpu")))
    module = MoeModule(layout, block, torch.float64, torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    x = torch.randn(30, layout.module.hidden, dtype=torch.float64)
    weights, chosen = module.route(x)
    assert torch.allclose(weights, (x @ module.router.t()).gather(-1, chosen).softmax(-1))
    with torch.no_grad():  # the first two experts score positive, the others zero, for every token
        module.norm.fill_(1.0)
        module.router.zero_()
        module.router[:2, 0] = torch.tensor([2.0, 1.0])
        x[:, 0] = 5.0
    module(x).sum().backward()
    used = 2 * module.spec.expert_ffn
    assert module.up.grad is not None
    assert float(module.up.grad[:used].abs().min()) > 0
    assert float(module.up.grad[used:].abs().max()) == 0


def exchanged_rows(plan_json: str) -> tuple[list[int], list[int], list[int]]:
    """Train a step of a random router; rows this rank sent to others and got, and its load by expert."""
    from executor import moe
    from executor.engine import Engine
    from tests.parity import OPTIONS, SEED, tokens_of

    plan = Plan.model_validate_json(plan_json)
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=SEED)
    sent, received = [], []
    dispatch = moe.MoeModule._dispatch

    def watched(self, chosen: torch.Tensor):  # type: ignore[no-untyped-def]
        result = dispatch(self, chosen)
        mine = self.layout.position
        sent.append(sum(count for rank, count in enumerate(result.sent) if rank != mine))
        received.append(sum(count for rank, count in enumerate(result.received) if rank != mine))
        return result

    moe.MoeModule._dispatch = watched  # type: ignore[method-assign]
    try:
        tokens = tokens_of(plan.model, plan.training.global_batch, plan.training.seq_len, 1)
        engine.step(1, lambda first, count: tokens[first : first + count])
    finally:
        moe.MoeModule._dispatch = dispatch  # type: ignore[method-assign]
    loads = [module.load for module in engine.chain if isinstance(module, moe.MoeModule)]
    return sent, received, torch.stack(loads).sum(0).tolist()


@pytest.mark.gloo
def test_a_token_goes_once_to_each_rank_that_has_an_expert_of_it(gloo_pool: GlooPool) -> None:
    """As many rows as a balanced router would send, roughly; never more than a gather of all tokens."""
    num_ranks = 4
    plan = build(experts(), [ReplicaShape([StageShape(num_ranks)], 8, 8)])
    ranks = gloo_pool.run(exchanged_rows, num_ranks, plan.model_dump_json())
    moe = next(module for _, module in plan.model.modules() if isinstance(module, Moe))
    chunk = 8 * SEQ_LEN // num_ranks
    assert sum(sum(sent) for sent, _, _ in ranks) == sum(sum(received) for _, received, _ in ranks)
    assert all(count <= chunk * (num_ranks - 1) for sent, _, _ in ranks for count in sent)
    cuts = balanced_cuts(moe.num_experts, num_ranks)
    parts = [Interval(*pair) for pair in pairwise(cuts)]
    to_others = sum(
        dispatched_tokens(moe, chunk, units) for rank in range(num_ranks) for r, units in enumerate(parts) if r != rank
    )
    assert sum(sum(sent) for sent, _, _ in ranks) == pytest.approx(2 * to_others, rel=0.15)
    load = [sum(column) for column in zip(*(load for _, _, load in ranks), strict=True)]
    assert sum(load) == 2 * 8 * SEQ_LEN * moe.experts_per_token


def test_dispatched_tokens_by_counting_all_choices() -> None:
    moe = Moe(hidden=8, num_experts=7, experts_per_token=3, expert_ffn=4)
    for size in range(8):
        choices = list(combinations(range(7), 3))
        hit = sum(any(expert < size for expert in choice) for choice in choices)
        assert dispatched_tokens(moe, 1, Interval(0, size)) == pytest.approx(hit / len(choices))
