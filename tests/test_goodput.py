"""Goodput factors of a plan: consistent with their parts, cheap, and moved the right way by every input."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli import app
from cost_models.break_even import Candidate, break_even
from cost_models.failure_fit import fit, read_incidents
from cost_models.failures import default_failure_model
from cost_models.goodput import GoodputFactors, checkpoint_bytes_per_rank, factors, factors_of
from cost_models.sources import device_costs
from cost_models.step import price
from specs.base import load_document
from specs.errors import BadInputError
from specs.plan import MemoryTerms, Plan, Prediction, StepTerms
from specs.presets import cluster_preset, model_preset
from specs.tensors import num_parameters
from tests import plans

ROOT = Path(__file__).resolve().parents[1]


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


def test_hopeless_plans_still_have_a_positive_goodput() -> None:
    """One replica of 65,536 GPUs, and a checkpoint of a terabyte per rank every day."""
    assert 0.0 < large(num_ranks=65536, num_replicas=1).degraded_factor < 1e-12
    assert 0.0 < large(num_ranks=65536, step_seconds=1e5, state_bytes_per_rank=10**12).renewal_factor < 1e-12


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


def candidate(replicas: int, tokens_per_second: float) -> Candidate:
    return Candidate(
        tokens_per_second=tokens_per_second,
        num_ranks=256,
        num_replicas=replicas,
        devices_per_node=8,
        step_seconds=5.0,
        state_bytes_per_rank=10**9,
        ranks_per_group=8,
    )


def test_break_even_is_where_both_deliver_the_same() -> None:
    fast, sturdy = candidate(2, 1.00e6), candidate(16, 0.97e6)
    found = break_even(fast, sturdy)
    assert found is not None
    at = default_failure_model().scaled(found.multiplier)
    assert fast.goodput(at) == pytest.approx(sturdy.goodput(at), rel=1e-6)
    assert found.second_wins_above
    assert fast.goodput(default_failure_model().scaled(found.multiplier / 1.5)) > 0.0
    below, above = (default_failure_model().scaled(found.multiplier * f) for f in (0.7, 1.4))
    assert fast.goodput(below) > sturdy.goodput(below)
    assert fast.goodput(above) < sturdy.goodput(above)
    days = found.days_between_failures
    assert days == pytest.approx(1 / at.failures_per_device_day, rel=1e-9)
    assert found.sentence("A", "B") == f"A wins unless a device fails more often than once in {days:,.0f} days, then B"
    turned = break_even(sturdy, fast)
    assert turned is not None
    assert not turned.second_wins_above
    assert turned.sentence("B", "A") == found.sentence("A", "B")


def test_a_plan_that_is_always_ahead_has_no_break_even() -> None:
    assert break_even(candidate(16, 1.00e6), candidate(2, 0.97e6)) is None


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 70B model on 1,024 GPUs, 32 replicas of four nodes."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plans.plan(
        stages=4,
        ranks=8,
        replicas=32,
        micro_batches=16,
        seq_len=8192,
        model=model_preset("llama-3-70b"),
        on=cluster_preset("h100x1024"),
    ).save(path)
    return path


def run_json(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_simulate_agrees_with_itself(plan_file: Path) -> None:
    found = run_json("simulate", str(plan_file), "--policy", "all", "--days", "60", "--trials", "60")
    shares = found["waterfall"]
    losses = [share for name, share in shares.items() if name not in ("ideal", "delivered")]
    assert shares["ideal"] + sum(losses) == pytest.approx(shares["delivered"], abs=1e-9)
    assert max(losses) <= 1e-12
    head = found["headline"]
    assert head["tokens_per_day_p5"] <= head["tokens_per_day_p50"] <= head["tokens_per_day_p95"]
    assert len(found["policies"]) == 8
    for name, policy in found["policies"].items():
        if name not in ("wait", "drop-in-place"):
            assert abs(policy["monte_carlo"] - policy["closed_form"]) < 4 * policy["standard_error"] + 2e-3
    assert found["verdict"].startswith("In domains of 8, nonuniform TP gains")
    gains = list(found["improvements"].values())
    assert gains == sorted(gains, reverse=True)
    assert found["sensitivity"]["failures x 2"] < 0 < found["sensitivity"]["failures x 1/2"]
    exact = found["checkpoint"]["exact_seconds"]
    assert found["checkpoint"]["young_seconds"] == pytest.approx(exact, rel=0.05)
    assert found["checkpoint"]["daly_seconds"] == pytest.approx(exact, rel=0.01)


def test_simulate_takes_the_plans_own_prediction(plan_file: Path, tmp_path: Path) -> None:
    """G x X of the headline's policy is what the plan itself predicts."""
    plan = load_document(Plan, plan_file, "plan")
    predicted = price(plan, device_costs(plan.cluster, plan.training))
    path = tmp_path / "priced.json"
    plan.with_results(predicted=predicted).save(path)
    found = run_json("simulate", str(path), "--trials", "4", "--tokens", "1e12")
    drop = found["policies"]["drop"]
    assert drop["renewal_factor"] == pytest.approx(predicted.renewal_factor, rel=1e-9)
    assert drop["degraded_factor"] == pytest.approx(predicted.degraded_factor, rel=1e-9)
    head = found["headline"]
    assert head["days_to_tokens"] * head["tokens_per_day"] == pytest.approx(1e12)
    assert head["device_hours_to_tokens"] == pytest.approx(head["days_to_tokens"] * 1024 * 24)
    assert found["headline"] == run_json("simulate", str(path), "--trials", "4", "--tokens", "1e12")["headline"]
    other = run_json("simulate", str(path), "--trials", "4", "--tokens", "1e12", "--seed", "1")
    assert found["headline"] != other["headline"]


