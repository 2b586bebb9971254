"""Both engines against complete enumeration on tiny instances, priced by the same cost models.

With and without users' constraints, on models of unlike layers.
"""

from __future__ import annotations

import random
from collections import defaultdict
from fnmatch import fnmatch
from itertools import pairwise

import pytest

from cost_models.step import price
from planner.constraints import Constraints
from planner.make import make_plan
from planner.problem import Problem
from specs.cluster import ClusterSpec
from specs.errors import NoPlanFitsError
from specs.model import ModelSpec
from specs.plan import Pipeline, Plan, Provenance, TrainingSpec
from tests.brute_force import all_plans
from tests.synthetic_costs import SyntheticCosts, cluster, some_options, tiny_model

MADE = Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z")
# (nodes, ranks per node, layers, global batch)
SHAPES = [(1, 2, 2, 2), (2, 1, 2, 4), (1, 4, 1, 2), (2, 2, 1, 2)]
NUM_INSTANCES = 222
# Those of them with unlike ranks: one slow device, or a node of a slower type with less memory.
UNLIKE = frozenset(range(9, NUM_INSTANCES, 10))
NUM_EQUAL = NUM_INSTANCES - len(UNLIKE)
assert NUM_EQUAL == 200
# Relative distance at which a search stops, and what its own bound may then be above the optimum.
CLOSE = 2.1e-4
ENGINES = ("dp", "ilp")
# Objective over the true optimum, by kind of run and instance.
ratios: dict[str, dict[int, float]] = defaultdict(dict)
# Objective where nothing that is enumerated fits: stages then grow beyond a domain, and sequences are cut.
wider: dict[str, dict[int, float]] = defaultdict(dict)


def some_constraint(generator: random.Random, model: ModelSpec) -> Constraints:
    """A constraint that may or may not leave any plan."""
    names = [name for name, _ in model.modules()]
    some = generator.choice([*names, "layer.*", "layer.0.*", "*.mlp", "*"])
    if not any(fnmatch(name, some) for name in names):
        some = "*"
    degree = generator.choice([1, 1, 2, 4])
    match generator.choice(["pin", "pin", "recompute", "forbid", "equal", "max", "stages"]):
        case "pin":
            return Constraints(pins=(f"{generator.choice(names)}.tp={degree}",))
        case "recompute":
            return Constraints(pins=("*.recompute=full",))
        case "forbid":
            return Constraints(forbids=(f"{some}.tp={degree}",))
        case "equal":
            return Constraints(equals=(f"{some},head",))
        case "max":
            return Constraints(max_degrees=1)
        case _:
            last = len(model.layers) - 1
            return Constraints(stages=generator.choice([f"0,1-{last}", f"0-{last}"]) if last else "0")


def meets(pipeline: Pipeline, constraints: Constraints, model: ModelSpec) -> bool:
    """Whether a pipeline meets a constraint, read from the words once more."""
    degrees = {p.module: p.blocks[0] for stage in pipeline.stages for p in stage.modules}
    modes = {p.module: p.recompute for stage in pipeline.stages for p in stage.modules}
    kinds = {name: module.kind for name, module in model.modules()}
    for text in constraints.pins:
        name, value = text.rsplit("=", 1)
        if name.endswith(".recompute"):
            able = [m for m in modes if kinds[m] != "embedding"]
            if any(modes[m] != value for m in able):
                return False
        elif degrees[name.removesuffix(".tp")] != int(value):
            return False
    for text in constraints.forbids:
        pattern, value = text.split(".tp=")
        if any(fnmatch(m, pattern) and degree == int(value) for m, degree in degrees.items()):
            return False
    for text in constraints.equals:
        if len({d for m, d in degrees.items() if any(fnmatch(m, p) for p in text.split(","))}) > 1:
            return False
    if constraints.max_degrees is not None and len(set(degrees.values())) > constraints.max_degrees:
        return False
    if constraints.stages is not None:
        held = [{p.module.split(".")[1] for p in s.modules if p.module.startswith("layer")} for s in pipeline.stages]
        present = {name.split(".")[1] for name in degrees if name.startswith("layer")}
        ranges = [(int(text[0]), int(text[-1])) for text in constraints.stages.split(",")]
        wanted = [{str(layer) for layer in range(first, last + 1)} for first, last in ranges]
        if len(held) != len(wanted) or any(h != w & present for h, w in zip(held, wanted, strict=True)):
            return False
    return True


