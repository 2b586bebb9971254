"""Peak of a whole step on a rank: predicted against live tensors, with every mode of recompute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from benchmarks.own_machine import SEQ_LEN, plan_of
from executor.engine import Engine
from executor.memory import measure_step
from specs.options import OptimizerOptions
from specs.plan import Recompute
from tests.plans import cluster, rank_memory

pytestmark = pytest.mark.gloo


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process, which computes with one thread as the executor's workers do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.usefixtures("alone")
def test_peak_of_a_step(recompute: Recompute) -> None:
    """The demo model: unlike layers, so that the largest working memory is not everywhere."""
    plan = plan_of(cluster(1, kind="cpu"), recompute=recompute, batch=2)
    engine = Engine(plan, OptimizerOptions(learning_rate=1e-5, num_steps=10), device=torch.device("cpu"), seed=0)
    tokens = torch.randint(plan.model.vocab, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    for step in (1, 2):
        engine.step(step, lambda first, count: tokens[first : first + count])
    with measure_step(engine) as readings:
        engine.step(3, lambda first, count: tokens[first : first + count])
    terms = rank_memory(plan, 0, 0, 0)
    assert terms.weights + terms.gradients + terms.optimizer == readings[0].static_bytes
    assert terms.total() == pytest.approx(readings[0].peak_bytes, rel=0.03)
    beside = terms.activations + terms.working + terms.communication
    assert beside == pytest.approx(readings[0].peak_bytes - readings[0].static_bytes, rel=0.06)
