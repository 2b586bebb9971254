"""What is done about lost ranks: valid layouts of the survivors, whole batches, priced like any plan, never beaten."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.interface import ModuleCost
from cost_models.sources import device_costs, survivors_costs
from cost_models.step import price
from executor.layout import Layout, tensor_holdings
from planner.contingency import Replanner, contingencies, kinds_of_ranks, replan
from planner.shares import Worker, deal, deal_modules, finish_seconds
from specs.cluster import ClusterSpec
from specs.contingency import find_contingency, plan_after, processes
from specs.errors import BadInputError, NoPlanFitsError
from specs.plan import Contingency, Plan
from specs.presets import load_cluster, load_model
from specs.profile import Profile
from tests.layouts import ReplicaShape, StageShape, build, small_model
from tests.plans import cluster, tiny_model
from tests.plans import plan as even_plan
from tests.profiles import profile
from tests.synthetic_costs import SyntheticCosts

COSTS = SyntheticCosts(3)
workers = st.builds(
    Worker,
    count=st.integers(1, 2),
    micro_batch=st.integers(1, 4),
    seconds=st.sampled_from([0.7, 1.0, 1.5, 2.2, 3.0]),
    fill_seconds=st.sampled_from([0.0, 1.0, 2.5]),
)


@settings(max_examples=200, deadline=None)
@given(batch=st.integers(1, 12), kinds=st.lists(workers, min_size=1, max_size=2))
def test_shares_add_up_and_end_as_early_as_any(batch: int, kinds: list[Worker]) -> None:
    replicas = [worker for worker in kinds for _ in range(worker.count)]
    ways = itertools.product(*(range(1, batch // worker.micro_batch + 1) for worker in replicas))
    ends = [
        max(w.fill_seconds + m * w.seconds for m, w in zip(way, replicas, strict=True))
        for way in ways
        if sum(m * w.micro_batch for m, w in zip(way, replicas, strict=True)) == batch
    ]
    shares = deal(batch, kinds)
    assert (shares is None) == (not ends)
    if shares is not None:
        assert sum(m * w.micro_batch for own, w in zip(shares, kinds, strict=True) for m in own) == batch
        assert finish_seconds(kinds, shares) == pytest.approx(min(ends))


@settings(max_examples=150, deadline=None)
@given(
    work=st.lists(st.integers(0, 9), min_size=1, max_size=7), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4)
)
def test_modules_go_to_stages_by_their_ranks(work: list[int], sizes: list[int]) -> None:
    """Least largest work per rank over all ways to cut the chain, every stage with a module at least."""
    cuts = itertools.combinations(range(1, len(work)), len(sizes) - 1)
    bounds = [(0, *inner, len(work)) for inner in cuts]
    runs = [list(itertools.pairwise(one)) for one in bounds]
    largest = [max(sum(work[a:b]) / size for (a, b), size in zip(one, sizes, strict=True)) for one in runs]
    found = deal_modules(tuple(map(float, work)), tuple(sizes))
    assert (found is None) == (not bounds)
    if found is not None:
        assert [index for run in found for index in run] == list(range(len(work)))
        mine = max(sum(work[i] for i in run) / size for run, size in zip(found, sizes, strict=True))
        assert mine == pytest.approx(min(largest))


def two_of_four(**options: Any) -> Plan:
    shape = ReplicaShape([StageShape(4)], 1, 6)
    return build(small_model(), [shape, shape], **options)


PLANS: dict[str, Plan] = {
    "4 and 4 -> 4 and 3": two_of_four(),
    "4 -> 3": build(small_model(), [ReplicaShape([StageShape(4)], 1, 12)]),
    "8 -> 7": build(small_model(), [ReplicaShape([StageShape(8, {"attention": (4, 4)})], 2, 14)]),
    "6 -> 5": build(small_model(), [ReplicaShape([StageShape(6)], 1, 10)], zero=1),
    "2 x 2 -> 3": build(small_model(), [ReplicaShape([StageShape(2), StageShape(2)], 1, 12)]),
    "pipeline of ones": build(small_model(), [ReplicaShape([StageShape(1)] * 3, 1, 12)]),
    "gpipe": build(small_model(), [ReplicaShape([StageShape(1)] * 2, 1, 6, "gpipe")] * 2),
    "replicas of one": build(small_model(), [ReplicaShape([StageShape(1)], 1, 4)] * 4),
    "zero 1, recompute": two_of_four(zero=1, recompute="selective"),
    "zero-bubble": build(small_model(), [ReplicaShape([StageShape(2), StageShape(2)], 1, 6, "zb-h1")] * 2),
    "zero 2": two_of_four(zero=2),
    "zero 3": two_of_four(zero=3),
    "zero 3, replicas of one": build(small_model(), [ReplicaShape([StageShape(1)], 1, 6)] * 4, zero=3),
    "equal replicas": even_plan(ranks=4, replicas=3, micro_batches=4, on=cluster(12, per_node=12)),
}


def assert_runs(plan: Plan, contingency: Contingency, lost: int | None = None) -> Plan:
    """The whole plan after a loss (None: of those that it was solved for), seen by every process of the executor."""
    after = plan_after(plan, contingency, lost)
    old = processes(after)
    assert not set(contingency.lost if lost is None else [lost]).intersection(old)
    assert set(old) <= set(plan.cluster.ranks())
    for process in range(after.world_size):
        layout = Layout(after, process)
        assert layout.modules
        assert old[process] in layout.replica.ranks
    tensor_holdings(after)
    return after


@pytest.mark.parametrize("name", PLANS)
def test_every_single_loss_leads_to_a_plan_that_runs(name: str) -> None:
    plan = PLANS[name]
    found = contingencies(plan, COSTS)
    plan = plan.with_results(contingencies=found)
    assert sorted(rank for kind in kinds_of_ranks(plan) for rank in kind) == list(range(plan.world_size))
    for lost in range(plan.world_size):
        contingency = find_contingency(plan, lost)
        assert contingency is not None
        after = assert_runs(plan, contingency, lost)
        assert after.training.global_batch == plan.training.global_batch, "shares move, the batch stays whole"
        assert price(after, COSTS).step_time_seconds == pytest.approx(contingency.predicted.step_time_seconds, rel=1e-9)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize("name", PLANS)
def test_ways_whose_price_is_left_out_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways priced lead to the same, and none is faster than the least that it was left out by."""
    plan = PLANS[name]
    found = replan(plan, COSTS, [0])
    priced = Replanner._priced

    def with_check(self: Replanner, *arguments: Any) -> Any:
        one = priced(self, *arguments)
        assert one is None or one.predicted.step_time_seconds >= one.candidate.least
        return one

    monkeypatch.setattr(Replanner, "_priced", with_check)
    monkeypatch.setattr(Replanner, "_is_behind", lambda *_: False)
    assert replan(plan, COSTS, [0]) == found


