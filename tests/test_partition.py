"""Cutting the chain into stages, against complete enumeration."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.pipeline import simulate
from planner.chain import even_boundaries, make_chain
from planner.constraints import Constraints
from planner.partition import StageValues, best_partition
from planner.paths import PipelineShape, pipeline_bound
from planner.quick_bounds import filled
from planner.space import Grid, Topology, divisors, enumerate_grids, variants
from planner.windows import Least, all_runs, possible_runs
from specs.cluster import ClusterSpec, Device, Link, NodeGroup
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec
from specs.plan import TrainingSpec
from specs.schedule import most_held, pipeline_actions


def finish_with_once(shape, forward, backward, weight, once):
    """When the last stage is done, each having `once` seconds to go after its own last action."""
    whole = [b + w for b, w in zip(backward, weight, strict=True)]
    timing = simulate(shape.schedule, forward, whole, shape.transfers, shape.num_micro_batches, weight_seconds=weight)
    return max(finish + more for finish, more in zip(timing.finish_seconds, once, strict=True))


def values_of(shape, stage, forward, backward, weight, once):
    """What the partition needs of a stage whose contents have one option each."""
    once = once + weight * (min(stage + 1, shape.num_micro_batches) if shape.schedule == "zb-h1" else 0)
    with_once = once if stage == 0 else 0.0
    paths = shape.paths(stage)
    total = forward + backward
    return StageValues.of(
        paths,
        [path.forward * forward + path.backward * backward + path.weight * weight + with_once for path in paths],
        alone=total,
        total=total,
        ending=total + once,
        once=np.zeros_like(once) if stage == 0 else once,
        forward=forward,
        weight=weight,
        first=once if stage == 0 else np.zeros_like(once),
    )


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    st.integers(0, 2**32 - 1),
)
def test_best_partition_bounds_all_partitions(num_stages, extra, num_micro_batches, transfer, schedule, seed):
    size = num_stages + extra + 1
    generator = np.random.default_rng(seed)
    contents = np.full((size, size), -1)
    starts, stops = np.triu_indices(size, k=1)
    contents[starts, stops] = np.arange(len(starts))
    shape = PipelineShape(num_stages, num_micro_batches, (transfer,) * (num_stages - 1), schedule)
    stages = []
    for _ in range(num_stages):
        forward, backward, once = generator.integers(1, 12, (3, len(starts))).astype(float)
        forward[generator.random(len(starts)) < 0.15] = np.inf
        weight = generator.integers(0, 12, len(starts)) * float(schedule == "zb-h1")
        stages.append((forward, backward, weight, once * generator.choice([0.0, 0.5, 4.0])))
    values = [values_of(shape, stage, *of_stage) for stage, of_stage in enumerate(stages)]
    best = np.inf
    for inner in combinations(range(1, size - 1), num_stages - 1):
        runs = [contents[i, j] for i, j in pairwise((0, *inner, size - 1))]
        forward, backward, weight, once = zip(
            *([v[run] for v in of] for of, run in zip(stages, runs, strict=True)), strict=True
        )
        if np.isfinite(forward).all():
            best = min(best, finish_with_once(shape, forward, backward, weight, once))
    runs = [all_runs(contents)] * num_stages
    found = best_partition(shape, runs, values, below=1e6, accuracy=1e-6)
    if not np.isfinite(best):
        assert found is None
        return
    assert found.bound <= best * (1 + 1e-9)
    assert found.bound >= best * 0.6
    assert found.path[0] == 0
    assert found.path[-1] == size - 1
    if num_stages == 1:
        assert found.bound == pytest.approx(best, rel=1e-5)
    assert best_partition(shape, runs, values, below=found.bound * 0.99, accuracy=1e-6) is None


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    st.floats(1.0, 1.3),
    st.integers(0, 2**32 - 1),
)
def test_no_partition_within_a_limit_is_left_out(num_stages, extra, num_micro_batches, transfer, schedule, more, seed):
    size = num_stages + extra + 1
    generator = np.random.default_rng(seed)
    by_module = generator.integers(1, 12, (3, size - 1)).astype(float)
    by_module[2] *= schedule == "zb-h1"
    contents = np.full((size, size), -1)
    starts, stops = np.triu_indices(size, k=1)
    contents[starts, stops] = np.arange(len(starts))
    along = np.concatenate([np.zeros((3, 1)), by_module.cumsum(axis=1)], axis=1)
    forward, backward, weight = along[:, stops] - along[:, starts]
    shape = PipelineShape(num_stages, num_micro_batches, (transfer,) * (num_stages - 1), schedule)
    partitions = {}
    for inner in combinations(range(1, size - 1), num_stages - 1):
        path = (0, *inner, size - 1)
        own = [contents[i, j] for i, j in pairwise(path)]
        seconds = (of[own].tolist() for of in (forward, backward, weight))
        partitions[path] = finish_with_once(shape, *seconds, [0.0] * num_stages)
    below = more * min(partitions.values())
    both = forward + backward
    runs = possible_runs(shape, contents, Least(forward, backward, both, weight, both), below)
    possible = [set(zip(own.starts.tolist(), own.stops.tolist(), strict=True)) for own in runs]
    for path, finish in partitions.items():
        if finish <= below:
            assert all(run in of for run, of in zip(pairwise(path), possible, strict=True))
    every = possible_runs(shape, contents, Least(forward, backward, both, weight, both), 0.5 * both.max())
    assert every is None


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.1, 3.0), st.floats(0.0, 0.5)), min_size=1, max_size=6),
    st.integers(1, 20),
    st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    st.floats(0.0, 1.0),
)
def test_pipeline_bound_is_never_above_the_simulation(stages, num_micro_batches, schedule, part):
    forward, backward, transfers = zip(*stages, strict=True)
    weight = [part * b if schedule == "zb-h1" else 0.0 for b in backward]
    inputs = [b - w for b, w in zip(backward, weight, strict=True)]
    shape = PipelineShape(len(stages), num_micro_batches, transfers[1:], schedule)
    timing = simulate(schedule, forward, backward, transfers[1:], num_micro_batches, weight_seconds=weight)
    exact = timing.finish_seconds[0]
    bound = pipeline_bound(shape, forward, inputs, weight)
    assert bound <= exact * (1 + 1e-9)
    if len(stages) == 1 or schedule == "gpipe":
        assert bound == pytest.approx(exact)


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(8, 8), (8, 64), (16, 32), (32, 96)])
def test_pipeline_bound_is_close_for_stages_nearly_alike(num_stages, num_micro_batches):
    generator = np.random.default_rng(num_micro_batches)
    for _ in range(10):
        forward = generator.uniform(1.0, 1.1, num_stages)
        backward = forward * generator.uniform(1.9, 2.6, num_stages)
        shape = PipelineShape(num_stages, num_micro_batches, (0.03,) * (num_stages - 1), "1f1b")
        exact = simulate("1f1b", forward, backward, shape.transfers, num_micro_batches).makespan_seconds
        assert pipeline_bound(shape, forward, backward) >= 0.99 * exact


@pytest.mark.parametrize("num_micro_batches", [4, 5, 32])
@pytest.mark.parametrize(("schedule", "weight"), [("1f1b", 0.0), ("zb-h1", 1.0)])
def test_pipeline_bound_is_exact_for_equal_stages(num_micro_batches, schedule, weight):
    shape = PipelineShape(4, num_micro_batches, (0.0,) * 3, schedule)
    own = {"weight_seconds": [weight] * 4}
    exact = simulate(schedule, [1.0] * 4, [2.0] * 4, [0.0] * 3, num_micro_batches, **own).finish_seconds[0]
    assert pipeline_bound(shape, [1.0] * 4, [2.0 - weight] * 4, [weight] * 4) == pytest.approx(exact)


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_what_a_stage_holds_is_what_its_actions_hold(num_stages):
    for schedule in ("1f1b", "gpipe", "zb-h1"):
        for m in (1, 2, 4, 7, 12):
            grid = Grid(num_stages, 1, 1, 1, m, schedule, 0)
            for stage, actions in enumerate(pipeline_actions(schedule, num_stages=num_stages, num_micro_batches=m)):
                expected = {(held.kept[0], held.deferred[0]) for held in most_held(actions)}
                assert set(grid.flights(stage)) == expected


def model(num_layers):
    attention = Attention(hidden=8, num_heads=2, num_kv_heads=2, head_dim=4)
    return ModelSpec(
        name="m",
        embedding=Embedding(hidden=8, vocab=11),
        layers=(
            Layer(attention=attention, feed_forward=Mlp(hidden=8, ffn=16), repeat=num_layers),
            Layer(attention=attention),
        ),
        head=Head(hidden=8, vocab=11),
    )


def test_contents_are_counted_not_named():
    chain = make_chain(model(3))
    assert chain.positions == (0, 1, 3, 5, 7, 8, 9)
    assert chain.contents[1, 2] == chain.contents[2, 3] != chain.contents[1, 3]
    for i in range(chain.num_positions):
        for j in range(i + 1, chain.num_positions):
            run = chain.kinds[chain.positions[i] : chain.positions[j]]
            expected = [run.count(kind) for kind in range(len(chain.modules))]
            assert chain.counts[chain.contents[i, j]].tolist() == expected
    assert make_chain(model(3), "modules").positions == tuple(range(10))
    fixed = Constraints(stages="0,1-3").resolve(model(3))
    assert make_chain(model(3), rules=fixed).positions == (0, fixed.boundaries[1], 9)


def test_even_boundaries():
    assert even_boundaries(model(3), 2) == (0, 5, 9)
    assert even_boundaries(model(3), 4) == (0, 3, 5, 7, 9)
    assert even_boundaries(model(3), 5) is None


def cluster(*sizes, missing=()):
    device = Device(name="d", memory_bytes=1, memory_bytes_per_second=1, peak_flop_per_second={}, source="test")
    link = Link(name="l", bytes_per_second=1, latency_seconds=0, source="test")
    return ClusterSpec(
        name="c",
        devices={"d": device},
        nodes=tuple(NodeGroup(count=1, devices_per_node=size, device="d") for size in sizes),
        links={"scale_up": link, "scale_out": link},
        missing=missing,
    )


def test_run_levels_follow_the_domains():
    topology = Topology(cluster(4, 4, missing=(0,)))
    assert topology.num_ranks == 7
    assert topology.domain == 4
    assert topology.block_level(1) == "scale_up"
    assert topology.block_level(2) == "scale_out"
    assert Topology(cluster(6, 6)).block_level(3) == "scale_up"
    assert Topology(cluster(6, 6)).block_level(4) == "scale_out"
    assert topology.span(np.array([0, 1, 3, 4])) == (4, "scale_out", 2)
    assert topology.span(np.array([3, 4])) == (2, "scale_up", 2)


def test_grids_use_every_rank_and_divide_the_batch():
    training = TrainingSpec(global_batch=12, seq_len=8)
    grids = list(enumerate_grids(Topology(cluster(4, 4)), training, max_stages=4, max_ranks_per_stage=4))
    assert len(set(grids)) == len(grids)
    for grid in grids:
        assert grid.num_stages * grid.num_ranks * grid.num_replicas == 8
        assert grid.num_replicas * grid.micro_batch * grid.num_micro_batches == 12
        assert grid.num_stages <= 4 >= grid.num_ranks
    assert {(g.num_stages, g.num_ranks) for g in grids} == {(1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)}
    for grid in grids:
        assert grid in variants(grid)
        orders = 2 if grid.num_stages > 1 and grid.num_replicas > 1 else 1
        assert len(variants(grid)) == (orders if grid.zero > 1 else 2 * orders)
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
def test_no_cut_fills_and_drains_a_pipeline_faster(seed, schedule):
    generator = np.random.default_rng(seed)
    num_stages, m = int(generator.integers(1, 7)), int(generator.integers(1, 12))
    f, b = generator.uniform(0.0, 1.0, (2, num_stages))
    weight = generator.uniform(0.0, 1.0, num_stages) if schedule == "zb-h1" else np.zeros(num_stages)
    if generator.random() < 0.5:  # the cut that the bound is exact for
        f = b = (1.0 - 1.0 / m) ** np.arange(num_stages)
    transfers = [0.0] * (num_stages - 1)
    split = weight.tolist() if schedule == "zb-h1" else []
    timing = simulate(schedule, f.tolist(), (b + weight).tolist(), transfers, m, weight_seconds=split)
    least = float((f + b).sum()) * filled(num_stages, m)
    assert least <= timing.makespan_seconds * (1 + 1e-9)
