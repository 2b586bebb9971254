"""Users' constraints on real models, what is said when they cannot be met, and the objective memory."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import cli
from cost_models.sources import device_costs
from planner.constraints import Constraints
from planner.make import make_plan
from planner.memory_goal import MEMORY_TOLERANCE
from planner.problem import Problem
from specs.errors import BadInputError, NoPlanFitsError
from specs.plan import Provenance, TrainingSpec
from specs.presets import load_cluster, load_model
from tests.brute_force import all_plans
from tests.synthetic_costs import SyntheticCosts, cluster, some_options, tiny_model

MADE = Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z")
LLAMA = load_model("llama-3-8b")
JOB = ["--model", "llama-3-8b", "--cluster", "h100x8", "--global-batch", "64", "--seq-len", "8192"]


def plan_llama(constraints: Constraints, **words):
    training = TrainingSpec(global_batch=64, seq_len=8192)
    problem = Problem(LLAMA, load_cluster("h100x8"), training, MADE, words.pop("cap", None), constraints)
    return make_plan(problem, device_costs, objective=words.pop("objective", "step-time"), freedom="modules", **words)


@pytest.mark.parametrize("engine", ["dp", "ilp"])
def test_everything_at_once_is_met_by_both_engines(engine):
    constraints = Constraints(
        pins=("layer.3.mlp.tp=4", "layer.2?.attention.recompute=full"),
        forbids=("layer.*.mlp.recompute=full",),
        equals=("embedding,head",),
        max_degrees=2,
        stages="0-12,13-31",
    )
    plan = plan_llama(constraints, engine=engine)
    placed = {p.module: p for stage in plan.pipelines[0].stages for p in stage.modules}
    assert placed["layer.3.mlp"].blocks == (4,) * (plan.pipelines[0].stages[0].num_ranks // 4)
    assert all(placed[f"layer.{number}.attention"].recompute == "full" for number in range(20, 30))
    assert all(p.recompute != "full" for name, p in placed.items() if name.endswith("mlp"))
    assert placed["embedding"].degree == placed["head"].degree
    assert len({p.degree for p in placed.values()}) <= 2
    assert [stage.modules[0].module for stage in plan.pipelines[0].stages] == ["embedding", "layer.13.attention"]
    assert plan.certificate.engine == engine
    assert plan.certificate.constraints == constraints.texts()
    assert plan.certificate.gap < 0.02
    assert Constraints.of_texts(plan.certificate.constraints) == constraints


def test_gathered_inputs_are_kept_where_memory_is_left():
    """MLPs in blocks of four gather their inputs once more in backward, unless they keep them: 2 % of the step."""
    pins = ("layer.*.mlp.tp=4",)
    kept, gathered = (plan_llama(Constraints(pins, forbids)) for forbids in ((), ("*.recompute=keep",)))
    modes = {p.module: p.recompute for stage in kept.pipelines[0].stages for p in stage.modules}
    assert {mode for name, mode in modes.items() if name.endswith("mlp")} == {"keep"}
    assert "gathered inputs of 32 modules kept" in kept.ladder[-1].layout
    assert "kept" not in kept.ladder[0].layout  # not what one would choose by hand
    assert "keep" not in {p.recompute for stage in gathered.pipelines[0].stages for p in stage.modules}
    assert kept.predicted.step_time_seconds < 0.98 * gathered.predicted.step_time_seconds
    assert kept.predicted.peak_memory_bytes > gathered.predicted.peak_memory_bytes


def test_the_engines_agree_on_a_real_model():
    found = [plan_llama(Constraints(pins=("head.tp=8",)), engine=engine).certificate for engine in ("dp", "ilp")]
    assert found[0].objective_value == pytest.approx(found[1].objective_value, rel=4e-4)
    assert max(item.bound for item in found) <= min(item.objective_value for item in found) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--pin", "layer.99.mlp.tp=4"], 2, "no module of llama-3-8b is named 'layer.99.mlp'"),
        (["--pin", "layer.3.mlp=4"], 2, "cannot be read"),
        (["--pin", "layer.3.mlp.tp=four"], 2, "not 'four'"),
        (["--pin", "layer.3.mlp.recompute=some"], 2, "none, selective, full"),
        (["--pin", "embedding.recompute=full"], 2, "embedding has no recompute mode 'full'"),
        (["--equal", "layer.*.moe"], 2, "no module"),
        (["--stages", "0-15,17-31"], 2, "must begin at layer 16"),
        (["--stages", "0-15,16-30"], 2, "the layers 0-31"),
        (["--stages", "a-b"], 2, "cannot be read"),
        (["--pin", "layer.3.attention.tp=64"], 3, "32 query heads"),
        (["--pin", "*.tp=4", "--pin", "head.tp=8"], 3, "contradicts another pin"),
        (["--pin", "head.tp=8", "--forbid", "*.tp=8"], 3, "contradicts a pin"),
        (["--pin", "head.tp=8", "--pin", "embedding.tp=4", "--equal", "head,embedding"], 3, "4, 8"),
        (["--pin", "head.tp=8", "--pin", "embedding.tp=4", "--max-degrees", "1"], 3, "at least 2"),
        (["--pin", "head.tp=3"], 3, "none of which allows degree 3"),
        (["--stages", "0-9,10-19,20-31"], 3, "--stages 0-9,10-19,20-31. Without it"),
        (["--memory-cap", "24GiB", "--forbid", "*.tp=8", "--forbid", "layer.*.recompute=full"], 3, "--forbid"),
    ],
)
def test_what_cannot_be_met_is_named(words, code, says):
    result = CliRunner().invoke(cli.app, ["plan", *JOB, *words])
    error = result.exception
    assert isinstance(error, BadInputError | NoPlanFitsError), result.output
    assert error.exit_code == code
    assert says in str(error)
    assert "\n" not in str(error)


def test_overlapping_equal_groups_are_one():
    rules = Constraints(equals=("layer.0.*", "layer.0.mlp,head")).resolve(LLAMA)
    names = [name for name, _ in LLAMA.modules()]
    grouped = {name for name, rule in zip(names, rules.by_module, strict=True) if rule.group >= 0}
    assert rules.num_groups == 1
    assert grouped == {"layer.0.attention", "layer.0.mlp", "head"}


@pytest.mark.parametrize("engine", ["dp", "ilp"])
@pytest.mark.parametrize("seed", range(12))
def test_least_memory_against_complete_enumeration(seed, engine):
    machine, model = cluster(2, 2), tiny_model(seed)
    training = TrainingSpec(global_batch=2, seq_len=8)
    known = some_options(seed, (1, 2))
    costs = SyntheticCosts(seed, known=known)
    plans = all_plans(model, machine, training, costs, known)
    fastest = min(seconds for _, seconds, _ in plans)
    slowdown = 0.02 * (seed % 5)
    plan = make_plan(
        Problem(model, machine, training, MADE),
        lambda *_: costs,
        objective="memory",
        freedom="modules",
        engine=engine,
        slowdown=slowdown,
    )
    found = plan.certificate
    assert plan.predicted.step_time_seconds <= fastest * (1 + slowdown) * (1 + 2.1e-4)
    assert plan.predicted.peak_memory_bytes == found.objective_value
    least = min(memory for _, seconds, memory in plans if seconds <= fastest * (1 + slowdown))
    assert found.bound <= least
    if found.status == "optimal":
        assert found.objective_value <= least * (1 + 2 * MEMORY_TOLERANCE)


def test_least_memory_of_a_real_model():
    fast = plan_llama(Constraints())
    small = plan_llama(Constraints(), objective="memory")
    assert small.predicted.peak_memory_bytes < 0.95 * fast.predicted.peak_memory_bytes
    assert small.predicted.step_time_seconds <= 1.05 * fast.predicted.step_time_seconds
    assert small.certificate.status == "optimal"
    assert small.ladder[-1].freedom == "+ memory objective"
