"""The price of a plan against sums done by hand, and against what must hold for any plan."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.sources import device_costs, measured_costs
from cost_models.step import price
from specs.layout import balanced_cuts
from specs.plan import (
    ModulePlacement,
    Pipeline,
    Plan,
    Provenance,
    Replica,
    Stage,
    TrainingSpec,
)
from specs.presets import load_cluster, model_preset
from specs.profile import StepOverhead
from tests.layouts import ReplicaShape, StageShape, build, small_model
from tests.plans import cluster, plan, tiny_model
from tests.profiles import profile

MODEL = tiny_model()
NUM_MODULES = len(MODEL.modules())


def priced(layout: Plan, **changes: object):  # type: ignore[no-untyped-def]
    layout = layout.model_copy(
        update={"training": TrainingSpec(**{**layout.training.model_dump(), "precision": "fp32"})}
    )
    on = cluster(layout.world_size, kind="cpu")
    costs = measured_costs(profile(layout.model, on, **changes), layout.training, on)  # type: ignore[arg-type]
    return price(layout, costs)


def test_one_rank_by_hand() -> None:
    """10 modules, 2 micro-batches of 32 tokens at 1 us forward and 2 us backward per token; no communication."""
    predicted = priced(plan(ranks=1, micro_batches=2))
    assert predicted.step_terms.forward == pytest.approx(NUM_MODULES * 2 * 32e-6)
    assert predicted.step_terms.backward == pytest.approx(2 * NUM_MODULES * 2 * 32e-6)
    assert predicted.step_terms.gradient_sync == pytest.approx(0.0)
    assert predicted.step_time_seconds == pytest.approx(3 * NUM_MODULES * 2 * 32e-6 + predicted.step_terms.optimizer)


def test_pipeline_by_hand() -> None:
    """Two equal stages and m micro-batches: (m + 1) x (f + b) and the transfers that nothing hides."""
    m = 4
    predicted = priced(plan(stages=2, ranks=1, micro_batches=m))
    once = NUM_MODULES / 2 * 3 * 32e-6
    transfer = 32 * 64 * 4 / 1e9
    assert predicted.step_time_seconds - predicted.step_terms.optimizer == pytest.approx(
        (m + 1) * once + 2 * transfer * (m + 1) / 2, rel=0.02
    )


def test_data_parallel_sync_by_hand() -> None:
    """All-reduce of 4 bytes per element at 1 GB/s, after the last backward pass."""
    alone, both = priced(plan(ranks=1)), priced(plan(ranks=1, replicas=2))
    assert both.step_time_seconds - alone.step_time_seconds == pytest.approx(
        both.peak_memory_terms.gradients / 1e9, rel=1e-6
    )
    assert both.step_terms.gradient_sync == pytest.approx(both.peak_memory_terms.gradients / 1e9, rel=1e-6)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    zero = draw(st.sampled_from([0, 1]))
    shapes = []
    for _ in range(draw(st.integers(1, 2))):
        stages = []
        for _ in range(draw(st.integers(1, 2))):
            ranks = draw(st.integers(1, 3))
            blocks = draw(st.sampled_from([(ranks,), (1,) * ranks]))
            stages.append(StageShape(ranks, {"mlp": blocks, "head": draw(st.sampled_from([(ranks,), (1,) * ranks]))}))
        micro_batch = draw(st.integers(1, 2)) * 6
        shapes.append(ReplicaShape(stages, micro_batch=micro_batch, sequences=micro_batch * draw(st.integers(1, 3))))
    return build(small_model(), shapes, zero=zero)


@settings(max_examples=40, deadline=None)
@given(plans())
def test_terms_add_up_and_no_step_is_faster_than_its_work(layout: Plan) -> None:
    overhead = StepOverhead(
        data_seconds_per_sequence=1e-6,
        other_seconds_per_step=1e-4,
        other_seconds_per_action=1e-6,
        split_backward_overhead=0.0,
    )
    on = layout.cluster
    source = profile(
        layout.model,
        on,
        degrees=(1, 2, 3),
        tokens=(16, 32, 48, 64, 96),
        seq_len=layout.training.seq_len,
        group_sizes=tuple(range(2, 13)),
        spread=0.05,
        overhead=overhead,
    )
    predicted = price(layout, measured_costs(source, layout.training, on))
    terms = predicted.step_terms
    assert terms.total() == pytest.approx(predicted.step_time_seconds, rel=1e-9)
    work = terms.forward + terms.backward
    assert work < predicted.step_time_seconds
    assert predicted.peak_memory_terms.total() == predicted.peak_memory_bytes
    assert predicted.peak_memory_bytes >= max(predicted.stage_memory_bytes)
    assert predicted.goodput_tokens_per_second <= predicted.tokens_per_second


def test_split_backward_passes_take_what_was_measured_of_them() -> None:
    """One micro-batch in one lane of stages: all that splitting adds stands in the step, whose computing stays."""
    stages = [StageShape(1), StageShape(1)]
    whole, split = (build(small_model(), [ReplicaShape(stages, 1, 1, schedule)]) for schedule in ("1f1b", "zb-h1"))
    source = profile(small_model(), whole.cluster, seq_len=whole.training.seq_len, tokens=(16,))
    dear = source.model_copy(update={"overhead": source.overhead.model_copy(update={"split_backward_overhead": 0.5})})
    plain, free, more = (
        price(layout, measured_costs(measured, layout.training, layout.cluster))
        for layout, measured in ((whole, source), (split, source), (split, dear))
    )
    assert (
        plain.step_time_seconds == price(whole, measured_costs(dear, whole.training, whole.cluster)).step_time_seconds
    )
    assert more.step_terms.backward == free.step_terms.backward
    assert more.step_terms.other > free.step_terms.other
    added = more.step_time_seconds - free.step_time_seconds
    assert 0.0 < added < 0.5 * plain.step_terms.backward * 2


def test_slow_rank_holds_all_up() -> None:
    layout = plan(ranks=1, replicas=2)
    slow = layout.model_copy(update={"cluster": layout.cluster.model_copy(update={"slow": {1: 0.5}})})
    before, after = priced(layout), priced(slow)
    computing = before.step_terms.forward + before.step_terms.backward
    assert after.step_time_seconds - before.step_time_seconds == pytest.approx(computing)
    # the fast rank waits in the gradient sum: half of the delay, as a mean over ranks
    assert after.step_terms.gradient_sync - before.step_terms.gradient_sync == pytest.approx(computing / 2)


def test_unlike_replicas_wait_for_the_slower() -> None:
    even = build(small_model(), [ReplicaShape([StageShape(1)], 2, 4), ReplicaShape([StageShape(1)], 2, 4)])
    uneven = build(small_model(), [ReplicaShape([StageShape(1)], 2, 2), ReplicaShape([StageShape(1)], 2, 6)])
    source = profile(small_model(), even.cluster, seq_len=even.training.seq_len, tokens=(16,))
    a = price(even, measured_costs(source, even.training, even.cluster))
    b = price(uneven, measured_costs(source, uneven.training, uneven.cluster))
    computing = a.step_terms.forward + a.step_terms.backward
    assert b.step_time_seconds - a.step_time_seconds == pytest.approx(computing / 2)


def test_spread_makes_many_replicas_slower() -> None:
    steady, shaky = priced(plan(ranks=1, replicas=4)), priced(plan(ranks=1, replicas=4), spread=0.1)
    assert shaky.step_time_seconds > steady.step_time_seconds
    assert priced(plan(ranks=1), spread=0.1).step_time_seconds == pytest.approx(priced(plan(ranks=1)).step_time_seconds)


def uniform(model: str, on: str, *, tp: int, pp: int, micro_batch: int, global_batch: int) -> Plan:
    spec, machines = model_preset(model), load_cluster(on)
    names = [name for name, _ in spec.modules()]
    cuts = balanced_cuts(len(names), pp)
    stages = tuple(
        Stage(
            num_ranks=tp,
            modules=tuple(ModulePlacement(module=n, blocks=(tp,), zero=1) for n in names[cuts[i] : cuts[i + 1]]),
        )
        for i in range(pp)
    )
    size = tp * pp
    num_replicas = machines.num_devices // size
    return Plan(
        made=Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z"),
        model=spec,
        cluster=machines,
        training=TrainingSpec(global_batch=global_batch, seq_len=8192),
        pipelines=(Pipeline(micro_batch=micro_batch, stages=stages),),
        replicas=tuple(
            Replica(pipeline=0, ranks=tuple(range(i * size, (i + 1) * size)), sequences=global_batch // num_replicas)
            for i in range(num_replicas)
        ),
    )


def test_sixteen_thousand_ranks_take_milliseconds() -> None:
    layout = uniform("llama-3-405b", "h100x16384", tp=8, pp=16, micro_batch=1, global_batch=2048)
    costs = device_costs(layout.cluster, layout.training)
    price(layout, costs)
    start = time.process_time()
    predicted = price(layout, costs)
    assert time.process_time() - start < 0.25
    assert predicted.estimated
    assert len(predicted.stage_memory_bytes) == 16
