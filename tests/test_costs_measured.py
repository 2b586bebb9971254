"""Costs from a profile: exact where measured, interpolated between, refused where nothing is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.flops import forward_flop, largest_units, score_flop
from cost_models.interface import CostModel
from cost_models.interpolate import log_log
from cost_models.measured import ACTIVATION_SHARE
from cost_models.sources import measured_costs
from cost_models.stragglers import expected_maximum
from specs.errors import BadInputError
from specs.layout import Interval
from specs.model import Attention, Mlp
from specs.plan import TrainingSpec
from specs.profile import OverlapTiming
from tests.plans import cluster, tiny_model
from tests.profiles import WORLD_SIZE, profile, timing

MODEL = tiny_model()
CLUSTER = cluster(4, kind="cpu")
TRAINING = TrainingSpec(global_batch=8, seq_len=32, precision="fp32")
MLP = Mlp(hidden=64, ffn=256)
ATTENTION = Attention(hidden=64, num_heads=8, num_kv_heads=4, head_dim=8)


@pytest.fixture(scope="module")
def costs() -> CostModel:
    return measured_costs(profile(MODEL, CLUSTER), TRAINING, CLUSTER)


def test_measured_point_is_returned(costs: CostModel) -> None:
    cost = costs.module(MLP, degree=2, block_tokens=64, seq_len=32, recompute="none", level="scale_up")
    assert cost.forward_seconds == pytest.approx(32e-6)
    assert cost.backward_seconds == pytest.approx(64e-6)
    assert cost.forward_communication_seconds == pytest.approx(3.2e-6)
    assert cost.backward_communication_seconds == pytest.approx(6.4e-6)
    assert not cost.estimated


@given(st.integers(32, 256))
def test_proportional_times_interpolate_exactly(tokens: int) -> None:
    costs = measured_costs(profile(MODEL, CLUSTER), TRAINING, CLUSTER)
    cost = costs.module(MLP, degree=1, block_tokens=tokens, seq_len=32, recompute="none", level="scale_up")
    assert cost.forward_seconds == pytest.approx(1e-6 * tokens)


def test_beyond_the_range_is_marked_then_refused(costs: CostModel) -> None:
    def at(tokens: int) -> bool:
        return costs.module(
            MLP, degree=1, block_tokens=tokens, seq_len=32, recompute="none", level="scale_up"
        ).estimated

    assert not at(256)
    assert at(512)
    assert at(16)
    with pytest.raises(BadInputError, match=r"513 tokens was not measured, the profile has 32 to 256"):
        at(513)


def test_recomputation(costs: CostModel) -> None:
    options = {"degree": 2, "block_tokens": 64, "seq_len": 32, "level": "scale_up"}
    none = costs.module(ATTENTION, recompute="none", **options)
    full = costs.module(ATTENTION, recompute="full", **options)
    selective = costs.module(ATTENTION, recompute="selective", **options)
    assert full.seconds == pytest.approx(
        none.seconds + none.forward_seconds + none.forward_communication_seconds, rel=1e-12
    )
    units = largest_units(ATTENTION, 2)
    share = score_flop(ATTENTION, 64, 32, units) / forward_flop(ATTENTION, block_tokens=64, seq_len=32, units=units)
    assert selective.seconds == pytest.approx(none.seconds + share * none.forward_seconds)


def test_selective_recomputation_of_an_mlp_is_not_free(costs: CostModel) -> None:
    options = {"degree": 2, "block_tokens": 64, "seq_len": 32, "level": "scale_up"}
    none = costs.module(MLP, recompute="none", **options)
    selective = costs.module(MLP, recompute="selective", **options)
    assert selective.seconds == pytest.approx(none.seconds + ACTIVATION_SHARE * none.forward_seconds)
    assert selective.estimated


def test_smaller_share_computes_less(costs: CostModel) -> None:
    options = {"degree": 2, "block_tokens": 64, "seq_len": 32, "recompute": "none", "level": "scale_up"}
    even = costs.module(MLP, **options)
    small = costs.module(MLP, units=Interval(0, 64), **options)
    assert small.forward_seconds == pytest.approx(even.forward_seconds / 2)
    assert small.forward_communication_seconds == even.forward_communication_seconds


def test_collectives_and_optimizer(costs: CostModel) -> None:
    assert costs.collective("all_reduce", num_ranks=4, payload_bytes=65536, level="scale_up") == pytest.approx(
        65.536e-6
    )
    assert costs.collective("all_reduce", num_ranks=1, payload_bytes=65536, level="scale_up") == 0.0
    assert costs.optimizer(5000) == pytest.approx(5e-6)
    assert costs.optimizer(0) == 0.0


def test_jitter_is_what_ranks_differ_by_in_a_step() -> None:
    """Spread between ranks at degree 1, where no rank waits for another inside a module."""
    shaky = profile(MODEL, CLUSTER, spread=0.04)
    assert measured_costs(shaky, TRAINING, CLUSTER).jitter == pytest.approx(0.04)
    older = [
        timing.model_copy(
            update={"forward": timing.forward.model_copy(update={"skew_seconds": None, "rank_spread": 0.06})}
        )
        for timing in shaky.modules
    ]
    costs = measured_costs(shaky.model_copy(update={"modules": tuple(older)}), TRAINING, CLUSTER)
    assert costs.jitter == pytest.approx(0.03 / expected_maximum(WORLD_SIZE))


def overlap_timing(*, sharded: bool, sync: float, backward: float, apart: float, beside: float) -> OverlapTiming:
    return OverlapTiming(
        sharded=sharded,
        sync_seconds=sync,
        backward_seconds=backward,
        apart=timing(apart),
        overlapped=timing(beside),
    )


def test_hidden_gradient_sync_is_measured_on_gpus() -> None:
    on_gpus = cluster(4, kind="gpu")
    bare = profile(MODEL, on_gpus)
    guessed = measured_costs(bare, TRAINING, on_gpus)
    assert guessed.estimated
    assert guessed.reserved_bytes > 2**30
    # sums take 4 beside a backward pass of 10: steps of 20 become 17, so three quarters hide
    summed = overlap_timing(sharded=False, sync=4.0, backward=10.0, apart=20.0, beside=17.0)
    # scattering takes 12, which 10 of backward cannot hide: half of that is gained
    scattered = overlap_timing(sharded=True, sync=12.0, backward=10.0, apart=30.0, beside=25.0)
    whole = bare.model_copy(update={"overlaps": (summed, scattered), "reserved_bytes": 7})
    costs = measured_costs(whole, TRAINING, on_gpus)
    assert not costs.estimated
    assert costs.reserved_bytes == 7
    assert costs.exposed_gradient_sync(4.0, 10.0) == pytest.approx(1.0)
    assert costs.exposed_gradient_sync(12.0, 10.0, sharded=True) == pytest.approx(7.0)
    slower = whole.model_copy(update={"overlaps": (summed.model_copy(update={"overlapped": timing(21.0)}),)})
    assert measured_costs(slower, TRAINING, on_gpus).exposed_gradient_sync(4.0, 10.0) == 4.0
    # On CPUs the executor sums after backward, whatever overlap would bring.
    on_cpus = profile(MODEL, CLUSTER).model_copy(update={"overlaps": (summed,)})
    assert measured_costs(on_cpus, TRAINING, CLUSTER).exposed_gradient_sync(4.0, 10.0) == 4.0


def test_what_was_never_measured_is_refused(costs: CostModel) -> None:
    with pytest.raises(BadInputError, match=r"no all_reduce over 8 ranks .*\[2, 3, 4\].*plait profile"):
        costs.collective("all_reduce", num_ranks=8, payload_bytes=4, level="scale_up")
    with pytest.raises(BadInputError, match=r"mlp \(hidden 64, ffn 100\) at degree 1.*plait profile"):
        costs.module(Mlp(hidden=64, ffn=100), degree=1, block_tokens=64, seq_len=32, recompute="none", level="scale_up")
    with pytest.raises(BadInputError, match=r"at degree 3.*degrees \[1, 2, 4\]"):
        costs.module(MLP, degree=3, block_tokens=64, seq_len=32, recompute="none", level="scale_up")
    with pytest.raises(BadInputError, match="one node"):
        costs.module(MLP, degree=2, block_tokens=64, seq_len=32, recompute="none", level="scale_out")


def test_profile_of_other_devices_is_refused() -> None:
    other = cluster(4, kind="cpu")
    renamed = other.model_copy(
        update={
            "devices": {"other": other.devices["test device"].model_copy(update={"name": "other"})},
            "nodes": tuple(group.model_copy(update={"device": "other"}) for group in other.nodes),
        }
    )
    with pytest.raises(BadInputError, match=r"measured on test device, the cluster .* has other"):
        measured_costs(profile(MODEL, CLUSTER), TRAINING, renamed)


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1e-6, 1.0)), min_size=1, max_size=8), st.floats(0.5, 2e6))
def test_log_log_stays_between_its_neighbours(points: list[tuple[float, float]], x: float) -> None:
    table = dict(points)
    xs = sorted(table)
    ys = [table[key] for key in xs]
    y = log_log(xs, ys, x)
    if x <= xs[0]:
        assert y == ys[0]
    elif x >= xs[-1]:
        assert y == pytest.approx(ys[-1] * x / xs[-1])
    else:
        left = max(i for i, key in enumerate(xs) if key <= x)
        low, high = sorted((ys[left], ys[min(left + 1, len(ys) - 1)]))
        assert low * (1 - 1e-9) <= y <= high * (1 + 1e-9)
