"""Shadow prices against complete enumeration before and after each change."""

from __future__ import annotations

import json
import random

import pytest
from typer.testing import CliRunner

import cli
from cost_models.sources import device_costs
from planner.constraints import Constraints
from planner.make import make_plan
from planner.problem import Problem
from planner.shadow_prices import LEVEL_NAMES, FasterCosts, shadow_prices
from specs.errors import NoPlanFitsError
from specs.plan import Provenance, TrainingSpec
from specs.presets import load_cluster, load_model
from tests.brute_force import all_plans
from tests.synthetic_costs import SyntheticCosts, cluster, some_options, tiny_model

MADE = Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z")


@pytest.mark.parametrize("seed", range(16))
def test_gains_are_those_of_complete_enumeration(seed):
    generator = random.Random(seed)
    machine, model = cluster(2, 2), tiny_model(seed)
    training = TrainingSpec(global_batch=2, seq_len=8)
    known = some_options(seed, (1, 2))
    costs = SyntheticCosts(seed, known=known)
    plans = all_plans(model, machine, training, costs, known)
    cap = generator.choice(sorted({memory for _, _, memory in plans}))
    pin = Constraints(pins=("head.tp=2",))
    try:
        plan = make_plan(
            Problem(model, machine, training, MADE, cap, pin),
            lambda *_: costs,
            objective="step-time",
            freedom="modules",
        )
    except NoPlanFitsError:
        pytest.skip("nothing fits this cap with this pin")

    def best(plans, *, capped=True, pinned=True):
        return min(
            seconds
            for pipeline, seconds, memory in plans
            if (memory <= cap or not capped) and (pipeline.stages[-1].modules[-1].degree == 2 or not pinned)
        )

    before = best(plans)
    expected = {
        "1 GiB more on every rank": best(plans, capped=False),
        "without --pin head.tp=2": best(plans, pinned=False),
    }
    for part, name in (*LEVEL_NAMES.items(), ("devices", "devices")):
        changed = all_plans(model, machine, training, FasterCosts(costs, part), known)
        expected[f"{name} 10 % faster"] = best(changed)
    prices = {price.change: price for price in shadow_prices(plan, costs)}
    assert set(prices) == set(expected)
    for change, after in expected.items():
        gain = 1.0 - after / before
        price = prices[change]
        # The range is in parts of what was found, which is within the tolerance of the best.
        assert price.least_gain - 3e-4 <= gain <= price.most_gain + 3e-4, change
        assert price.least_gain <= price.gain <= price.most_gain, change


def test_memory_has_a_price_only_where_it_binds():
    training = TrainingSpec(global_batch=64, seq_len=8192)
    gains = []
    for cap in (40 * 2**30, None):
        problem = Problem(load_model("llama-3-8b"), load_cluster("h200x8"), training, MADE, cap)
        plan = make_plan(problem, device_costs, objective="step-time", freedom="modules")
        costs = device_costs(problem.cluster, training)
        gains.append({price.change: price for price in shadow_prices(plan, costs)}["1 GiB more on every rank"])
    assert gains[0].least_gain > 1e-3
    assert gains[1].most_gain < 1e-3


def test_explain_prints_prices_and_json(tmp_path):
    path = tmp_path / "plan.json"
    words = ["--model", "llama-3-8b", "--cluster", "h100x8", "--global-batch", "64", "--seq-len", "8192"]
    runner = CliRunner()
    made = runner.invoke(cli.app, ["plan", *words, "--freedom", "modules", "--pin", "head.tp=8", "-o", str(path)])
    assert made.exit_code == 0, made.output
    shown = runner.invoke(cli.app, ["explain", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "What would make a step shorter" in shown.output
    found = json.loads(runner.invoke(cli.app, ["explain", str(path), "--json"]).output)
    assert "without --pin head.tp=8" in [price["change"] for price in found["prices"]]
    one = json.loads(runner.invoke(cli.app, ["explain", str(path), "--module", "head", "--json"]).output)
    assert one["prices"] == []
