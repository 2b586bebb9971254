"""Plans: every way in which a plan cannot be run is refused with one sentence that says what, where and what next."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from specs.base import parse
from specs.errors import BadInputError
from specs.layout import Interval, balanced_cuts, block_starts
from specs.model import num_units
from specs.plan import (
    MemoryTerms,
    ModulePlacement,
    Pipeline,
    Plan,
    Provenance,
    Replica,
    Stage,
    StepTerms,
    TrainingSpec,
    aligned_token_cuts,
)
from specs.presets import cluster_preset, model_preset

TINY = model_preset("tiny")
NAMES = [name for name, _ in TINY.modules()]  # embedding, 2 x (attention, mlp), head


def stage(names: list[str], blocks: tuple[int, ...], **changes: Any) -> Stage:
    placements = tuple(ModulePlacement(module=name, blocks=blocks) for name in names)
    return Stage(num_ranks=sum(blocks), modules=placements, **changes)


def valid() -> Plan:
    """Two replicas of two stages of two ranks on a node of 8, attention at degree 2."""
    pipeline = Pipeline(micro_batch=2, stages=(stage(NAMES[:3], (2,)), stage(NAMES[3:], (2,))))
    return Plan(
        made=Provenance(created_by="test", created_at="2026-01-01"),
        model=TINY,
        cluster=cluster_preset("h100x8"),
        training=TrainingSpec(global_batch=8, seq_len=16),
        pipelines=(pipeline,),
        replicas=(
            Replica(pipeline=0, ranks=(0, 1, 2, 3), sequences=4),
            Replica(pipeline=0, ranks=(4, 5, 6, 7), sequences=4),
        ),
    )


def refusal(change: Callable[[dict[str, Any]], object]) -> str:
    """What a valid plan is answered with after `change` to its JSON form."""
    data = valid().model_dump(mode="json")
    change(data)
    with pytest.raises(BadInputError) as caught:
        parse(Plan, data, "plan p.json")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("plan p.json: ")
    return message.removeprefix("plan p.json: ")


def placement(data: dict[str, Any], stage_number: int, module: int) -> dict[str, Any]:
    found: dict[str, Any] = data["pipelines"][0]["stages"][stage_number]["modules"][module]
    return found


def test_a_valid_plan_round_trips() -> None:
    plan = valid()
    again = Plan.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert again.sha256() == plan.sha256()
    assert plan.world_size == 8
    assert plan.training.tokens_per_step == 128


CASES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (
        lambda d: placement(d, 0, 1).update(blocks=[1]),
        "pipelines.0.stages.0: layer.0.attention: blocks [1] add up to 1, the stage has 2 ranks",
    ),
    (
        lambda d: placement(d, 0, 2).update(cuts=[[0, 86, 172], [0, 172]]),
        "pipelines.0.stages.0: layer.0.mlp: 2 cuts for 1 blocks; give one per block",
    ),
    (
        lambda d: placement(d, 0, 2).update(cuts=[[0, 172, 172]]),
        "pipeline 0, layer.0.mlp (172 FFN columns): rank 1 of the block of 2 would hold nothing (172 units over 2 "
        "ranks, cuts [0, 172, 172]). Use a degree of at most 172",
    ),
    (
        lambda d: placement(d, 0, 2).update(cuts=[[0, 86, 171]]),
        "pipeline 0, layer.0.mlp (172 FFN columns): cuts [0, 86, 171] must be 3 points from 0 to 172",
    ),
    (
        lambda d: d["pipelines"][0]["stages"][0]["modules"].pop(1),
        "pipeline 0: position 1 holds layer.0.mlp, the model needs layer.0.attention there; every module must be "
        "placed once, in order",
    ),
    (
        lambda d: d["pipelines"][0]["stages"][1]["modules"].pop(),
        "pipeline 0: position 5 holds the end, the model needs head there; every module must be placed once, in order",
    ),
    (
        lambda d: d["pipelines"][0]["stages"][1]["modules"].append({"module": "layer.9.mlp", "blocks": [2]}),
        "pipeline 0: layer.9.mlp is not in the model",
    ),
    (
        lambda d: d["pipelines"][0]["stages"][0].update(token_cuts=[0, 15, 31]),
        "pipeline 0, stage 0, token_cuts: cuts [0, 15, 31] must be 3 points from 0 to 32",
    ),
    (
        lambda d: d["pipelines"][0]["stages"][0].update(token_cuts=[0, 32, 32]),
        "pipeline 0, stage 0, token_cuts: rank 1 of the block of 2 would hold nothing",
    ),
    (
        lambda d: [
            placement(d, 0, 1).update(blocks=[1, 1]),
            d["pipelines"][0].update(micro_batch=1),
        ],
        "pipeline 0, layer.0.attention: blocks [1, 1] do not hold whole sequences (micro-batch 1 sequences over 2 "
        "ranks, a block ends inside one). Use a micro-batch that is a multiple of 2/degree, token_cuts, or "
        "context_parallel",
    ),
    (
        lambda d: [d["training"].update(seq_len=1), d["pipelines"][0].update(micro_batch=1)],
        "pipeline 0, stage 0: 1 tokens cannot be cut over 2 ranks",
    ),
    (
        lambda d: d["replicas"][1].update(pipeline=1),
        "replica 1 names pipeline 1, there are 1",
    ),
    (
        lambda d: d["replicas"][1].update(ranks=[4, 5, 6]),
        "replica 1 has 3 ranks, its pipeline needs 4",
    ),
    (
        lambda d: d["replicas"][1].update(sequences=3),
        "replica 1 takes 3 sequences per step, not a multiple of its micro-batch 2",
    ),
    (
        lambda d: d["replicas"][1].update(ranks=[3, 4, 5, 6]),
        "rank 3 has two places, the second in replica 1; each rank has one",
    ),
    (
        lambda d: d["training"].update(global_batch=10),
        "the replicas take 8 sequences per step, the global batch has 10",
    ),
    (
        lambda d: d["replicas"][1].update(ranks=[4, 5, 6, 8]),
        "rank 8 is outside the cluster's 8 devices",
    ),
    (
        lambda d: d["replicas"][1].update(ranks=[4, 5, 6, -1]),
        "rank -1 is outside the cluster's 8 devices",
    ),
    (lambda d: d.update(colour="red"), "colour: Extra inputs are not permitted"),
    (lambda d: d["training"].update(global_batch=0), "training.global_batch: Input should be greater than 0"),
    (lambda d: d.pop("model"), "model: Field required"),
    (lambda d: placement(d, 0, 0).update(zero=4), "pipelines.0.stages.0.modules.0.zero: Input should be 0, 1, 2 or 3"),
    (
        lambda d: d["pipelines"][0].update(schedule="zbv"),
        "pipelines.0.schedule: Input should be '1f1b', 'gpipe', 'interleaved', 'zb-h1' or 'given'",
    ),
    (
        lambda d: d["pipelines"][0].update(schedule="interleaved"),
        "pipelines.0: schedule interleaved needs stages with two or more virtual_stages; use 1f1b",
    ),
    (
        lambda d: d["pipelines"][0]["stages"][0].update(virtual_stages=[1, 1]),
        "pipelines.0.stages.0: virtual stages of [1, 1] modules add up to 2, the stage has 3",
    ),
    (
        lambda d: d["pipelines"][0]["stages"][0].update(virtual_stages=[1, 2]),
        "pipelines.0: stages have [2, 1] virtual stages; give all of them as many",
    ),
    (
        lambda d: [
            stage.update(virtual_stages=[1, len(stage["modules"]) - 1]) for stage in d["pipelines"][0]["stages"]
        ],
        "pipelines.0: schedule 1f1b runs one virtual stage per stage; use interleaved",
    ),
    (
        lambda d: [
            d["pipelines"][0].update(schedule="interleaved"),
            *(s.update(virtual_stages=[1, len(s["modules"]) - 1]) for s in d["pipelines"][0]["stages"]),
        ],
        "pipeline 0: position 1 holds layer.1.attention, the model needs layer.0.attention there",
    ),
    (
        lambda d: d["pipelines"][0].update(actions=["F0 B0", "F0 B0"]),
        "pipelines.0: actions and schedule given belong together: give both or neither",
    ),
    (
        lambda d: d["pipelines"][0].update(schedule="given", actions=["F0 B0"]),
        "pipelines.0: there are actions for 1 stages, the pipeline has 2",
    ),
    (
        lambda d: d["pipelines"][0].update(schedule="given", actions=["F0 B0", "F0 B0"]),
        "pipeline 0, actions of 2 micro-batches: stage 0 lacks F1",
    ),
]


@pytest.mark.parametrize(("change", "expected"), CASES, ids=[expected[:60] for _, expected in CASES])
def test_refusals(change: Callable[[dict[str, Any]], object], expected: str) -> None:
    message = refusal(change)
    assert message.startswith(expected)
    if expected.endswith(("order", "model", "one per block")):
        assert message == f"{expected}."


def test_a_rank_twice_in_one_replica_is_refused() -> None:
    assert "rank 4 has two places" in refusal(lambda d: d["replicas"][1].update(ranks=[4, 4, 5, 6]))


def test_missing_devices_cannot_be_used() -> None:
    assert "rank 7 is missing" in refusal(lambda d: d["cluster"].update(missing=[7]))


def test_a_degree_beyond_the_heads_is_refused() -> None:
    """8 ranks, 4 query heads: an even cut would leave ranks empty."""
    with pytest.raises(ValidationError, match=r"4 query heads.*Use a degree of at most 4"):
        Plan(
            made=Provenance(created_by="test", created_at="2026-01-01"),
            model=TINY,
            cluster=cluster_preset("h100x8"),
            training=TrainingSpec(global_batch=1, seq_len=16),
            pipelines=(Pipeline(micro_batch=1, stages=(stage(NAMES, (8,)),)),),
            replicas=(Replica(pipeline=0, ranks=tuple(range(8)), sequences=1),),
        )


def test_a_sequence_longer_than_the_model_knows_is_refused() -> None:
    assert "seq_len 2048" in refusal(lambda d: d["training"].update(seq_len=2048))


compositions = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@given(compositions, st.data())
def test_units_of_a_composition_cover_each_block(blocks: tuple[int, ...], data: st.DataObject) -> None:
    name, module = data.draw(st.sampled_from([pair for pair in TINY.modules() if num_units(pair[1]) >= max(blocks)]))
    put = ModulePlacement(module=name, blocks=blocks)
    units = [put.units_of(rank, module) for rank in range(sum(blocks))]
    for start, stop in zip(block_starts(blocks), block_starts(blocks)[1:], strict=False):
        pieces = units[start:stop]
        assert pieces[0].start == 0
        assert pieces[-1].stop == num_units(module)
        assert all(left.stop == right.start for left, right in pairwise(pieces))
    assert put.degree == max(blocks)


def test_given_cuts_are_used() -> None:
    mlp = dict(TINY.modules())["layer.0.mlp"]
    put = ModulePlacement(module="layer.0.mlp", blocks=(2, 1), cuts=((0, 100, 172), (0, 172)))
    assert [put.units_of(rank, mlp) for rank in range(3)] == [(0, 100), (100, 172), (0, 172)]
    assert put.units_of(1, mlp) == Interval(100, 172)


@settings(deadline=None)
@given(compositions, compositions, st.integers(1, 12), st.integers(1, 6))
def test_aligned_token_cuts_make_a_valid_plan(
    attention: tuple[int, ...], mlp: tuple[int, ...], micro_batch: int, seq_len: int
) -> None:
    """Whatever cut it returns, the validator accepts; None only when the even cut fails too."""
    if sum(attention) != sum(mlp) or max(attention) > 4:
        return
    placements = tuple(
        ModulePlacement(module=name, blocks=attention if module.kind == "attention" else mlp)
        for name, module in TINY.modules()
    )
    num_ranks = sum(attention)
    bare = Stage(num_ranks=num_ranks, modules=placements)
    cuts = aligned_token_cuts(bare, TINY, micro_batch, seq_len)
    even = balanced_cuts(micro_batch * seq_len, num_ranks)
    if cuts is None:
        too_few = any(start == stop for start, stop in pairwise(even))
        assert too_few or any(even[rank] % seq_len for rank in block_starts(attention))
        return
    Plan(
        made=Provenance(created_by="test", created_at="2026-01-01"),
        model=TINY,
        cluster=cluster_preset("gb200x72"),
        training=TrainingSpec(global_batch=micro_batch, seq_len=seq_len),
        pipelines=(Pipeline(micro_batch=micro_batch, stages=(bare.model_copy(update={"token_cuts": cuts}),)),),
        replicas=(Replica(pipeline=0, ranks=tuple(range(num_ranks)), sequences=micro_batch),),
    )


def test_terms_add_up() -> None:
    assert StepTerms(forward=1.0, backward=2.0, data=0.5).total() == 3.5
    assert MemoryTerms(weights=3, reserved=4).total() == 7
    assert StepTerms().total() == 0


def test_with_results_keeps_the_layout() -> None:
    plan = valid()
    assert plan.with_results() == plan
    assert plan.with_results(ladder=()).pipelines == plan.pipelines
