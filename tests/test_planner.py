"""Plans from shipped data and from made-up costs: complete, priced by the cost models, honest about what was proven."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.sources import device_costs
from cost_models.step import price
from planner.explain import explain
from planner.make import Problem, make_plan
from planner.search import FREEDOMS
from planner.start import parse_bytes, start_plan
from specs.base import load_document
from specs.errors import BadInputError, NoPlanFitsError, TimeLimitError
from specs.model import ModelSpec
from specs.plan import Plan, Provenance, TrainingSpec
from specs.presets import cluster_preset, model_preset
from tests.synthetic_costs import SyntheticCosts, cluster, tiny_model

MADE = Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z")
ROOT = Path(__file__).resolve().parents[1]


def problem(model: str, machine: str, batch: int, seq_len: int, cap: int | None = None) -> Problem:
    training = TrainingSpec(global_batch=batch, seq_len=seq_len)
    return Problem(model_preset(model), cluster_preset(machine), training, MADE, memory_cap_bytes=cap)


@pytest.fixture(scope="module")
def plan_8b() -> Plan:
    return make_plan(problem("llama-3-8b", "h100x8", 64, 8192), device_costs, objective="step-time")


@pytest.fixture(scope="module")
def plan_of_runs() -> Plan:
    """Without virtual stages."""
    return make_plan(problem("llama-3-8b", "h100x8", 64, 8192), device_costs, objective="step-time", freedom="cuts")


def test_a_plan_is_complete_and_its_numbers_are_the_price(plan_8b):
    predicted, certificate = plan_8b.predicted, plan_8b.certificate
    assert price(plan_8b, device_costs(plan_8b.cluster, plan_8b.training)) == predicted
    assert certificate.objective_value == predicted.step_time_seconds
    assert certificate.bound <= certificate.objective_value
    assert certificate.gap == pytest.approx(1 - certificate.bound / certificate.objective_value, abs=1e-12)
    assert certificate.status == ("optimal" if certificate.gap <= 2e-4 else "feasible")
    assert certificate.gap <= 1e-3
    assert predicted.peak_memory_bytes <= 80 * 2**30
    assert plan_8b.world_size == 8
    assert plan_8b.alternatives


def test_the_ladder_never_goes_up_in_time(plan_8b):
    steps = [rung.step_time_seconds for rung in plan_8b.ladder if rung.step_time_seconds is not None]
    assert len(plan_8b.ladder) == len(FREEDOMS)
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == plan_8b.predicted.step_time_seconds
    for before, rung in zip(plan_8b.ladder, plan_8b.ladder[1:], strict=False):
        assert rung.gain_over_previous == pytest.approx(1 - rung.step_time_seconds / before.step_time_seconds)
        if rung.gain_over_previous < 5e-4:
            assert "nothing" in rung.reason


@pytest.mark.parametrize("freedom", ["uniform", "modules"])
def test_goodput_beats_the_fastest_plan_in_what_it_delivers(freedom):
    """With many replicas a failure takes less with it: the plan that delivers most need not be the fastest."""
    job = problem("llama-3-70b", "h100x64", 1024, 8192)
    fastest = make_plan(job, device_costs, objective="step-time", freedom=freedom)
    chosen = make_plan(job, device_costs, objective="goodput", freedom=freedom)
    ours, theirs = chosen.predicted, fastest.predicted
    assert ours.goodput_tokens_per_second >= theirs.goodput_tokens_per_second
    assert ours.step_time_seconds >= theirs.step_time_seconds * (1 - 2e-4)
    delivered = chosen.training.tokens_per_step / ours.goodput_tokens_per_second
    assert chosen.certificate.objective_value == pytest.approx(delivered)
    assert chosen.certificate.bound <= delivered
    assert chosen.ladder[-1].freedom == "+ goodput objective"
    if freedom == "modules":
        assert ours.goodput_tokens_per_second > 1.01 * theirs.goodput_tokens_per_second
        assert "more" in chosen.ladder[-1].reason


@pytest.mark.parametrize(
    ("model", "machine", "batch", "seq_len"),
    [("nemotron-ultra-253b", "h100x1024", 1024, 8192), ("openelm-3b", "h100x8", 256, 2048)],
)
def test_a_time_limit_is_kept_and_the_gap_says_so(model, machine, batch, seq_len):
    """Everything from reading to losses solved ahead, by processor time, since other programs may hold up this one."""
    limit = 0.5
    start = time.process_time()
    plan = start_plan(
        model=model,
        cluster=machine,
        profile_path=None,
        global_batch=batch,
        seq_len=seq_len,
        precision=None,
        memory_cap=None,
        objective="goodput",
        freedom="cuts",
        time_limit_seconds=limit,
        top_k=3,
        command="",
    )
    assert time.process_time() - start <= limit + 3.0
    assert plan.certificate.status == "feasible"
    assert plan.certificate.pruned["time limit"] > 0
    assert plan.certificate.bound < plan.certificate.objective_value


@pytest.mark.parametrize("freedom", ["uniform", "layers"])
def test_a_tied_weight_in_one_stage_is_counted_once(freedom):
    job = problem("gpt2", "h100x2", 8, 1024)
    plan = make_plan(job, device_costs, objective="step-time", freedom=freedom)
    assert job.model.head.tied
    assert len(plan.pipelines[0].stages) == 1
    capped = replace(job, memory_cap_bytes=plan.predicted.peak_memory_bytes)
    again = make_plan(capped, device_costs, objective="step-time", freedom=freedom)
    assert again.predicted.step_time_seconds == plan.predicted.step_time_seconds


def test_uniform_plans_are_uniform(plan_8b):
    plan = make_plan(problem("llama-3-8b", "h100x8", 64, 8192), device_costs, objective="step-time", freedom="uniform")
    assert plan.predicted.step_time_seconds == plan_8b.ladder[0].step_time_seconds
    placements = [p for stage in plan.pipelines[0].stages for p in stage.modules]
    assert len({p.degree for p in placements}) == 1
    assert len({p.zero for p in placements}) == 1
    assert len({p.recompute for p in placements if "layer" in p.module}) == 1
    sizes = [len(stage.modules) for stage in plan.pipelines[0].stages]
    assert max(sizes) - min(sizes) <= 3  # a layer, and the embedding or the head


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_no_uniform_layout_by_hand_is_better(plan_8b, degree):
    """Data parallel over tensor parallel, for every micro-batch that fits."""
    uniform = plan_8b.ladder[0].step_time_seconds
    names = [name for name, _ in plan_8b.model.modules()]
    costs = device_costs(plan_8b.cluster, plan_8b.training)
    for micro_batch in (1, 2, 4, 8):
        replicas = 8 // degree
        share = 64 // replicas
        if share % micro_batch:
            continue
        for mode in ("none", "selective", "full"):
            modules = [
                {"module": n, "blocks": [degree], "recompute": mode if "layer" in n else "none", "zero": 1}
                for n in names
            ]
            pipeline = {"micro_batch": micro_batch, "stages": [{"num_ranks": degree, "modules": modules}]}
            ranks = [
                {"pipeline": 0, "ranks": list(range(r * degree, (r + 1) * degree)), "sequences": share}
                for r in range(replicas)
            ]
            plain = plan_8b.model_dump(exclude={"predicted", "certificate", "ladder", "alternatives"})
            by_hand = Plan.model_validate({**plain, "pipelines": [pipeline], "replicas": ranks})
            found = price(by_hand, costs)
            if found.peak_memory_bytes <= 80e9:
                assert found.step_time_seconds >= uniform * (1 - 1e-9)


def test_nothing_fits_says_what_would():
    with pytest.raises(NoPlanFitsError, match=r"no plan fits 12.0 GiB: stage \d+ needs") as error:
        make_plan(problem("llama-3-8b", "h100x8", 8, 8192, cap=12 * 2**30), device_costs)
    text = str(error.value)
    assert "optimizer" in text
    assert "activations" in text
    cap = parse_bytes(text.split("--memory-cap ")[1].split(" ")[0].rstrip("."))
    assert make_plan(problem("llama-3-8b", "h100x8", 8, 8192, cap=cap), device_costs, freedom="modules").predicted
    with pytest.raises(NoPlanFitsError, match=r"devices with \d+\.\d GiB or 32 devices"):
        make_plan(problem("llama-3-70b", "h100x8", 8, 8192), device_costs)


def test_a_batch_that_cannot_be_divided():
    machine = cluster(1, 1).model_copy(update={"nodes": cluster(5, 1).nodes})
    training = TrainingSpec(global_batch=7, seq_len=8)
    with pytest.raises(BadInputError, match="global batch 7"):
        make_plan(Problem(tiny_model(1), machine, training, MADE), lambda *_: SyntheticCosts(1))


def test_no_time_no_plan():
    with pytest.raises((TimeLimitError, NoPlanFitsError)):
        make_plan(problem("llama-3-70b", "h100x8", 8, 8192), device_costs, time_limit_seconds=0.0)


def seconds(model: ModelSpec, seed: int, cap: int, *, freedom: str = "modules", jitter: float = 0.0) -> float:
    training = TrainingSpec(global_batch=4, seq_len=8)
    costs = SyntheticCosts(seed, jitter=jitter)
    try:
        plan = make_plan(
            Problem(model, cluster(1, 2), training, MADE, cap), lambda *_: costs, objective="step-time", freedom=freedom
        )
    except NoPlanFitsError:
        return float("inf")
    assert plan.predicted.peak_memory_bytes <= cap
    return plan.certificate.bound, plan.predicted.step_time_seconds


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(4000, 12000), st.integers(0, 4000))
def test_more_memory_is_never_slower(seed, cap, more):
    model = tiny_model(seed, num_layers=2)
    less, enough = seconds(model, seed, cap), seconds(model, seed, cap + more)
    if less != float("inf"):
        assert enough[1] <= less[1] * (1 + 1e-3)
        assert enough[0] <= less[1] * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(5000, 12000))
def test_the_order_of_equal_layers_changes_nothing(seed, cap):
    model = tiny_model(seed, num_layers=1)
    layer = model.layers[0]
    as_repeat = model.model_copy(update={"layers": (layer.model_copy(update={"repeat": 2}),)})
    as_copies = model.model_copy(update={"layers": (layer, layer.model_copy())})
    assert seconds(as_repeat, seed, cap) == seconds(as_copies, seed, cap)


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("1.5GB", 1_500_000_000), ("512 MiB", 512 * 2**20), ("1024", 1024)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1GiB", "0", "5 parsecs"])
def test_bad_sizes(text):
    with pytest.raises(BadInputError, match="size"):
        parse_bytes(text)


def plait(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_line(tmp_path):
    out = tmp_path / "plan.json"
    shape = ("--model", "llama-3-8b", "--cluster", "h100x8", "--global-batch", "64", "--seq-len", "8192")
    shown = plait("plan", *shape, "-o", str(out))
    assert shown.returncode == 0, shown.stderr
    for word in ("attention", "zb-h1", "best uniform", "activations", "tokens/s", "gap"):
        assert word in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 100
    plan = load_document(Plan, out, "plan")
    assert set(plan.made.inputs) == {"model", "cluster"}
    machine = json.loads(plait("plan", *shape, "--json").stdout)
    assert machine["predicted"]["step_time_seconds"] == plan.predicted.step_time_seconds
    assert machine["predicted"]["peak_memory_bytes"] == plan.predicted.peak_memory_bytes
    assert machine["predicted"]["goodput_tokens_per_second"] > 0
    assert machine["certificate"]["status"] in ("optimal", "feasible")
    assert machine["certificate"]["gap"] < 1e-3
    assert machine["ladder"][0]["freedom"] == "best uniform"
    priced = json.loads(plait("estimate", str(out), "--json").stdout)
    assert priced == json.loads(plan.predicted.model_dump_json())


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--model", "no-such", "--cluster", "h100x8"), 2, "unknown model"),
        (("--model", "gpt2", "--cluster", "h100x0"), 2, "no devices"),
        (("--model", "gpt2"), 2, "--cluster"),
        (("--model", "gpt2", "--cluster", "h100x8", "--memory-cap", "lots"), 2, "size"),
        (("--model", "llama-3-405b", "--cluster", "h100x8"), 3, "no plan fits"),
    ],
)
def test_bad_input_is_one_sentence_with_its_code(arguments, code, text):
    done = plait("plan", *arguments, "--global-batch", "64", "--seq-len", "1024")
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_planning_from_shipped_data_imports_nothing_heavy():
    script = (
        "import sys, cli\n"
        "sys.argv = 'plait plan --model gpt2 --cluster h100x8 --global-batch 64 --seq-len 1024'.split()\n"
        "try:\n    cli.main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "heavy = {'torch', 'pandas', 'scipy', 'networkx', 'pulp', 'highspy', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_explain_and_diff(tmp_path, plan_of_runs):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    full = plan_of_runs.predicted.peak_memory_bytes + 2**20  # a cap that leaves next to nothing
    plan_of_runs.model_copy(update={"memory_cap_bytes": full}).save(one)
    make_plan(problem("llama-3-8b", "h100x8", 64, 8192), device_costs, freedom="uniform").save(other)
    shown = plait("explain", str(one), "--module", "layer.3.mlp")
    assert shown.returncode == 0, shown.stderr
    assert "taken" in shown.stdout
    assert "slower by" in shown.stdout
    assert "does not fit" in shown.stdout
    whole = plait("explain", str(one), "--time-limit", "0")
    assert whole.returncode == 0, whole.stderr
    assert re.search(r"zb-h1 .*taken", whole.stdout)
    assert re.search(r"1f1b .*slower by", whole.stdout)
    assert re.search(r"gpipe .*(slower by|does not fit)", whole.stdout)
    missing = plait("explain", str(one), "--module", "layer.99.mlp")
    assert missing.returncode == 2
    assert "layer.99.mlp" in missing.stderr
    shown = plait("diff", str(one), str(other))
    assert shown.returncode == 0, shown.stderr
    assert "layer.3.mlp" in shown.stdout
    assert "peak memory" in shown.stdout


def test_no_neighbour_of_an_optimal_plan_is_faster(plan_of_runs):
    found = explain(plan_of_runs, device_costs(plan_of_runs.cluster, plan_of_runs.training))
    assert min(found.free_bytes) >= 0
    for module in found.modules:
        assert module.neighbours[0].reason is None
        assert module.neighbours[0].step_change_seconds == 0.0
        kept = {max(other.blocks) for other in module.neighbours if other.recompute == "keep"}
        gathers = {max(other.blocks) for other in module.neighbours} - {1}
        assert kept == (gathers if module.module.endswith(("attention", "mlp")) else set())
        for other in module.neighbours[1:]:
            fits = other.step_change_seconds is not None and "fit" not in other.reason
            if fits:
                assert other.step_change_seconds >= -plan_of_runs.certificate.gap * found.step_seconds
