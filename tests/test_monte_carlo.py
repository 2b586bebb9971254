"""The closed forms against the clock that is played out: within four standard errors, scenario by scenario."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest

from cost_models.degraded import exact_factor, hardware_failures_per_second, outages, queue_seconds
from cost_models.failures import default_failure_model
from cost_models.goodput import Rejoin, Times, times_of
from cost_models.history import draw_history
from cost_models.monte_carlo import Job, Outcome, simulate
from cost_models.policies import Geometry, Policy
from cost_models.renewal import renewal_factor, restart_laplace
from cost_models.two_tier import TwoTier, best_two_tier, drain_segments, two_tier_factor
from specs.failures import FailureClass, FailureModel

DAY = 86400.0


def failure_class(rate: float, radius: str, repair: float, detect: float = 30.0) -> FailureClass:
    return FailureClass(
        name=radius,
        domain="device",
        failures_per_device_day=rate,
        blast_radius=radius,  # type: ignore[arg-type]
        detect_seconds=detect,
        repair_hours=repair,
        source="made up for tests",
    )


def model_of(*classes: FailureClass, **changes: object) -> FailureModel:
    return default_failure_model().model_copy(update={"classes": classes, **changes})


@dataclass(frozen=True)
class Scenario:
    name: str
    model: FailureModel
    geometry: Geometry
    policy: Policy
    rejoin: Rejoin
    shares: tuple[float, ...]
    step_seconds: float = 10.0
    state_bytes: int = 10**9


SOFTWARE = failure_class(0.05, "none", 0.0)
DEVICE = failure_class(0.01, "device", 12.0)
RARE_DEVICE = failure_class(0.002, "device", 24.0)
NODE = failure_class(0.002, "node", 24.0, detect=90.0)
ONE_GROUP = Geometry(num_replicas=32, num_stages=1, group_size=8, domain_size=8, micro_batches=8)
TWO_STAGES = Geometry(num_replicas=16, num_stages=2, group_size=8, domain_size=8, micro_batches=8)
SMALL_GROUPS = Geometry(num_replicas=32, num_stages=2, group_size=4, domain_size=8, micro_batches=8)
LARGE_DOMAIN = Geometry(num_replicas=16, num_stages=1, group_size=32, domain_size=32, micro_batches=16)
WHOLE = {8: (0.0,) * 8 + (1.0,), 4: (0.0,) * 4 + (1.0,), 32: (0.0,) * 32 + (1.0,)}
PARTIAL = {8: (0.0,) * 6 + (0.5, 0.75, 1.0), 32: (0.0,) * 28 + (0.75, 0.75, 0.875, 0.875, 1.0)}
DROP, FIXED = Policy("drop", "drop"), Policy("fixed", "drop", packed=False)
NTP, FIXED_NTP = Policy("ntp", "ntp"), Policy("fixed ntp", "ntp", packed=False)

SCENARIOS = [
    Scenario("software only", model_of(SOFTWARE), ONE_GROUP, DROP, "next-restart", WHOLE[8]),
    Scenario("heavy state", model_of(SOFTWARE), ONE_GROUP, DROP, "next-restart", WHOLE[8], 20.0, 2 * 10**10),
    Scenario("mixed downtimes", model_of(SOFTWARE, failure_class(0.02, "none", 0.0, 900.0)), ONE_GROUP, DROP,
             "next-restart", WHOLE[8]),
    Scenario("drop, at once", model_of(SOFTWARE, RARE_DEVICE), ONE_GROUP, DROP, "at-once", WHOLE[8]),
    Scenario("drop, next restart", model_of(SOFTWARE, RARE_DEVICE), ONE_GROUP, DROP, "next-restart", WHOLE[8]),
    Scenario("drop two stages", model_of(SOFTWARE, RARE_DEVICE), TWO_STAGES, DROP, "next-restart", WHOLE[8]),
    Scenario("fixed places", model_of(SOFTWARE, RARE_DEVICE), TWO_STAGES, FIXED, "next-restart", WHOLE[8]),
    Scenario("small groups", model_of(SOFTWARE, RARE_DEVICE), SMALL_GROUPS, DROP, "next-restart", WHOLE[4]),
    Scenario("node failures", model_of(SOFTWARE, RARE_DEVICE, NODE), TWO_STAGES, DROP, "next-restart", WHOLE[8]),
    Scenario("fixed, node failures", model_of(SOFTWARE, NODE), SMALL_GROUPS, FIXED, "next-restart", WHOLE[4]),
    Scenario("spares", model_of(SOFTWARE, DEVICE), ONE_GROUP, DROP.with_spares(4), "next-restart", WHOLE[8]),
    Scenario("ntp", model_of(SOFTWARE, DEVICE), ONE_GROUP, NTP, "next-restart", PARTIAL[8]),
    Scenario("ntp fixed", model_of(SOFTWARE, DEVICE), TWO_STAGES, FIXED_NTP, "next-restart", PARTIAL[8]),
    Scenario("ntp, large domains", model_of(SOFTWARE, DEVICE), LARGE_DOMAIN, NTP, "next-restart", PARTIAL[32]),
    Scenario("ntp with spares", model_of(SOFTWARE, DEVICE), TWO_STAGES, NTP.with_spares(2), "next-restart", PARTIAL[8]),
    Scenario("fixed repair time", model_of(SOFTWARE, RARE_DEVICE, repair_time="fixed"), ONE_GROUP, DROP,
             "next-restart", WHOLE[8]),
    Scenario("waiting", model_of(failure_class(1e-4, "device", 6.0)), ONE_GROUP, Policy("wait", "wait"), "at-once",
             WHOLE[8]),
]  # fmt: skip


def times_for(scenario: Scenario) -> Times:
    return times_of(
        scenario.model,
        num_ranks=scenario.geometry.num_ranks,
        state_bytes_per_rank=scenario.state_bytes,
        step_seconds=scenario.step_seconds,
    )


def play(scenario: Scenario, *, days: float, trials: int, seed: int = 1) -> Outcome:
    job = Job(
        scenario.policy,
        scenario.geometry,
        scenario.shares,
        tuple(1.0 / s if s else float("inf") for s in scenario.shares),
        scenario.rejoin,
    )
    (found,) = simulate([job], scenario.model, times_for(scenario), seconds=days * DAY, trials=trials, seed=seed)
    return found


def closed_form(scenario: Scenario) -> float:
    times, model, geometry = times_for(scenario), scenario.model, scenario.geometry
    lazy = scenario.rejoin == "next-restart"
    out = outages(
        model,
        host_size=geometry.host_size,
        num_devices=geometry.num_ranks,
        wait_seconds=1.0 / times.rate_per_second if lazy else 0.0,
    )
    rejoins = 0.0 if lazy else hardware_failures_per_second(model, geometry.num_ranks)
    return times.renewal(rejoins_per_second=rejoins) * exact_factor(scenario.policy, geometry, scenario.shares, out)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_closed_form_within_four_standard_errors(scenario: Scenario) -> None:
    found = play(scenario, days=200.0, trials=24)
    assert found.standard_error < 0.003
    assert abs(found.mean - closed_form(scenario)) < 4.0 * found.standard_error


def test_seconds_add_up_and_seed_decides() -> None:
    scenario = SCENARIOS[8]
    first, again, other = (play(scenario, days=20.0, trials=3, seed=seed) for seed in (5, 5, 6))
    assert sum(first.seconds.values()) == pytest.approx(20.0 * DAY)
    assert first.full_speed_seconds <= first.seconds["step"]
    assert (first.trials == again.trials).all()
    assert (first.trials != other.trials).any()
    low, middle, high = first.quantiles()
    assert low <= middle <= high


def test_no_failures_leave_the_stall() -> None:
    quiet = Scenario("quiet", default_failure_model().scaled(0.0), ONE_GROUP, DROP, "at-once", WHOLE[8])
    found = play(quiet, days=30.0, trials=2)
    times = times_for(quiet)
    assert found.mean == pytest.approx(times.interval / (times.interval + times.stall), rel=1e-3)
    assert found.standard_error == 0.0


def test_repairs_queue_for_slots() -> None:
    """Device outages with few repair slots: Erlang's formula against the history that is played."""
    model = model_of(failure_class(0.02, "device", 8.0), repair_slots=3)
    num_devices, days = 256, 4000.0
    rng = np.random.default_rng(3)
    history = draw_history(model, num_ranks=num_devices, num_devices=num_devices, seconds=days * DAY, rng=rng)
    change = np.where(history.kinds == 0, 1.0, -1.0)
    inside = history.times >= 0.0
    start = change[~inside].sum()
    edges = np.concatenate(([0.0], history.times[inside], [days * DAY]))
    held = np.diff(edges) * (start + np.concatenate(([0.0], np.cumsum(change[inside]))))
    blocks = np.add.reduceat(held, np.arange(0, held.size, held.size // 40))[:-1]
    spans = np.add.reduceat(np.diff(edges), np.arange(0, held.size, held.size // 40))[:-1]
    means = blocks / spans
    rate = hardware_failures_per_second(model, num_devices)
    expected = rate * (8.0 * 3600.0 + queue_seconds(model, num_devices))
    assert queue_seconds(model, num_devices) > 3600.0
    assert abs(means.mean() - expected) < 4.0 * means.std(ddof=1) / np.sqrt(means.size)


def test_large_cluster_is_fast() -> None:
    """32,768 GPUs in domains of 32, 30 days, eight histories: the whole command has ten seconds for more of them."""
    geometry = Geometry(128, 8, 32, 32, 16)
    scenario = Scenario("large", default_failure_model(), geometry, DROP, "next-restart", WHOLE[32])
    start = time.perf_counter()
    found = play(scenario, days=30.0, trials=8)
    assert time.perf_counter() - start < 5.0
    assert 400.0 < found.failures < 540.0


def two_tier_clock(case: TwoTier, work: float, segments: int, *, steps: int, seed: int) -> tuple[float, float]:
    """Kept share of time and its standard error, one failure at a time; follows the words of `two_tier`."""
    rng = np.random.default_rng(seed)
    drain = drain_segments(case, work)
    gaps = iter(rng.exponential(1.0 / case.rate_per_second, steps).tolist())
    kinds = iter((rng.random(steps) < case.memory_survives).tolist())
    kept: list[float] = []
    spent: list[float] = []
    now, base, position, fresh, best, begun = next(gaps), 0, 0, True, 0, 0.0
    clock = 0.0
    failure = now
    for gap, by_memory in zip(gaps, kinds, strict=False):
        while True:  # segments until the failure
            stall = case.memory_stall + (case.storage_stall if (position + 1) % segments == 0 else 0.0)
            need = work + stall + (case.memory_lag if fresh else 0.0)
            if clock + need > failure:
                break
            clock += need
            fresh = False
            position += 1
            if position >= segments + drain + base and (position - drain) % segments == 0:
                base = position - drain
            best = max(best, position)
        memory = by_memory
        clock, failure = failure, failure + gap
        while True:  # restarts, which fail as well
            need = case.restart_memory if memory else case.restart_storage
            if clock + need <= failure:
                clock += need
                break
            clock, failure = failure, failure + float(rng.exponential(1.0 / case.rate_per_second))
            memory = memory and bool(rng.random() < case.memory_survives)
        if not memory:
            position = base
        fresh = True
        if len(kept) < 50 and clock - begun > steps / case.rate_per_second / 55:
            kept.append((position - sum(kept) / work) * work)
            spent.append(clock - begun)
            begun = clock
    shares = np.array(kept) / np.array(spent)
    return float(np.sum(kept) / np.sum(spent)), float(shares.std(ddof=1) / np.sqrt(shares.size))


@pytest.mark.parametrize(
    ("case", "work", "segments"),
    [
        (TwoTier(1e-3, 0.8, 2.0, 0.0, 20.0, 0.0, 30.0, 200.0), 60.0, 6),
        (TwoTier(1e-3, 0.5, 2.0, 15.0, 20.0, 150.0, 30.0, 200.0), 60.0, 4),
        (TwoTier(2e-3, 0.9, 1.0, 5.0, 10.0, 400.0, 60.0, 300.0), 40.0, 3),
        (TwoTier(5e-4, 0.0, 2.0, 10.0, 5.0, 90.0, 30.0, 100.0), 100.0, 2),
    ],
)
def test_two_tiers_equal_the_clock(case: TwoTier, work: float, segments: int) -> None:
    found, error = two_tier_clock(case, work, segments, steps=60_000, seed=2)
    assert error < 0.004
    assert abs(found - two_tier_factor(case, work, segments)) < 4.0 * error


def test_two_tiers_with_equal_tiers_are_one() -> None:
    case = TwoTier(1e-3, 1.0, 5.0, 20.0, 0.0, 0.0, 60.0, 60.0)
    one = renewal_factor(
        rate_per_second=1e-3,
        work_seconds=100.0,
        stall_seconds=5.0,
        lag_seconds=20.0,
        restart_laplace=restart_laplace([1e-3], [60.0]),
    )
    assert two_tier_factor(case, 100.0, 1) == pytest.approx(one, rel=1e-12)
    assert two_tier_factor(case, 100.0, 7) == pytest.approx(one, rel=1e-12)


def test_best_two_tier_beats_its_neighbours() -> None:
    case = TwoTier(2e-4, 0.85, 0.5, 5.0, 20.0, 300.0, 60.0, 400.0)
    best = best_two_tier(case)
    for work, segments in ((1.1, 0), (0.9, 0), (1.0, 1), (1.0, -1)):
        if best.segments + segments >= 1:
            assert two_tier_factor(case, best.work_seconds * work, best.segments + segments) <= best.factor * (1 + 1e-6)
