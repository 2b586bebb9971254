"""The renewal factor against its definition (a simulated clock), its optimum, and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import lambertw

from cost_models.renewal import (
    daly_interval,
    exact_interval,
    renewal_factor,
    renewal_factor_with_rejoins,
    restart_laplace,
    whole_step_interval,
    young_interval,
)

rates = st.floats(1e-8, 1e-3)
stalls = st.floats(1e-3, 600.0)


def factor(rate: float, work: float, stall: float, lag: float = 0.0, restart: float = 0.0) -> float:
    return renewal_factor(
        rate_per_second=rate,
        work_seconds=work,
        stall_seconds=stall,
        lag_seconds=lag,
        restart_laplace=restart_laplace([rate], [restart]),
    )


@pytest.mark.parametrize(
    ("rate", "work", "stall", "lag", "restart"),
    [
        (1e-3, 300.0, 20.0, 0.0, 0.0),
        (1e-3, 300.0, 20.0, 100.0, 200.0),
        (1e-2, 100.0, 5.0, 80.0, 60.0),
        (1e-4, 1800.0, 60.0, 900.0, 1200.0),
    ],
)
def test_formula_equals_a_simulated_clock(rate: float, work: float, stall: float, lag: float, restart: float) -> None:
    """Many renewals drawn by hand; kept work over elapsed time, with the standard error of a ratio."""
    rng = np.random.default_rng(7)
    uptime = rng.exponential(1.0 / rate, 100_000)
    kept = work * np.maximum(np.floor((uptime - lag) / (work + stall)), 0.0)
    down = np.zeros_like(uptime)
    waiting = np.ones(uptime.size, dtype=bool)
    while waiting.any():
        next_failure = rng.exponential(1.0 / rate, uptime.size)
        down[waiting] += np.minimum(next_failure, restart)[waiting]
        waiting &= next_failure < restart
    length = uptime + down
    ratio = kept.sum() / length.sum()
    error = np.std(kept - ratio * length) / length.mean() / math.sqrt(uptime.size)
    assert abs(ratio - factor(rate, work, stall, lag, restart)) < 4.0 * error


@settings(deadline=None)
@given(rates, stalls)
def test_interval_is_the_maximum(rate: float, stall: float) -> None:
    best = exact_interval(rate, stall)
    at_best = factor(rate, best, stall)
    assert at_best >= factor(rate, best * 1.02, stall)
    assert at_best >= factor(rate, best * 0.98, stall)


@settings(deadline=None)
@given(rates, stalls)
def test_interval_solves_lambert_equation(rate: float, stall: float) -> None:
    argument = -math.exp(-1.0 - rate * stall)
    by_scipy = (1.0 + lambertw(argument).real) / rate
    # scipy's value loses digits near the branch point, where 1 + W is a small difference
    assert exact_interval(rate, stall) == pytest.approx(by_scipy, rel=1e-5)


def test_young_and_daly_agree_when_failures_are_rare() -> None:
    exact = exact_interval(1e-7, 1.0)
    assert young_interval(1e-7, 1.0) == pytest.approx(exact, rel=1e-3)
    assert daly_interval(1e-7, 1.0) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("load", [0.001, 0.1, 0.5])
def test_daly_is_nearer_than_young(load: float) -> None:
    rate, stall = load / 100.0, 100.0
    exact = exact_interval(rate, stall)
    assert abs(daly_interval(rate, stall) - exact) < abs(young_interval(rate, stall) - exact)


def test_limits() -> None:
    assert factor(0.0, 90.0, 10.0) == 0.9
    assert factor(1e-12, 90.0, 10.0, 50.0, 50.0) == pytest.approx(0.9, rel=1e-6)
    assert exact_interval(0.0, 10.0) == math.inf
    assert exact_interval(1e-4, 0.0) == 0.0
    # no stall, no lag, no restart, saving all the time: nothing is lost
    assert factor(1e-4, 1e-3, 0.0) == pytest.approx(1.0, abs=1e-6)
    assert factor(1.0, 1000.0, 10.0) == 0.0


@settings(deadline=None)
@given(rates, stalls, st.floats(0, 1e4), st.floats(0, 1e4))
def test_factor_falls_with_every_evil(rate: float, stall: float, lag: float, restart: float) -> None:
    base = factor(rate, 600.0, stall, lag, restart)
    assert 0.0 <= base <= 1.0
    assert factor(rate * 1.1, 600.0, stall, lag, restart) <= base
    assert factor(rate, 600.0, stall * 1.1, lag, restart) <= base
    assert factor(rate, 600.0, stall, lag + 10.0, restart) <= base
    assert factor(rate, 600.0, stall, lag, restart + 10.0) <= base


@settings(deadline=None)
@given(rates, stalls, st.floats(0.0, 3e3), st.floats(0.1, 100.0))
def test_whole_step_interval_is_best_of_all_whole_steps(rate: float, stall: float, lag: float, step: float) -> None:
    interval = whole_step_interval(
        rate_per_second=rate, stall_seconds=stall, lag_seconds=lag, step_seconds=step, longest_seconds=86400.0
    )
    steps = round(interval / step)
    assert interval == steps * step
    assert steps >= 1
    assert interval >= lag - stall - 1e-6 * step
    assert interval <= max(86400.0, lag - stall + step, step) * (1 + 1e-9)
    if steps > 1 and interval - step >= lag - stall:
        assert factor(rate, interval, stall, lag) >= factor(rate, interval - step, stall, lag) * (1 - 1e-12)
    if interval + step <= 86400.0:
        assert factor(rate, interval, stall, lag) >= factor(rate, interval + step, stall, lag) * (1 - 1e-12)


def test_mixed_restart_times() -> None:
    assert restart_laplace([], []) == 1.0
    mixed = restart_laplace([1e-4, 3e-4], [100.0, 500.0])
    assert mixed == pytest.approx(0.25 * math.exp(-0.04) + 0.75 * math.exp(-0.2))


@pytest.mark.parametrize(("rejoins", "lag"), [(2e-3, 0.0), (5e-4, 150.0), (1e-2, 40.0)])
def test_rejoin_formula_equals_a_simulated_clock(rejoins: float, lag: float) -> None:
    """The planned stops of the docstring, drawn by hand."""
    rate, work, stall, restart, rejoin = 1e-3, 300.0, 20.0, 120.0, 60.0
    rng = np.random.default_rng(11)
    size = 200_000
    up = rng.exponential(1.0 / (rate + rejoins), size)
    fails = rng.random(size) < rate / (rate + rejoins)
    cycle = work + stall
    durable = work * np.maximum(np.floor((up - lag) / cycle), 0.0)
    done = work * np.floor(up / cycle) + np.minimum(up % cycle, work)
    next_failure = rng.exponential(1.0 / rate, size)
    saved = next_failure > stall + lag
    kept = np.where(fails | ~saved, durable, done)
    stop = np.where(fails, 0.0, np.minimum(next_failure, stall + lag + rejoin))
    waiting = fails | (next_failure < stall + lag + rejoin)
    down = np.zeros(size)
    while waiting.any():
        gap = rng.exponential(1.0 / rate, size)
        down[waiting] += np.minimum(gap, restart)[waiting]
        waiting &= gap < restart
    length = up + stop + down
    ratio = kept.sum() / length.sum()
    error = np.std(kept - ratio * length) / length.mean() / math.sqrt(size)
    formula = renewal_factor_with_rejoins(
        rate_per_second=rate,
        rejoins_per_second=rejoins,
        work_seconds=work,
        stall_seconds=stall,
        lag_seconds=lag,
        restart_laplace=restart_laplace([rate], [restart]),
        rejoin_seconds=rejoin,
    )
    assert abs(ratio - formula) < 4.0 * error


@settings(deadline=None)
@given(rates, stalls, st.floats(1e-12, 1e-2))
def test_rejoins_vanish_when_rare_and_never_help(rate: float, stall: float, rejoins: float) -> None:
    def with_rejoins(per_second: float) -> float:
        return renewal_factor_with_rejoins(
            rate_per_second=rate,
            rejoins_per_second=per_second,
            work_seconds=600.0,
            stall_seconds=stall,
            lag_seconds=30.0,
            restart_laplace=1.0,
            rejoin_seconds=2000.0,
        )

    plain = factor(rate, 600.0, stall, 30.0)
    assert with_rejoins(1e-15 * rate) == pytest.approx(plain, rel=1e-6)
    assert with_rejoins(rejoins) <= plain * (1 + 1e-9)
