"""Patience, suspects, slowness, the account of an interruption: what a supervisor decides, without any process."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.sources import survivors_costs
from cost_models.step import price
from executor.messages import Halted, Pong, Totals
from recovery.account import Account
from recovery.generation import Generation
from recovery.incident import Incident
from recovery.policy import Policy, Way, peers, ranks_of, words
from recovery.rebalance import rebalance, weighted_cuts
from recovery.watch import SLOW_STEPS, START_SECONDS, Patience, Slowness, suspects
from specs.errors import BadInputError
from specs.faults import Fault, parse_fault
from specs.options import TrainOptions
from specs.plan import Plan
from specs.profile import Profile
from specs.runlog import INCIDENT_BUCKETS
from tests import plans
from tests.profiles import profile


def pong(term: str) -> Pong:
    return Pong(term=term, where="executor/x.py:1 f")


def test_patience_learns_the_step_time() -> None:
    patience = Patience(floor=2.0)
    patience.progress("training")
    assert patience.limit == START_SECONDS
    patience.step(0.9)
    assert patience.limit == pytest.approx(2.0 + 20.0 * 0.9), "one step says something, if little"
    for seconds in (1.0, 1.1, 30.0):
        patience.step(seconds)
    assert patience.limit == pytest.approx(2.0 + 5.0 * 1.05)
    patience.progress("saving")
    assert patience.limit > 100.0
    assert not patience.is_over


def test_who_does_not_answer_is_suspected_before_who_computes() -> None:
    members = [0, 1, 2]
    pongs = {0: pong("gradient_sync"), 1: pong("forward"), 2: pong("tp_communication")}
    silent = {0: 0.5, 1: 0.5, 2: 9.0}
    assert [s.rank for s in suspects(members, silent, pongs, stalled=True)] == [2]
    silent[2] = 0.5
    assert [s.rank for s in suspects(members, silent, pongs, stalled=True)] == [1]
    assert suspects(members, silent, pongs, stalled=False) == []
    pongs[1] = pong("pipeline_idle")
    assert suspects(members, silent, pongs, stalled=True) == []  # all wait: nobody's fault that can be seen
    assert suspects(members, silent, dict.fromkeys(members, pong("forward")), stalled=True) == []


def test_only_a_persistently_slow_rank_is_slow() -> None:
    watch = Slowness({0: (0, 1, 2), 1: (0, 1, 2), 2: (0, 1, 2), 3: (3,)})
    for step in range(SLOW_STEPS):
        for rank, busy in {0: 1.0, 1: 1.02, 2: 1.5 if step != 4 else 1.0, 3: 9.0}.items():
            watch.step(step, rank, busy)
    assert watch.slow_ranks() == {}  # rank 2 was as fast as the others once; rank 3 has no peers
    for step in range(SLOW_STEPS, 2 * SLOW_STEPS):
        for rank, busy in {0: 1.0, 1: 1.02, 2: 1.5, 3: 9.0}.items():
            watch.step(step, rank, busy)
    assert watch.slow_ranks() == {2: pytest.approx(1.5 / 1.01)}


def test_survivors_agree_on_the_newest_step() -> None:
    generation = Generation(0, Way(plans.plan(replicas=4), "as planned", ""), 0)
    totals = Totals(step=8, values=(4.0, 2.5, 0.0))
    ahead = Halted(generation=0, step=8, ready=None, applied=totals, cause="")
    behind = Halted(generation=0, step=7, ready=8, applied=None, cause="")
    generation.halted.update({1: behind, 2: ahead, 3: ahead})
    assert generation.agree() == (2, totals)
    generation.halted.update({2: behind, 3: behind})
    assert generation.agree() == (1, None)


def test_an_interruption_is_accounted_for_once() -> None:
    account = Account(started=0.0)
    account.told({"step": 5.0, "accelerator_initialization": 1.0, "other": 3.0})
    account.close_generation()
    account.told({"step": 2.0, "accelerator_initialization": 1.0, "state_transfer": 4.0})
    incident = Incident(since_step=1.5, detection=0.25)
    incident.enter("replanning")
    incident.enter("first_step")
    for bucket, seconds in incident.by_bucket().items():
        account.add(bucket, seconds)
    seconds = account.seconds()
    assert seconds["step"] == 7.0
    assert seconds["accelerator_initialization"] == 1.0  # the second generation's is timed as reforming
    assert seconds.get("state_transfer", 0.0) == 0.0
    assert seconds["failure_detection"] == 0.25
    assert seconds["wasted_progress"] == 1.25
    assert sum(seconds.values()) == pytest.approx(account.wall_seconds, rel=1e-6)
    assert set(incident.by_bucket()) <= set(INCIDENT_BUCKETS.values())


def test_the_way_on_is_looked_up_or_solved(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = plans.plan(replicas=2, ranks=2, on=plans.cluster(4, kind="cpu"), micro_batches=4)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"precision": "fp32"})})
    measured = profile(plan.model, plan.cluster, degrees=(1, 2), tokens=(16, 32, 64, 128))
    measured.save(tmp_path / "profile.json")
    policy = Policy(plan, TrainOptions(out=tmp_path, profile=tmp_path / "profile.json"))
    assert policy.way_on(frozenset()).plan == plan
    one = policy.way_on(frozenset({3}))
    assert 3 not in ranks_of(one.plan)
    assert one.plan.training.global_batch == plan.training.global_batch
    assert one.policy
    two = policy.way_on(frozenset({0, 3}))
    assert not {0, 3} & set(ranks_of(two.plan))


def test_peers_have_the_same_work() -> None:
    assert peers(plans.plan(stages=2, ranks=1, replicas=2)) == {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)}
    assert words({4}) == "rank 4"
    assert words({4, 1, 2}) == "ranks 1, 2 and 4"


def test_faults_in_words() -> None:
    assert parse_fault("kill", "3@20") == Fault(kind="kill", rank=3, step=20)
    assert parse_fault("kill", "3@20:save").moment == "save"
    assert parse_fault("slow", "0@5:1.5").factor == 1.5
    for kind, text in (("kill", "3"), ("kill", "x@2"), ("kill", "1@0"), ("kill", "1@2:never"), ("slow", "1@2")):
        with pytest.raises(BadInputError, match=text):
            parse_fault(kind, text)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="would not slow"):
        parse_fault("slow", "1@2:0.5")


def _priced(plan: Plan, measured: Profile) -> float:
    return price(plan, survivors_costs(measured, plan.training, plan.cluster)).step_time_seconds


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 4), (4, 1), (2, 2)])
def test_a_slow_rank_gets_less_work(replicas: int, ranks: int) -> None:
    plan = plans.plan(replicas=replicas, ranks=ranks, on=plans.cluster(4, kind="cpu"), micro_batches=8)
    training = plan.training.model_copy(update={"precision": "fp32"})
    cluster = plan.cluster.model_copy(update={"slow": {1: 0.5}})
    plan = plan.model_copy(update={"training": training, "cluster": cluster})
    measured = profile(plan.model, plan.cluster, degrees=(1, 2, 4), tokens=(16, 32, 64, 128))
    found = rebalance(plan, {1: 2.0}, survivors_costs(measured, training, cluster))
    assert found.gain > 0.1
    assert _priced(found.plan, measured) == pytest.approx((1.0 - found.gain) * _priced(plan, measured))
    assert found.plan.training == training  # the batch is whole
    assert "slow" in found.layout


@given(st.integers(1, 200), st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8))
def test_cuts_follow_weights(size: int, weights: list[float]) -> None:
    cuts = weighted_cuts(size, weights)
    if size < len(weights):
        assert cuts is None
        return
    assert cuts is not None
    parts = [b - a for a, b in pairwise(cuts)]
    assert sum(parts) == size
    assert min(parts) >= 1
    for part, weight in zip(parts, weights, strict=True):
        quota = 1 + (size - len(weights)) * weight / sum(weights)
        assert abs(part - quota) < 1.0 + 1e-9
