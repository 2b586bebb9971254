"""How the choice of a plan changes with the failure rate: the winner at each rate, by asking every candidate."""

from __future__ import annotations

import io
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cost_models.break_even import Candidate, best_by_rate, break_even
from cost_models.failures import default_failure_model
from planner.start import start_plan
from reports.plan import render
from reports.plan_record import as_json
from specs.plan import Plan

MODEL = default_failure_model()


def candidate(step_seconds: float, num_replicas: int, ranks_per_group: int = 8) -> Candidate:
    return Candidate(
        tokens_per_second=1e6 / step_seconds,
        num_ranks=1024,
        num_replicas=num_replicas,
        devices_per_node=8,
        step_seconds=step_seconds,
        state_bytes_per_rank=10**9,
        ranks_per_group=ranks_per_group,
    )


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(st.floats(1.0, 1.4), min_size=1, max_size=4),
    replicas=st.lists(st.sampled_from([1, 2, 8, 32, 128]), min_size=4, max_size=4),
)
def test_each_range_goes_to_who_delivers_most_in_it(steps: list[float], replicas: list[int]) -> None:
    candidates = [candidate(s, r) for s, r in zip(steps, replicas, strict=False)]
    found = best_by_rate(candidates)
    assert found[-1][1] == math.inf
    rates = [rate for _, rate in found]
    assert rates == sorted(rates)
    low = MODEL.failures_per_device_day / 100.0
    for index, high in found:
        middle = math.sqrt(low * min(high, MODEL.failures_per_device_day * 100.0))
        scaled = MODEL.scaled(middle / MODEL.failures_per_device_day)
        best = max(one.goodput(scaled) for one in candidates)
        assert candidates[index].goodput(scaled) >= best * (1.0 - 1e-9)
        low = high


def test_two_candidates_change_where_they_break_even() -> None:
    fast, sturdy = candidate(1.0, 2), candidate(1.03, 64)
    edge = break_even(fast, sturdy)
    assert edge is not None
    (first, rate), (second, _) = best_by_rate([fast, sturdy])
    assert (first, second) == (0, 1)
    assert math.isclose(rate, edge.failures_per_device_day, rel_tol=1e-4)


def planned(cluster: str, global_batch: int) -> Plan:
    return start_plan(
        model="llama-3-8b",
        cluster=cluster,
        profile_path=None,
        global_batch=global_batch,
        seq_len=8192,
        precision=None,
        memory_cap=None,
        objective="goodput",
        freedom="modules",
        time_limit_seconds=60.0,
        top_k=3,
        command="tests",
    )


def test_a_plan_says_when_another_would_win_and_what_a_loss_leads_to() -> None:
    plan = planned("h100x16", 256)
    assert sum(choice.chosen for choice in plan.rate_choices) == 1
    chosen = next(i for i, choice in enumerate(plan.rate_choices) if choice.chosen)
    usual = 1.0 / MODEL.failures_per_device_day
    until = plan.rate_choices[chosen].until_days
    assert until is None or until < usual, "the objective is goodput at the usual rate"
    assert chosen == 0 or (plan.rate_choices[chosen - 1].until_days or 0.0) > usual
    assert all(choice.until_days is not None for choice in plan.rate_choices[:-1])
    assert plan.contingencies
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(plan))
    text = console.export_text()
    assert "Which plan wins when a device fails once in" in text
    assert "If a device is lost" in text
    keys = as_json(plan)
    assert len(keys["rate_choices"]) == len(plan.rate_choices)
    assert keys["contingencies"][0]["policy"] == plan.contingencies[0].policy
