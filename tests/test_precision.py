"""bf16 weights with fp32 masters: the same course as fp32, small updates are not lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from specs.plan import Plan
from tests.layouts import ReplicaShape, StageShape, build, small_model
from tests.precision import train_losses

if TYPE_CHECKING:
    from tests.gloo import GlooPool

NUM_STEPS = 30


def _with_precision(plan: Plan, precision: str) -> str:
    training = plan.training.model_copy(update={"precision": precision})
    return plan.model_copy(update={"training": training}).model_dump_json()


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 1])
def test_bf16_follows_fp32(gloo_pool: GlooPool, zero: int) -> None:
    mixed = StageShape(2, {"attention": (1, 1)})
    plan = build(small_model(), [ReplicaShape([mixed, StageShape(1)], 2, 4)] * 2, zero=zero)
    exact, weights, masters = gloo_pool.run(train_losses, 6, _with_precision(plan, "fp32"), NUM_STEPS)[0]
    assert weights == masters == {torch.float32}
    rounded, weights, masters = gloo_pool.run(train_losses, 6, _with_precision(plan, "bf16"), NUM_STEPS)[0]
    assert (weights, masters) == ({torch.bfloat16}, {torch.float32})
    assert exact[-1] < exact[0] - 1.0
    assert rounded == pytest.approx(exact, abs=0.05)


@pytest.mark.parametrize("size", [1, 1023, 1024, 5000, 2**20 + 7])
def test_the_norm_by_rows_is_that_in_float64(size: int) -> None:
    from executor.optimizer import square_sum

    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert float(square_sum(values)) == pytest.approx(float(values.double().square().sum()), rel=2e-7)
