"""Publishers' layouts become plans that say what their rows say, and our plan is never behind them."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.published_layouts import ROWS, RUNS, compare, llama_405b, plan_of, problem_of
from cost_models.published import Run, load_rows
from specs.errors import BadInputError
from specs.tensors import num_parameters

KNOWN = {row.id: row.run for row in load_rows(RUNS) if row.run is not None}


def known(name: str) -> Run:
    run = KNOWN[name]
    assert run is not None
    return run


@pytest.mark.parametrize("name", ROWS)
def test_the_plan_is_the_rows_layout(name: str) -> None:
    run = known(name)
    plan = plan_of(run, problem_of(run))
    assert plan.world_size == run.num_gpus
    assert len(plan.replicas) == run.dp
    (pipeline,) = plan.pipelines
    assert len(pipeline.stages) == run.pp
    assert pipeline.num_virtual == run.chunks
    assert pipeline.schedule == ("1f1b" if run.chunks == 1 else "interleaved")
    assert {placement.blocks for stage in pipeline.stages for placement in stage.modules} == {(run.tp,)}
    assert plan.replicas[0].sequences == run.num_micro_batches * run.micro_batch


def test_llama_405b_is_the_models_size() -> None:
    assert num_parameters(problem_of(llama_405b(16384, 128)).model.modules()) == 405_853_388_800


@pytest.mark.parametrize("name", ["seqsel-22B-sel", "mlmci-gpt3_7b_tp4_pp1_memory_speed-H100"])
def test_our_plan_is_at_least_as_good(name: str) -> None:
    found = compare(known(name), 10.0)
    assert found.excess_bytes == 0
    assert found.saved >= 0
    assert not found.missed


def test_a_slower_plan_would_be_reported() -> None:
    found = compare(known("seqsel-22B-sel"), 10.0)
    faster = found.theirs.model_copy(update={"step_time_seconds": 0.9 * found.our_prediction.step_time_seconds})
    assert dataclasses.replace(found, theirs=faster).missed
    assert not dataclasses.replace(found, theirs=faster, excess_bytes=1).missed


def test_layouts_that_plans_do_not_have() -> None:
    run = dataclasses.replace(known("seqsel-22B-sel"), cp=2)
    with pytest.raises(BadInputError, match="context parallelism"):
        plan_of(run, problem_of(run))
    run = dataclasses.replace(known("seqsel-22B-sel"), global_batch=6)
    with pytest.raises(BadInputError, match="not a multiple of 1 replicas x 4"):
        plan_of(run, problem_of(run))
