"""The solver against complete enumeration on tiny instances, priced by the same cost models."""

from __future__ import annotations

import random

import pytest

from planner.make import Problem, make_plan
from specs.errors import NoPlanFitsError
from specs.plan import Provenance, TrainingSpec
from tests.brute_force import all_prices
from tests.synthetic_costs import SyntheticCosts, cluster, some_options, tiny_model

MADE = Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z")
# (nodes, ranks per node, layers, global batch)
SHAPES = [(1, 2, 2, 2), (2, 1, 2, 4), (1, 4, 1, 2), (2, 2, 1, 2)]
NUM_INSTANCES = 200
# Objective over the true optimum, by instance.
ratios: dict[int, float] = {}


@pytest.mark.parametrize("seed", range(NUM_INSTANCES))
def test_no_plan_beats_the_bound(seed):
    generator = random.Random(seed)
    nodes, per_node, num_layers, global_batch = generator.choice(SHAPES)
    machine, model = cluster(nodes, per_node), tiny_model(seed, num_layers=num_layers)
    training = TrainingSpec(global_batch=global_batch, seq_len=8)
    known = some_options(seed, (1, 2, 4) if num_layers == 1 else (1, 2))
    costs = SyntheticCosts(seed, known=known, jitter=generator.choice([0.0, 0.05]))
    prices = all_prices(model, machine, training, costs, known)
    cap = generator.choice(sorted({memory for _, memory in prices}))
    best = min(seconds for seconds, memory in prices if memory <= cap)
    problem = Problem(model, machine, training, MADE, memory_cap_bytes=cap)
    try:
        plan = make_plan(problem, lambda *_: costs, objective="step-time", freedom="modules")
    except NoPlanFitsError:
        # The search never counts less memory than the price, but may count more where shares are unequal.
        assert cap < max(memory for _, memory in prices)
        ratios[seed] = float("inf")
        return
    found = plan.certificate
    assert plan.predicted.step_time_seconds == found.objective_value
    assert plan.predicted.peak_memory_bytes <= cap
    assert found.bound <= best * (1 + 1e-9)
    assert best <= found.objective_value * (1 + 1e-9)
    if found.status == "optimal":
        assert found.objective_value <= best * (1 + 2.1e-4)
    ratios[seed] = found.objective_value / best


def test_the_best_plan_is_found_nearly_always():
    """Unequal shares and pipelines of unlike stages leave gaps; they are shown, and rarely hide a better plan."""
    if len(ratios) == NUM_INSTANCES:
        assert sum(ratio <= 1 + 2.1e-4 for ratio in ratios.values()) >= 0.97 * NUM_INSTANCES
        assert all(ratio < 1.05 for ratio in ratios.values() if ratio != float("inf"))