def test_no_composition_of_the_damaged_stage_is_faster() -> None:
    """4 -> 3: every composition of every kind of module, on the damaged replica's micro-batch, priced one by one."""
    plan = PLANS["4 and 4 -> 4 and 3"]
    best = replan(plan, COSTS, [0], policies=["reduced"])
    after = plan_after(plan, best)
    damaged = next(i for i, replica in enumerate(after.replicas) if len(replica.ranks) == 3)
    number = after.replicas[damaged].pipeline
    stage = after.pipelines[number].stages[0]
    kinds = ("embedding", "attention", "mlp", "head")
    compositions = ((3,), (2, 1), (1, 2), (1, 1, 1))
    tried = 0
    for chosen in itertools.product(compositions, repeat=len(kinds)):
        blocks = dict(zip(kinds, chosen, strict=True))
        modules = tuple(
            p.model_copy(update={"blocks": blocks[p.module.rsplit(".", 1)[-1]], "cuts": None}) for p in stage.modules
        )
        pipeline = after.pipelines[number].model_copy(
            update={"stages": (stage.model_copy(update={"modules": modules}),)}
        )
        pipelines = [*after.pipelines]
        pipelines[number] = pipeline
        try:
            other = Plan.model_validate(after.model_copy(update={"pipelines": tuple(pipelines)}).model_dump())
        except ValueError:
            continue  # attention blocks without whole sequences
        tried += 1
        assert best.predicted.step_time_seconds <= price(other, COSTS).step_time_seconds * 1.005
    assert tried >= 64


def llama_on_one_node(**changes: Any) -> tuple[Plan, ClusterSpec]:
    machine = load_cluster("h100x16")
    shape = {"ranks": 8, "replicas": 2, "micro_batches": 24, "seq_len": 4096, **changes}
    return even_plan(model=load_model("llama-3-8b"), on=machine, **shape), machine


