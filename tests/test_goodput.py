"""Goodput factors of a plan: consistent with their parts, cheap, and moved the right way by every input."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.failures import default_failure_model
from cost_models.goodput import GoodputFactors, checkpoint_bytes_per_rank, factors, factors_of
from specs.tensors import num_parameters
from tests import plans


def large(**changes: int | float) -> GoodputFactors:
    inputs: dict[str, int | float] = {
        "num_ranks": 16384,
        "num_replicas": 128,
        "devices_per_node": 8,
        "step_seconds": 5.0,
        "state_bytes_per_rank": 300_000_000,
    }
    return factors_of(**(inputs | changes))  # type: ignore[arg-type]


def test_plan_and_counts_agree() -> None:
    on = plans.cluster(32)
    plan = plans.plan(stages=2, ranks=4, replicas=2, on=on)
    size = checkpoint_bytes_per_rank(plan)
    by_plan = factors(plan, step_seconds=1.0, state_bytes_per_rank=size)
    by_counts = factors_of(
        num_ranks=16,
        num_replicas=2,
        devices_per_node=8,
        ranks_per_group=4,
        step_seconds=1.0,
        state_bytes_per_rank=size,
        spare_nodes=2,
    )
    assert by_plan == by_counts
    assert by_plan.spare_nodes == 2
    assert by_plan.estimated


def test_checkpoint_bytes_cover_the_model() -> None:
    plan = plans.plan(replicas=3)
    total = 12 * num_parameters(plan.model.modules())
    assert 0 <= 3 * checkpoint_bytes_per_rank(plan) - total < 3


def test_defaults_are_llama_3s() -> None:
    """419 unexpected interruptions in 54 days on 16,384 GPUs: one in 3.09 hours."""
    found = large()
    assert found.mean_seconds_between_failures / 3600 == pytest.approx(54 * 24 / 419, rel=1e-4)


def test_dropping_whole_nodes_loses_what_failed_nodes_hold() -> None:
    """Replicas of one node each: X is the probability that a node is whole."""
    model = default_failure_model()
    found = factors_of(
        num_ranks=16384, num_replicas=2048, devices_per_node=8, step_seconds=5.0, state_bytes_per_rank=300_000_000
    )
    wait = {"at-once": 0.0, "next-restart": found.mean_seconds_between_failures / 86400}[found.rejoin]
    per_node = sum(c.failures_per_device_day * 8 * (c.repair_hours / 24 + wait) for c in model.classes[:3])
    assert found.degraded_factor == pytest.approx(math.exp(-per_node), rel=1e-9)
    assert large(spare_nodes=500).degraded_factor == pytest.approx(1.0, abs=1e-9)


@settings(deadline=None)
@given(
    ranks_log=st.integers(0, 15),
    replicas_log=st.integers(0, 15),
    step=st.floats(0.01, 100.0),
    state=st.integers(0, 10**11),
    spares=st.integers(1, 50),
)
def test_factors_are_shares_and_smaller_replicas_help(
    ranks_log: int, replicas_log: int, step: float, state: int, spares: int
) -> None:
    num_ranks, num_replicas = 2**ranks_log, 2 ** min(replicas_log, ranks_log)
    inputs = {"num_ranks": num_ranks, "step_seconds": step, "state_bytes_per_rank": state}
    found = factors_of(num_replicas=num_replicas, devices_per_node=8, spare_nodes=spares, **inputs)  # type: ignore[arg-type]
    assert 0.0 <= found.renewal_factor <= 1.0
    assert 0.0 <= found.degraded_factor <= 1.0
    assert found.checkpoint_interval_seconds > 0.0
    fewer = factors_of(num_replicas=1, devices_per_node=8, spare_nodes=spares, **inputs)  # type: ignore[arg-type]
    assert fewer.factor <= found.factor * (1 + 1e-12)
    more = factors_of(num_replicas=num_replicas, devices_per_node=8, spare_nodes=spares + 1, **inputs)  # type: ignore[arg-type]
    assert more.factor >= found.factor * (1 - 1e-12)


def test_no_failures_leave_only_the_stall() -> None:
    quiet = default_failure_model().scaled(0.0)
    found = factors_of(
        num_ranks=1024,
        num_replicas=8,
        devices_per_node=8,
        step_seconds=1.0,
        state_bytes_per_rank=10**9,
        failures=quiet,
    )
    assert found.degraded_factor == 1.0
    assert found.renewal_factor == pytest.approx(1.0, abs=1e-4)
    assert found.checkpoint_interval_seconds == pytest.approx(86400.0, rel=1e-4)


def test_a_thousand_calls_take_well_under_a_second() -> None:
    start = time.perf_counter()
    for _ in range(1000):
        large(spare_nodes=4)
    assert time.perf_counter() - start < 0.8


def test_a_new_shape_takes_a_millisecond_or_two() -> None:
    """The exact sum over thousands of nodes, not cached."""
    start = time.perf_counter()
    for replicas in (16, 32, 64, 128, 256, 512, 1024, 2048):
        large(num_replicas=replicas, num_ranks=32768)
    assert time.perf_counter() - start < 0.1


def test_importing_brings_no_heavy_package() -> None:
    code = (
        "import sys, cost_models.goodput; "
        "print([m for m in ('torch', 'scipy', 'pandas', 'matplotlib', 'networkx', 'pulp') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
