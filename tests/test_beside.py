"""Work in a second process: the same results as without one, errors handed on, nobody left behind."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import get_context

import pytest

from cost_models.sources import device_costs
from planner import beside, ladder, make
from planner.beside import Beside
from planner.grid_search import Incumbent
from planner.make import Problem, make_plan
from planner.problem import Pricer, make_searcher
from specs.errors import NoPlanFitsError
from specs.plan import Certificate, Provenance, TrainingSpec
from specs.presets import cluster_preset, model_preset


def problem() -> Problem:
    return Problem(
        model_preset("llama-3-8b"),
        cluster_preset("h100x8"),
        TrainingSpec(global_batch=64, seq_len=8192),
        Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z"),
        memory_cap_bytes=64 * 2**30,
    )


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr(beside, "_may_fork", lambda: True)


@pytest.mark.usefixtures("two_cores")
def test_a_second_process_does_the_work_and_changes_nothing_here():
    seen: list[int] = [1]

    def work() -> tuple[int, list[int]]:
        seen.append(2)
        return os.getpid(), seen

    job = Beside(work, work, os.getpid)
    (pid, found), ((other, later), _) = job.first(), job.rest()
    assert pid == other != os.getpid()
    assert (seen, found, later) == ([1], [1, 2], [1, 2, 2])
    assert Beside(work, work, os.getpid, small=True).first() == (os.getpid(), [1, 2])


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("slow", ["here", "there"])
def test_what_either_may_do_is_done_once_by_the_first_who_is_free(slow):
    gate = get_context("fork").Event()
    here = os.getpid()

    def second() -> None:
        if slow == "there":
            assert gate.wait(60.0)

    def either() -> int:
        gate.set()
        return os.getpid()

    job = Beside(os.getpid, second, either)
    job.first()
    if slow == "here":
        assert gate.wait(60.0)
    assert (job.rest()[1] == here) == (slow == "there")


@pytest.mark.usefixtures("two_cores")
def test_what_the_work_raises_is_raised_where_its_result_is_asked_for():
    def work() -> None:
        raise NoPlanFitsError("nothing fits")

    job = Beside(os.getpid, work, os.getpid)
    assert job.first() != os.getpid()
    with pytest.raises(NoPlanFitsError, match="nothing fits") as raised:
        job.rest()
    assert "in work" in str(raised.value.__cause__), "the traceback of the other process"


@pytest.mark.usefixtures("two_cores")
def test_a_process_that_dies_is_told_of():
    job = Beside(lambda: os.kill(os.getpid(), signal.SIGKILL), os.getpid, os.getpid)
    with pytest.raises(RuntimeError, match="exit code -9"):
        job.first()


@pytest.mark.usefixtures("two_cores")
def test_nothing_is_left_when_nobody_waits():
    job = Beside(lambda: time.sleep(60.0), os.getpid, os.getpid)
    process = job._process
    assert process.is_alive()
    del job
    process.join(10.0)
    assert process.exitcode == -signal.SIGKILL


def test_where_forking_is_not_safe_all_is_done_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beside.os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert Beside(os.getpid, os.getpid, os.getpid).rest() == (os.getpid(), os.getpid())
    monkeypatch.setattr(beside.sys, "platform", "darwin")
    assert Beside(os.getpid, os.getpid, os.getpid).rest() == (os.getpid(), os.getpid())


@pytest.mark.parametrize("objective", ["goodput", "step-time", "memory"])
def test_a_plan_is_the_same_on_one_core_and_on_two(monkeypatch: pytest.MonkeyPatch, objective):
    plans = []
    for forks in (False, True):
        monkeypatch.setattr(beside, "_may_fork", lambda forks=forks: forks)
        monkeypatch.setattr(ladder, "SMALL", 0.0)
        plan = make_plan(problem(), device_costs, objective=objective, freedom="cuts")
        assert isinstance(plan.certificate, Certificate)
        plans.append(plan.with_results(certificate=plan.certificate.model_copy(update={"seconds": 0.0})))
    assert plans[0] == plans[1]
    assert len(plans[0].ladder) == 5 + (objective != "step-time")
    seconds = [rung.step_time_seconds for rung in plans[0].ladder[:5]]
    assert seconds == sorted(seconds, reverse=True)


def test_what_the_ladder_finds_better_is_taken(monkeypatch: pytest.MonkeyPatch):
    """Searches stop within their tolerance, so that a rung below may be a little ahead; here it is far ahead."""
    real, worst = make._deliver, 0.0

    def of_the_worst(problem, searcher, pricer, freedom, *, deadline):
        nonlocal worst
        outcome = real(problem, searcher, pricer, freedom, deadline=deadline)
        fitting = [layout for layout, predicted in pricer.predictions.items() if pricer.fits(predicted)]
        outcome.layout = max(fitting, key=pricer.seconds_delivered)
        worst = outcome.seconds = pricer.seconds_delivered(outcome.layout)
        return outcome

    monkeypatch.setattr(make, "_deliver", of_the_worst)
    told = []
    plan = make_plan(problem(), device_costs, freedom="modules", losses=lambda plan, _: told.append(plan) or ())
    assert plan.certificate is not None
    assert plan.certificate.objective_value < 0.98 * worst
    assert plan.certificate.gap < 0.01
    assert [one.pipelines == plan.pipelines for one in told] == [False, True]


def test_searches_begin_with_a_good_layout_of_their_freedom():
    job = problem()
    searcher = make_searcher(job, device_costs(job.cluster, job.training))
    begun, whole = (Incumbent(Pricer(job, searcher).seconds) for _ in range(2))
    searcher.begin("layers", begun, deadline=time.monotonic() + 60.0)
    found = searcher.branch().search("layers", whole, deadline=time.monotonic() + 60.0)
    assert begun.layout is not None
    assert found.bound <= begun.seconds <= 1.05 * found.seconds