def test_eight_to_seven_is_composed_per_module() -> None:
    """8 KV groups over 7 ranks make one rank compute two: attention goes as 4 + 3 or finer, and nothing waits."""
    plan, machine = llama_on_one_node()
    costs = device_costs(machine, plan.training)
    found = replan(plan, costs, [3], policies=["reduced"])
    after = assert_runs(plan, found, 3)
    stage = next(p for p in after.pipelines if p.num_ranks == 7).stages[0]
    attention = {p.blocks for p in stage.modules if p.module.endswith("attention")}
    assert (7,) not in attention
    whole = price(plan, costs).step_time_seconds
    assert found.predicted.step_time_seconds < whole * 16 / 15 * 1.05, "within 5 % of what 15 of 16 devices can do"
    dropped = replan(plan, costs, [3], policies=["drop"])
    assert dropped.predicted.step_time_seconds > 1.8 * whole


def test_where_memory_binds_blocks_grow_or_modules_are_recomputed() -> None:
    plan, machine = llama_on_one_node()
    costs = device_costs(machine, plan.training)
    free = replan(plan, costs, [0], policies=["reduced"])
    cap = (price(plan, costs).peak_memory_bytes + 3 * free.predicted.peak_memory_bytes) // 4
    assert free.predicted.peak_memory_bytes > cap
    tight = replan(plan.model_copy(update={"memory_cap_bytes": cap}), costs, [0], policies=["reduced"])
    assert tight.predicted.peak_memory_bytes <= cap
    assert tight.predicted.step_time_seconds >= free.predicted.step_time_seconds
    with pytest.raises(NoPlanFitsError, match=r"nothing fits .* full recompute"):
        replan(plan.model_copy(update={"memory_cap_bytes": cap // 3}), costs, [0])


def test_healthy_replicas_recompute_more_when_fewer_share_the_optimizer() -> None:
    """Without one of two replicas the other holds all of the sharded state."""
    shape = ReplicaShape([StageShape(2)], 2, 8)
    plan = build(small_model(), [shape, shape], zero=1, seq_len=64)
    cap = price(plan, COSTS).peak_memory_bytes + 4096
    plan = plan.model_copy(update={"memory_cap_bytes": cap})
    found = replan(plan, COSTS, [0], policies=["drop"])
    assert found.replaced
    assert found.predicted.peak_memory_bytes <= cap
    modes = {p.recompute for p in plan_after(plan, found).pipelines[0].stages[0].modules}
    assert modes != {"none"}


def test_spares_step_in_and_dropped_replicas_give_theirs() -> None:
    on = cluster(10, per_node=10, kind="cpu")
    plan = PLANS["4 and 4 -> 4 and 3"].model_copy(update={"cluster": on})
    spare = replan(plan, COSTS, [2])
    assert spare.policy == "spare"
    assert spare.predicted.step_time_seconds == pytest.approx(price(plan, COSTS).step_time_seconds)
    after = assert_runs(plan, spare, 2)
    assert sorted(r for replica in after.replicas for r in replica.ranks) == [0, 1, 3, 4, 5, 6, 7, 8]
    three = build(small_model(), [ReplicaShape([StageShape(4)], 1, 4)] * 3)
    both = replan(three, COSTS, [0, 5, 6], policies=["drop"])
    after = plan_after(three, both)
    assert sorted(len(replica.ranks) for replica in after.replicas) == [4, 4], "two survivors repair the third replica"


def test_losses_go_on_from_the_plan_that_runs() -> None:
    plan = PLANS["4 and 4 -> 4 and 3"]
    for lost in (1, 6, 2, 0, 3):
        plan = plan_after(plan, replan(plan, COSTS, [lost]))
        assert lost in plan.cluster.missing
        assert plan.training.global_batch == 12
    assert plan.world_size <= 3


@pytest.mark.parametrize("name", ["4 and 4 -> 4 and 3", "gpipe", "zero 3"])
def test_one_replica_gone_whole_and_another_damaged(name: str) -> None:
    """The survivors of the damaged one go on with all of the batch."""
    plan = PLANS[name]
    gone = plan.replicas[0].ranks
    for lost in plan.replicas[1].ranks:
        found = replan(plan, COSTS, [*gone, lost])
        after = assert_runs(plan, found)
        assert after.training.global_batch == plan.training.global_batch
        assert found.policy in ("reduced", "resplit", "split")


def test_a_batch_that_cannot_stay_whole_shrinks_and_says_so() -> None:
    """Two heads over five ranks need three blocks: three sequences at a time fit, all seven at once do not."""
    model = small_model()
    layers = tuple(
        layer.model_copy(update={"attention": layer.attention.model_copy(update={"num_heads": 2, "num_kv_heads": 2})})
        for layer in model.layers
        if layer.attention is not None
    )
    shape = ReplicaShape([StageShape(6, {"attention": (2, 2, 2)})], 7, 7)
    plan = build(model.model_copy(update={"layers": layers}), [shape], seq_len=64)
    free = replan(plan, COSTS, [5], policies=["reduced"])
    assert free.global_batch == 7
    batches = []
    for tenth in range(9, 2, -1):
        cap = free.predicted.peak_memory_bytes * tenth // 10
        try:
            found = replan(plan.model_copy(update={"memory_cap_bytes": cap}), COSTS, [5], policies=["reduced"])
        except NoPlanFitsError:
            break
        assert found.predicted.peak_memory_bytes <= cap
        batches.append(found.global_batch)
    assert batches == sorted(batches, reverse=True)
    assert batches[-1] < 7
    assert plan_after(plan, found).training.global_batch == batches[-1]


def test_losses_that_are_none_are_refused() -> None:
    plan = PLANS["4 -> 3"]
    with pytest.raises(BadInputError, match="not in the plan"):
        replan(plan, COSTS, [17])
    with pytest.raises(BadInputError, match="no rank"):
        replan(plan, COSTS, [])


def test_a_rank_alone_has_nobody_to_go_on() -> None:
    plan = build(small_model(), [ReplicaShape([StageShape(1)], 1, 4)])
    assert contingencies(plan, COSTS) == ()
    with pytest.raises(NoPlanFitsError, match="no layout"):
        Replanner(plan, COSTS).solve([0])


def test_a_contingency_says_for_whom_it_stands() -> None:
    plan = PLANS["equal replicas"]
    found = contingencies(plan, COSTS)
    assert [len(one.equivalent) for one in found] == [12]
    with pytest.raises(BadInputError, match="does not stand for rank 12"):
        plan_after(plan, found[0], 12)


def test_a_profile_of_four_ranks_estimates_a_block_of_three() -> None:
    model = tiny_model(num_layers=2, num_heads=12, num_kv_heads=12, hidden=96)
    plan = even_plan(ranks=4, model=model, micro_batches=12, on=cluster(4, kind="cpu"))
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"precision": "fp32"})})
    with_three = profile(model, plan.cluster, degrees=(1, 2, 3, 4))
    without = profile(model, plan.cluster, degrees=(1, 2, 4))
    attention = model.modules()[1][1]

    def cost(taken: Profile, degree: int, **how: Any) -> ModuleCost:
        options = {"block_tokens": 64, "seq_len": 32, "recompute": "none", "level": "scale_up", **how}
        return survivors_costs(taken, plan.training, plan.cluster).module(attention, degree=degree, **options)

    true, guessed = cost(with_three, 3), cost(without, 3)
    assert guessed.estimated
    assert not true.estimated
    assert guessed.forward_seconds == pytest.approx(true.forward_seconds)
    assert guessed.backward_seconds == pytest.approx(true.backward_seconds)
    assert guessed.activation_bytes == true.activation_bytes
    assert guessed.forward_communication_seconds == pytest.approx(true.forward_communication_seconds, rel=0.2)
    assert cost(without, 2) == cost(with_three, 2)
    with pytest.raises(BadInputError, match="no timing"):
        cost(without, 3, seq_len=64)
    costs = survivors_costs(without, plan.training, plan.cluster)
    found = replan(plan, costs, [1])
    assert_runs(plan, found, 1)
    assert found.global_batch == 12
    assert found.predicted.estimated == any(
        3 in p.blocks for pipeline in found.pipelines for stage in pipeline.stages for p in stage.modules
    )


def test_gpipe_becomes_1f1b_where_a_larger_share_would_not_fit() -> None:
    """The healthy replica takes the lost one's sequences too; gpipe would hold the activations of all of them."""
    plan = build(small_model(), [ReplicaShape([StageShape(1)] * 2, 1, 6, "gpipe")] * 2, seq_len=128)
    lost = plan.replicas[0].ranks
    roomy = replan(plan, COSTS, lost)
    cap = roomy.predicted.peak_memory_bytes // 2
    tight = replan(plan.model_copy(update={"memory_cap_bytes": cap}), COSTS, lost)
    assert tight.predicted.peak_memory_bytes <= cap
    for found, schedule in ((roomy, "gpipe"), (tight, "1f1b")):
        after = assert_runs(plan, found)
        pipeline = after.pipelines[after.replicas[0].pipeline]
        assert pipeline.schedule == schedule
        assert {p.recompute for stage in pipeline.stages for p in stage.modules} == {"none"}