def check(kind: str, seed: int, problem: Problem, costs, engine, plans: list[tuple[Pipeline, float, int]]) -> None:
    """The engine's plan is within the cap, no plan is better than its bound, and an optimal one is as good as any."""
    cap = problem.memory_bytes
    best = min((seconds for _, seconds, memory in plans if memory <= cap), default=float("inf"))
    try:
        plan = make_plan(problem, lambda *_: costs, objective="step-time", freedom="modules", engine=engine)
    except NoPlanFitsError:
        # The search never counts less memory than the price, but may count more where shares are unequal.
        assert best == float("inf") or any(memory > cap for _, _, memory in plans)
        ratios[kind][seed] = 1.0 if best == float("inf") else float("inf")
        return
    found = plan.certificate
    assert meets(plan.pipelines[0], problem.constraints, problem.model)
    assert plan.predicted.step_time_seconds == found.objective_value
    assert plan.predicted.peak_memory_bytes <= cap
    assert found.bound <= best * (1 + 1e-9)
    if best == float("inf"):
        pipeline, domain = plan.pipelines[0], problem.cluster.nodes[0].devices_per_node
        assert pipeline.context_parallel > 1 or max(stage.num_ranks for stage in pipeline.stages) > domain
        wider[kind][seed] = found.objective_value
        return
    assert best <= found.objective_value * (1 + 1e-9)
    if found.status == "optimal":
        assert found.objective_value <= best * (1 + CLOSE)
    ratios[kind][seed] = found.objective_value / best


