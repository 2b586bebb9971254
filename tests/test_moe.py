"""Mixtures of experts apart from their parity: operations counted, routing, unused experts."""

from __future__ import annotations

import pytest
import torch

from cost_models.flops import matrix_flop
from executor.clock import Clock
from executor.collectives import Block
from executor.layout import Layout
from executor.moe import MoeModule
from profiles.flops import counted_flop
from specs.model import Moe
from specs.plan import Plan
from specs.tensors import local_rows, tensors_of
from tests.layouts import SEQ_LEN, ReplicaShape, StageShape, build
from tests.test_parity_families import experts


def _plan(num_ranks: int) -> Plan:
    return build(experts(), [ReplicaShape([StageShape(num_ranks)], 7, 7)])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_counted_operations_are_those_of_the_cost_model(num_ranks: int) -> None:
    for rank in range(num_ranks):
        for layout in Layout(_plan(num_ranks), rank).modules:
            if isinstance(layout.module, Moe):
                moe, tokens = layout.module, sum(layout.token_counts)
                expected = matrix_flop(moe, tokens, layout.units)
                # Every rank routes its own tokens only, and holds whole columns of the shared experts.
                router = 2.0 * moe.hidden * moe.num_experts
                expected -= router * (tokens - layout.token_counts[layout.position])
                shared = next((t for t in tensors_of(moe) if t.name == "shared_up"), None)
                if shared is not None:
                    fraction = moe.shared_ffn * layout.units.size / moe.num_experts
                    columns = local_rows(moe, shared, layout.units).size
                    expected += 6.0 * tokens * moe.hidden * (columns - fraction)
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
