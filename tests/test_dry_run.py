"""A rank played with fake tensors, against the formulas and against real execution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from rich.progress import Progress
from typer.testing import CliRunner

from benchmarks.dry_run_plans import Job, play, shortened
from cost_models.rank_work import PlanWork, RankWork, seat_of
from executor.dry_run import dry_run
from specs.model import ModelSpec
from specs.plan import Plan
from specs.presets import model_preset
from specs.schedule import Schedule
from tests.layouts import ReplicaShape, StageShape, build, small_model

if TYPE_CHECKING:
    from tests.gloo import GlooPool

# Presets that the executor runs.
PRESETS = (
    "gpt2",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3-405b",
    "mixtral-8x7b",
    "nemotron-super-49b",
    "nemotron-ultra-253b",
    "openelm-3b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
)


def agree(played: RankWork, formulas: RankWork, *, whole: bool = True, passing_bytes: int = 0) -> None:
    """Not `whole`: experts get whole tokens, in the formulas fractions.  `passing_bytes`: chunks that come and go."""
    # Sharded buckets are padded to the number of their owners.
    assert played.weight_bytes == pytest.approx(formulas.weight_bytes, rel=1e-6)
    assert played.gradient_bytes == pytest.approx(formulas.gradient_bytes, rel=1e-6)
    assert played.optimizer_bytes == pytest.approx(formulas.optimizer_bytes, rel=1e-6)
    assert played.activation_bytes == pytest.approx(
        formulas.activation_bytes, abs=0.02 * formulas.activation_bytes + passing_bytes
    )
    assert played.flop == pytest.approx(formulas.flop, rel=1e-9 if whole else 2e-2)
    assert played.sent_bytes == pytest.approx(formulas.sent_bytes, rel=1e-6 if whole else 2e-2)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_play_as_the_formulas_say(name: str) -> None:
    """Two replicas of stages of a few modules each; bf16, sharded optimizer."""
    model = model_preset(name)
    num_ranks = 8 if name.startswith("qwen3") else 2  # of many experts each rank gets few
    stages = [StageShape(num_ranks)] * max(2, len(model.modules()) // 5)
    plan = build(model, [ReplicaShape(stages, 1, 2)] * 2, seq_len=512, zero=1)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"precision": "bf16"})})
    seat = seat_of(plan, num_ranks)
    has_experts = any(module.kind == "moe" for _, module in model.modules())
    agree(dry_run(plan, seat.process), PlanWork(plan).of(seat), whole=not has_experts)


def shapes(model: ModelSpec, seq_len: int) -> dict[str, Plan]:
    """Name -> plan."""
    two = [StageShape(2), StageShape(2)]
    around = ("F0 1F0 F1 1F1 1B1 1B0 B1 I0 W0", "F0 F1 1F0 1F1 1I1 1B0 B1 1W1 B0")
    given = ReplicaShape([StageShape(1), StageShape(1)], 1, 2, "given", 2, actions=around)
    unlike = [ReplicaShape([StageShape(4)], 1, 2), ReplicaShape([StageShape(3)], 1, 1)]
    return {
        "mixed blocks": build(model, [ReplicaShape([StageShape(4, {"mlp": (2, 2)})], 2, 4)], seq_len=seq_len),
        "full": build(model, [ReplicaShape(two, 1, 3)], recompute="full", seq_len=seq_len),
        "interleaved": build(model, [ReplicaShape(two, 1, 3, "interleaved", 2)], seq_len=seq_len),
        "selective, zero bubble": build(
            model, [ReplicaShape(two, 1, 3, "zb-h1")], recompute="selective", seq_len=seq_len
        ),
        "gathered inputs kept": build(model, [ReplicaShape(two, 1, 3)], recompute="keep", seq_len=seq_len),
        "given": build(model, [given], seq_len=seq_len),
        "replicas tp 4 and tp 3": build(model, unlike, zero=1, seq_len=seq_len),
    }


def large() -> ModelSpec:
    """Two layers of GPT-2: what the formulas leave out (statistics of norms, tables) is small beside them."""
    whole = model_preset("gpt2")
    (layer,) = whole.layers
    return whole.model_copy(update={"layers": (layer.model_copy(update={"repeat": 2}),)})


LARGE = shapes(large(), 256)
SMALL = shapes(small_model(), 8)


@pytest.mark.parametrize("name", LARGE)
def test_shapes_play_as_the_formulas_say(name: str) -> None:
    plan = LARGE[name]
    formulas = PlanWork(plan)
    for seat in formulas.fullest_seats():
        chunk = 4 * 256 * plan.model.hidden // plan.pipelines[0].stages[0].num_ranks
        agree(dry_run(plan, seat.process), formulas.of(seat), passing_bytes=chunk)


def run_static(plan_json: str) -> tuple[int, int]:
    """Bytes of weights, gradients and states on this rank, and at its most: what a real step had."""
    from executor.engine import Engine
    from executor.memory import measure_step
    from tests.parity import OPTIONS, tokens_of

    plan = Plan.model_validate_json(plan_json)
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=0)
    tokens = tokens_of(plan.model, plan.training.global_batch, plan.training.seq_len, 1)
    with measure_step(engine) as readings:
        engine.step(1, lambda first, count: tokens[first : first + count])
    return readings[0].static_bytes, readings[0].peak_bytes


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["selective, zero bubble", "given"])
def test_real_ranks_hold_what_was_played(gloo_pool: GlooPool, name: str) -> None:
    plan = SMALL[name]
    real = gloo_pool.run(run_static, plan.world_size, plan.model_dump_json())
    for seat in PlanWork(plan).fullest_seats():
        played = dry_run(plan, seat.process)
        static, peak = real[seat.process]
        states = played.weight_bytes + played.gradient_bytes + played.optimizer_bytes
        assert static == states
        assert peak >= states + 0.98 * played.activation_bytes


def test_a_plan_of_the_solver_fills_what_it_is_predicted_to(tmp_path: Path) -> None:
    """Peaks within 2 %; `benchmarks/results/dry_run_plans.md` has the larger models."""
    job = Job("demo", "h100x8", 64, 256)
    with Progress(disable=True) as progress:
        played = play(job, tmp_path, progress, until=float("inf"))
    assert played is not None
    _, rows = played
    assert all(abs(row.peak_ratio - 1.0) <= 0.02 and abs(row.held_ratio - 1.0) <= 0.02 for row in rows)


@pytest.mark.parametrize(("schedule", "num_virtual"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_fewer_micro_batches_come_to_the_same_peak(schedule: Schedule, num_virtual: int) -> None:
    """And hold as much at the most between two actions, but for a chunk on its way."""
    shape = ReplicaShape([StageShape(1)] * 2, 1, 8, schedule, num_virtual)
    plan = build(small_model(), [shape], seq_len=64, recompute="selective")
    short = shortened(plan)
    assert short.training.global_batch < plan.training.global_batch
    whole, few = dry_run(plan, 0), dry_run(short, 0)
    assert few.peak_bytes == whole.peak_bytes
    assert few.held_bytes == pytest.approx(whole.held_bytes, abs=4 * 64 * plan.model.hidden)


def test_command(tmp_path: Path) -> None:
    from cli import app

    plan = SMALL["selective, zero bubble"]
    path = tmp_path / "plan.json"
    path.write_text(plan.model_dump_json())
    result = CliRunner().invoke(app, ["dry-run", str(path), "--rank", "3", "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout[result.stdout.index("[") :])
    assert (row["rank"], row["stage"], row["position"]) == (3, 1, 1)
    assert row["played"]["flop"] == row["formulas"]["flop"] > 0
    table = CliRunner().invoke(app, ["dry-run", str(path), "--rank", "0"]).output
    assert "operations" in table
    assert "point to point sent" in table


def test_unlike_ranks_are_played_once() -> None:
    plan = build(small_model(), [ReplicaShape([StageShape(2), StageShape(2)], 1, 2)] * 3)
    assert len(PlanWork(plan).unlike_seats()) <= 4
    assert [seat.stage for seat in PlanWork(plan).fullest_seats()] == [0, 1]


def test_more_micro_batches_keep_no_more() -> None:
    """Beyond those that a pipeline has in flight."""
    few, many = (
        dry_run(build(small_model(), [ReplicaShape([StageShape(1)] * 3, 1, number)], seq_len=64), 1).activation_bytes
        for number in (6, 18)
    )
    assert few == many