def with_unlike_ranks(generator: random.Random, machine: ClusterSpec) -> ClusterSpec:
    """One rank slow, or all of the last node, of a type that has half the memory; the others at full speed."""
    speed, last = generator.uniform(0.4, 0.95), machine.num_devices - machine.nodes[0].devices_per_node
    if machine.num_nodes == 1 or generator.random() < 0.5:
        return machine.model_copy(update={"slow": {generator.randrange(machine.num_devices): speed}})
    device, group = machine.devices["d"], machine.nodes[0]
    return ClusterSpec(
        name="unlike",
        devices={"d": device, "e": device.model_copy(update={"name": "e", "memory_bytes": device.memory_bytes // 2})},
        nodes=(
            group.model_copy(update={"count": group.count - 1}),
            group.model_copy(update={"count": 1, "device": "e"}),
        ),
        links=machine.links,
        slow=dict.fromkeys(range(last, machine.num_devices), speed),
    )


@pytest.mark.parametrize("seed", sorted(UNLIKE))
def test_the_bound_holds_with_unlike_ranks(seed):
    """The rung of unlike devices leaves the enumerated space (unequal cuts and shares), so its plan may be better than
    all of that; nothing in it is better than the bound.
    """
    generator = random.Random(seed)
    nodes, per_node, num_layers, global_batch = generator.choice(SHAPES)
    machine, model = with_unlike_ranks(generator, cluster(nodes, per_node)), tiny_model(seed, num_layers=num_layers)
    training = TrainingSpec(global_batch=global_batch, seq_len=8)
    known = some_options(seed, (1, 2, 4) if num_layers == 1 else (1, 2))
    costs = SyntheticCosts(seed, known=known)
    plans = all_plans(model, machine, training, costs, known)
    cap = generator.choice(sorted({memory for _, _, memory in plans}))
    best = min(seconds for _, seconds, memory in plans if memory <= cap)
    problem = Problem(model, machine, training, MADE, cap)
    try:
        plan = make_plan(problem, lambda *_: costs, objective="step-time", freedom="modules")
    except NoPlanFitsError:
        assert any(memory > cap for _, _, memory in plans)
        return
    found = plan.certificate
    assert plan.ladder[-1].freedom == "+ unlike devices"
    assert price(plan, costs).step_time_seconds == found.objective_value
    assert plan.predicted.peak_memory_bytes <= cap
    assert found.bound <= min(best, found.objective_value) * (1 + 1e-9)
    ratios["unlike ranks"][seed] = found.objective_value / best


def test_unlike_ranks_are_nearly_always_planned_as_well_as_by_even_cuts():
    """A local search from the best layouts for equal ranks: now and then it starts too far away."""
    found = ratios["unlike ranks"].values()
    if len(found) >= 0.8 * len(UNLIKE):
        assert sum(ratio <= 1 + CLOSE for ratio in found) >= 0.9 * len(found)
        assert max(found) < 1.05


@pytest.mark.parametrize("seed", sorted(set(range(NUM_INSTANCES)) - UNLIKE))
def test_no_plan_beats_the_bound(seed):
    generator = random.Random(seed)
    nodes, per_node, num_layers, global_batch = generator.choice(SHAPES)
    machine, model = cluster(nodes, per_node), tiny_model(seed, num_layers=num_layers)
    training = TrainingSpec(global_batch=global_batch, seq_len=8)
    known = some_options(seed, (1, 2, 4) if num_layers == 1 else (1, 2))
    costs = SyntheticCosts(seed, known=known, jitter=generator.choice([0.0, 0.05]))
    plans = all_plans(model, machine, training, costs, known)
    cap = generator.choice(sorted({memory for _, _, memory in plans}))
    constraints = some_constraint(generator, model)
    try:
        constraints.resolve(model)
    except NoPlanFitsError:
        assert not any(meets(pipeline, constraints, model) for pipeline, _, _ in plans)
        constraints = Constraints()
    allowed = [entry for entry in plans if meets(entry[0], constraints, model)]
    for engine in ENGINES:
        check(engine, seed, Problem(model, machine, training, MADE, cap), costs, engine, plans)
        problem = Problem(model, machine, training, MADE, cap, constraints)
        check(f"{engine} with a constraint", seed, problem, costs, engine, allowed)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_best_blocks_of_unlike_sizes_are_found(engine):
    for kind in (f"{engine}, odd", f"{engine}, odd with a constraint"):
        if len(ratios[kind]) + len(wider[kind]) == 16:
            assert sum(ratio <= 1 + CLOSE for ratio in ratios[kind].values()) >= 0.97 * len(ratios[kind])


@pytest.mark.parametrize("kind", [*ENGINES, *(f"{engine} with a constraint" for engine in ENGINES)])
def test_the_best_plan_is_found_nearly_always(kind):
    """Unequal shares and pipelines of unlike stages leave gaps; they are shown, and rarely hide a better plan."""
    if len(ratios[kind]) + len(wider[kind]) == NUM_EQUAL:
        assert sum(ratio <= 1 + CLOSE for ratio in ratios[kind].values()) >= 0.97 * len(ratios[kind])
        assert all(ratio < 1.05 for ratio in ratios[kind].values() if ratio != float("inf"))


def test_the_engines_agree():
    """On the same instance both find the same objective, within their gaps."""
    for first, second in pairwise(ENGINES):
        for kind in ("", " with a constraint"):
            one, other = ratios[first + kind], ratios[second + kind]
            beyond, also = wider[first + kind], wider[second + kind]
            if len(one) + len(beyond) == len(other) + len(also) == NUM_EQUAL:
                assert one.keys() == other.keys()
                assert sum(abs(one[s] - other[s]) <= CLOSE or one[s] == other[s] for s in one) >= 0.97 * len(one)
            assert all(beyond[s] == pytest.approx(also[s], rel=CLOSE) for s in beyond.keys() & also.keys())


# Ranks of one node that are no power of two, the global batch, and sizes of blocks that are known.
ODD = [
    (3, 3, (1, 2)),
    (3, 2, (1, 2, 3)),
    (5, 5, (2, 3)),
    (5, 2, (2, 3, 5)),
    (5, 2, (1, 2, 3)),
    (6, 2, (1, 2)),
    (7, 7, (3, 4)),
    (7, 2, (3, 4, 7)),
    (7, 2, (2, 3, 7)),
    (7, 7, (1, 2)),
]


@pytest.mark.parametrize("seed", range(16))
def test_blocks_of_unlike_sizes_against_every_composition(seed):
    """4 + 3 and the like, on models that have any plan with the degrees that are known."""
    generator, plans, model = random.Random(seed), [], tiny_model(seed)
    while not plans:
        num_ranks, global_batch, sizes = generator.choice(ODD)
        machine, training = cluster(1, num_ranks), TrainingSpec(global_batch=global_batch, seq_len=8)
        known = some_options(generator.randrange(999), sizes)
        costs = SyntheticCosts(seed, known=known, jitter=generator.choice([0.0, 0.05]))
        plans = all_plans(model, machine, training, costs, known)
    cap = generator.choice(sorted({memory for _, _, memory in plans}))
    constraints = some_constraint(generator, model)
    try:
        constraints.resolve(model)
    except NoPlanFitsError:
        constraints = Constraints()
    allowed = [entry for entry in plans if meets(entry[0], constraints, model)]
    for engine in ENGINES:
        check(f"{engine}, odd", seed, Problem(model, machine, training, MADE, cap), costs, engine, plans)
        problem = Problem(model, machine, training, MADE, cap, constraints)
        check(f"{engine}, odd with a constraint", seed, problem, costs, engine, allowed)


@pytest.mark.parametrize("seed", range(4))
def test_stages_that_leave_their_domain_in_part(seed):
    """Nine ranks on nodes of five and four: of three stages one lies on both nodes, and is slower than the others."""
    generator, model = random.Random(seed), tiny_model(seed)
    machine = cluster(2, 5).model_copy(update={"missing": (generator.randrange(10),)})
    training, plans = TrainingSpec(global_batch=3, seq_len=8), []
    while not plans:
        known = some_options(generator.randrange(999), generator.choice([(1, 3), (2, 1)]))
        costs = SyntheticCosts(seed, known=known)
        plans = all_plans(model, machine, training, costs, known)
    any_degrees = Constraints(max_degrees=9)  # constraints keep the search to equal ranks
    for engine in ENGINES:
        check(
            f"{engine}, two nodes",
            seed,
            Problem(model, machine, training, MADE, None, any_degrees),
            costs,
            engine,
            plans,
        )


def plan_of(problem: Problem, costs, **words) -> Plan | None:
    try:
        return make_plan(problem, lambda *_: costs, objective="step-time", freedom="modules", **words)
    except NoPlanFitsError:
        return None


@pytest.mark.parametrize("seed", range(20))
def test_a_constraint_never_helps_and_memory_never_hurts(seed):
    generator = random.Random(seed)
    machine, model = cluster(2, 2), tiny_model(seed, num_layers=3)
    training = TrainingSpec(global_batch=4, seq_len=8)
    costs = SyntheticCosts(seed)
    roomy = plan_of(Problem(model, machine, training, MADE), costs)
    peak = roomy.predicted.peak_memory_bytes
    before = roomy.certificate.bound
    for cap in sorted({int(peak * generator.uniform(0.3, 1.0)) for _ in range(3)}, reverse=True):
        plan = plan_of(Problem(model, machine, training, MADE, cap), costs)
        if plan is None:
            break
        assert plan.certificate.objective_value >= before * (1 - CLOSE)
        before = plan.certificate.bound
    constraints = some_constraint(generator, model)
    constrained = plan_of(Problem(model, machine, training, MADE, None, constraints), costs)
    if constrained is not None:
        assert constrained.certificate.objective_value >= roomy.certificate.bound * (1 - 1e-9)