def test_the_best_plan_need_not_be_the_fastest(tmp_path: Path) -> None:
    """Llama-3-70B on 128 H100: four replicas are faster, eight deliver more; and the other way with few failures."""
    choice = runpy.run_path(str(ROOT / "benchmarks" / "goodput_choice.py"))
    fastest, best, crossing = choice["fastest_and_best"](choice["choices"]())
    assert fastest is not best, "costs have changed: docs/goodput.md needs another cluster under 'The fastest plan'"
    assert fastest.predicted.step_time_seconds < best.predicted.step_time_seconds
    assert fastest.predicted.goodput_tokens_per_second < best.predicted.goodput_tokens_per_second
    assert len(fastest.plan.replicas) < len(best.plan.replicas)
    assert crossing.second_wins_above
    assert choice["played"](fastest, 90.0, 60) < choice["played"](best, 90.0, 60)
    paths = [tmp_path / "fast.json", tmp_path / "best.json"]
    for path, one in zip(paths, (fastest, best), strict=True):
        one.plan.with_results(predicted=one.predicted).save(path)
    found = run_json("simulate", str(paths[0]), "--trials", "2", "--against", str(paths[1]))["against"]
    assert found["goodput_tokens_per_second"] == pytest.approx(best.predicted.goodput_tokens_per_second)
    assert found["break_even_days_between_failures"] == pytest.approx(crossing.days_between_failures, rel=1e-6)
    assert "wins unless a device fails more often than once in" in found["sentence"]
    alone = run_json("simulate", str(paths[0]), "--trials", "2", "--against", str(paths[0]))["against"]
    assert "changes who is ahead" in alone["sentence"]


def test_simulate_prints_and_draws(plan_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "goodput.svg"
    arguments = ["simulate", str(plan_file), "--policy", "all", "--trials", "4", "--plot", str(picture), "--keep-batch"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for text in ("tokens per day", "Policies side by side", "Improve first", "Stragglers", "wasted_progress"):
        assert text in result.output
    assert picture.read_text().startswith("<?xml")


def test_simulate_says_that_nodes_of_eight_gain_little(tmp_path: Path) -> None:
    """16,384 GPUs at the published rates."""
    path = tmp_path / "plan.json"
    plans.plan(
        stages=4,
        ranks=8,
        replicas=512,
        micro_batches=16,
        seq_len=8192,
        model=model_preset("llama-3-70b"),
        on=cluster_preset("h100x16384"),
    ).save(path)
    found = run_json("simulate", str(path), "--policy", "all", "--trials", "2")
    drop, ntp = found["policies"]["drop"]["closed_form"], found["policies"]["ntp"]["closed_form"]
    assert 1.0 < ntp / drop < 1.01
    assert "nonuniform TP gains under 1 % over packed drop" in found["verdict"]


def test_simulate_without_any_failure(plan_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "failures.json"
    default_failure_model().model_copy(update={"classes": ()}).save(path)
    found = run_json("simulate", str(plan_file), "--policy", "all", "--trials", "2", "--failures", str(path))
    assert found["waterfall"]["delivered"] == pytest.approx(1.0, abs=1e-3)
    assert found["failures_per_day"] == 0.0
    assert found["checkpoint"]["exact_seconds"] is None
    result = CliRunner().invoke(app, ["simulate", str(plan_file), "--trials", "2", "--failures", str(path)])
    assert result.exit_code == 0, result.output
    assert "never" in result.output


def test_simulate_carries_the_intervals_of_fitted_rates(plan_file: Path, tmp_path: Path) -> None:
    incidents = tmp_path / "incidents.csv"
    incidents.write_text("class\n" + "gpu\n" * 9)
    path = tmp_path / "failures.json"
    model = fit(read_incidents(incidents), default_failure_model(), num_devices=1024, days=30.0, source="ours")
    model.save(path)
    found = run_json("simulate", str(plan_file), "--trials", "2", "--failures", str(path))["sensitivity"]
    assert found["rates at high ends"] < 0 < found["rates at low ends"]
    assert "rates at low ends" not in run_json("simulate", str(plan_file), "--trials", "2")["sensitivity"]


def test_simulate_refuses_repairs_that_cannot_keep_up(plan_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "failures.json"
    default_failure_model().model_copy(update={"repair_slots": 1}).save(path)
    result = CliRunner().invoke(app, ["simulate", str(plan_file), "--failures", str(path)])
    assert isinstance(result.exception, BadInputError)
    assert "queue would grow without end" in str(result.exception)


def test_simulate_serves_two_cpus(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    machine = plans.cluster(2, per_node=2, kind="cpu")
    predicted = Prediction(
        step_time_seconds=0.5,
        step_terms=StepTerms(forward=0.2, backward=0.3),
        tokens_per_second=256.0,
        peak_memory_bytes=10**8,
        peak_memory_rank=0,
        peak_memory_terms=MemoryTerms(weights=10**8),
        stage_memory_bytes=(10**8,),
        goodput_tokens_per_second=250.0,
        renewal_factor=0.99,
        degraded_factor=0.99,
        checkpoint_interval_seconds=60.0,
        estimated=False,
    )
    plans.plan(ranks=2, replicas=1, on=machine).with_results(predicted=predicted).save(path)
    found = run_json("simulate", str(path), "--policy", "all", "--trials", "4")
    assert 0.9 < found["waterfall"]["delivered"] <= 1.0
