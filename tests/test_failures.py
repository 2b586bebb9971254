"""Failure models: the shipped one, a user's own, rates from incidents, and what waiting for the slowest costs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli import app
from cost_models.failure_fit import fit, poisson_interval, read_incidents
from cost_models.failures import (
    default_failure_model,
    lag_seconds,
    load_failure_model,
    load_seconds,
    restart_seconds,
    stall_seconds,
)
from cost_models.stragglers import (
    best_culling,
    culling_gain,
    expected_maximum,
    expected_range,
    stragglers,
    with_profile,
)
from specs.errors import BadInputError
from specs.failures import FailureModel, SlowDevices
from tests import plans, profiles


def test_defaults_are_llama_3s_table() -> None:
    model = default_failure_model()
    assert sum(item.count or 0 for item in model.classes) == 419
    for item in model.classes:
        assert item.count is not None
        assert item.failures_per_device_day == pytest.approx(item.count / (16384 * 54), rel=1e-5)
        assert item.source
    assert model.estimated
    assert all(part.source for part in (model.checkpointing, model.restarting, model.slow))


def test_saving_matches_the_published_run() -> None:
    """405B on 8,960 GPUs, 14 bytes per parameter: stall 0.59 s, save 51 s, load 129 s."""
    model, state = default_failure_model(), 405e9 * 14 / 8960
    assert stall_seconds(model, state) == pytest.approx(0.59, rel=0.02)
    assert lag_seconds(model, state, 8960) == pytest.approx(51.06, rel=0.02)
    assert load_seconds(model, state, 8960) == pytest.approx(129.49, rel=0.02)
    assert restart_seconds(model, 16000) == pytest.approx(200.0, rel=0.05)
    assert restart_seconds(model, 98000) == pytest.approx(900.0, rel=0.05)


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "failures.json"
    model = default_failure_model().scaled(2.0)
    model.save(path)
    assert load_failure_model(path) == model
    assert model.failures_per_device_day == pytest.approx(2 * default_failure_model().failures_per_device_day)
    assert load_failure_model(None) is default_failure_model()


def test_a_repair_time_belongs_to_a_loss() -> None:
    data = default_failure_model().model_dump()
    data["classes"][0]["repair_hours"] = 0.0
    with pytest.raises(ValueError, match="repair time belongs to a radius"):
        FailureModel.model_validate(data)


@pytest.mark.parametrize(
    ("count", "low", "high"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (10, 4.795, 18.39), (100, 81.36, 121.6)]
)
def test_poisson_interval_has_the_tabulated_ends(count: int, low: float, high: float) -> None:
    found = poisson_interval(count, 1.0)
    assert found == (pytest.approx(low, rel=1e-3), pytest.approx(high, rel=1e-3))


def test_poisson_interval_covers() -> None:
    """At least 95 % of the intervals of drawn counts hold the rate they were drawn from."""
    rng = np.random.default_rng(5)
    for mean in (0.7, 4.0, 25.0):
        counts = rng.poisson(mean, 4000)
        ends = {count: poisson_interval(int(count), 1.0) for count in set(counts.tolist())}
        held = np.mean([ends[count][0] <= mean <= ends[count][1] for count in counts.tolist()])
        assert held >= 0.945


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "incidents.csv"
    path.write_text(text)
    return path


def test_fit_counts_and_averages(tmp_path: Path) -> None:
    path = write(tmp_path, "date,class,repair_hours,detect_seconds,count\na,gpu,10,,\nb,gpu,40,30,2\nc,software,,,\n")
    model = fit(read_incidents(path), default_failure_model(), num_devices=100, days=50.0, source="ours")
    by_name = {item.name: item for item in model.classes}
    gpu = by_name["gpu"]
    assert (gpu.count, gpu.device_days, gpu.failures_per_device_day) == (3, 5000.0, 3 / 5000)
    assert gpu.repair_hours == pytest.approx(30.0)
    assert gpu.detect_seconds == pytest.approx(30.0)
    assert gpu.rate_interval == poisson_interval(3, 5000.0)
    assert by_name["host"].count == 0
    assert by_name["host"].failures_per_device_day == 0.0
    assert by_name["host"].rate_interval == (0.0, pytest.approx(3.689 / 5000, rel=1e-3))
    assert by_name["software"].repair_hours == 0.0
    assert "repair and detection from" in by_name["host"].source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the header must have the column `class`"),
        ("date,kind\n1,gpu\n", "it has: date, kind"),
        ("class\n\n \n", "the class is empty"),
        ("class,repair_hours\ngpu,soon\n", "line 2: repair_hours is 'soon'"),
        ("class,repair_hours\ngpu,-3\n", "a number >= 0"),
        ("class,count\ngpu,1.5\n", "a whole number"),
        ("class,count\ngpu,nan\n", "a number >= 0"),
    ],
)
def test_bad_lists_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read_incidents(write(tmp_path, text))
    assert message in str(caught.value)


def test_unknown_class_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="'flux'; known are: gpu, host, network"):
        fit(
            read_incidents(write(tmp_path, "class\nflux\n")), default_failure_model(), num_devices=1, days=1, source="x"
        )
    with pytest.raises(BadInputError, match="cannot be read"):
        read_incidents(tmp_path / "none.csv")


def test_command_prints_and_writes(tmp_path: Path) -> None:
    path, out = write(tmp_path, "class\ngpu\ngpu\nhang\n"), tmp_path / "model.json"
    result = CliRunner().invoke(app, ["fit-failures", str(path), "--devices", "64", "--days", "30", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "gpu" in result.output
    assert load_failure_model(out).classes[0].count == 2


@pytest.mark.parametrize(("number", "value"), [(1, 0.0), (2, 0.5642), (10, 1.5388), (100, 2.5076), (1000, 3.2414)])
def test_expected_maximum_of_normals(number: int, value: float) -> None:
    assert expected_maximum(number) == pytest.approx(value, abs=1e-3)


def test_expected_maximum_by_draws() -> None:
    draws = np.random.default_rng(1).standard_normal((4000, 300)).max(axis=1)
    assert abs(draws.mean() - expected_maximum(300)) < 4 * draws.std() / math.sqrt(draws.size)
    assert expected_range(2) == pytest.approx(1.128, abs=1e-3)
    assert expected_range(8) == pytest.approx(2.847, abs=1e-3)


def slow_devices(**changes: float) -> SlowDevices:
    return default_failure_model().slow.model_copy(update=changes)


@settings(deadline=None)
@given(st.integers(1, 4096), st.floats(0.0, 0.1), st.floats(1.0, 2.0), st.floats(0.0, 1.0))
def test_straggler_factors_are_at_least_one(nodes: int, fraction: float, slowdown: float, share: float) -> None:
    found = stragglers(
        slow_devices(node_fraction=fraction, slowdown=slowdown),
        num_ranks=8 * nodes,
        num_nodes=nodes,
        between_hosts_share=share,
    )
    assert min(found.spread, found.links, found.episodes, found.persistent) >= 1.0 - 1e-12
    assert found.total(culled=True) <= found.total(culled=False) * (1 + 1e-12)
    assert found.persistent <= slowdown + 1e-12


def test_culling_by_draws() -> None:
    """Taking out the k slowest of 64 nodes of which each is slow with probability 2 %."""
    slow, nodes, taken = slow_devices(node_fraction=0.02, slowdown=1.3), 64, 2
    number = np.random.default_rng(2).binomial(nodes, 0.02, 200_000)
    speed = {k: (1 - k / nodes) / (1 + np.mean(number > k) * 0.3) for k in (0, taken)}
    assert culling_gain(slow, num_nodes=nodes, culled=taken) == pytest.approx(speed[taken] / speed[0] - 1, abs=2e-3)
    best, gain = best_culling(slow, num_nodes=nodes)
    assert gain >= max(culling_gain(slow, num_nodes=nodes, culled=k) for k in (0, 1, 2, 3))
    assert best >= 1
    assert best_culling(slow_devices(node_fraction=0.0), num_nodes=nodes) == (0, 0.0)


def test_spread_comes_from_a_profile() -> None:
    timed = profiles.profile(plans.tiny_model(), plans.cluster(4))
    modules = []
    for index, item in enumerate(timed.modules):
        forward = item.forward.model_copy(update={"rank_spread": 0.05 + 0.01 * index})
        modules.append(item.model_copy(update={"forward": forward}))
    timed = timed.model_copy(update={"modules": tuple(modules)})
    mean = 0.05 + 0.01 * (len(modules) - 1) / 2
    found = with_profile(slow_devices(), timed)
    assert found.step_time_spread == pytest.approx(mean / expected_range(timed.world_size))
    assert "from a profile" in found.source
