"""Costs from shipped device data: physical limits and orders that must hold whatever the constants are."""

from __future__ import annotations

import pytest

from cost_models.collectives import curves
from cost_models.device import efficiencies
from cost_models.flops import forward_flop, largest_units
from cost_models.sources import device_costs
from specs.cluster import ClusterSpec
from specs.errors import BadInputError
from specs.model import Attention, Mlp, Module
from specs.plan import TrainingSpec
from specs.presets import load_cluster, machines
from tests.plans import cluster

TRAINING = TrainingSpec(global_batch=64, seq_len=4096)
MLP = Mlp(hidden=8192, ffn=28672)
ATTENTION = Attention(hidden=8192, num_heads=64, num_kv_heads=8, head_dim=128)


def shipped(name: str) -> ClusterSpec:
    return load_cluster(f"{name}x{2 * machines()[name].devices_per_node}")


@pytest.mark.parametrize("name", sorted(machines()))
def test_every_shipped_machine_is_priced_under_its_peak(name: str) -> None:
    spec = shipped(name)
    costs = device_costs(spec, TRAINING)
    peak = spec.device_of(0).peak_flop_per_second["bf16"]
    for module in (MLP, ATTENTION):
        cost = costs.module(module, degree=1, block_tokens=8192, seq_len=4096, recompute="none", level="scale_up")
        flop = forward_flop(module, block_tokens=8192, seq_len=4096, units=largest_units(module, 1))
        assert 0.25 < flop / peak / cost.forward_seconds < 0.95
        assert 1.5 < cost.backward_seconds / cost.forward_seconds < 3.5
        assert cost.estimated


def test_every_shipped_efficiency_belongs_to_a_machine() -> None:
    assert set(efficiencies()) == {machine.device.name for machine in machines().values()}
    assert {entry.collective_curves for entry in efficiencies().values()} - {None} == set(curves())


@pytest.mark.parametrize("module", [MLP, ATTENTION], ids=["mlp", "attention"])
def test_more_ranks_compute_less_and_talk_more(module: Module) -> None:
    costs = device_costs(shipped("h100"), TRAINING)
    by_degree = [
        costs.module(
            module, degree=d, block_tokens=4096 * d, seq_len=4096, recompute="none", level="scale_up"
        ).forward_communication_seconds
        for d in (1, 2, 4, 8)
    ]
    assert by_degree[0] == 0.0
    assert by_degree == sorted(by_degree)


def test_slower_links_cost_more() -> None:
    costs = device_costs(shipped("h100"), TRAINING)
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        inside = costs.collective(op, num_ranks=8, payload_bytes=2**28, level="scale_up")
        across = costs.collective(op, num_ranks=8, payload_bytes=2**28, level="scale_out")
        side_by_side = costs.collective(op, num_ranks=16, payload_bytes=2**28, level="scale_out", ranks_per_domain=8)
        assert inside < side_by_side < across


def test_measured_curve_is_returned() -> None:
    """A row of the published table: H100, all-reduce of 1 GiB over 8 ranks."""
    costs = device_costs(shipped("h100"), TRAINING)
    assert costs.collective("all_reduce", num_ranks=8, payload_bytes=2**30, level="scale_up") == pytest.approx(
        4.721e-3, rel=1e-3
    )


def test_what_is_not_shipped_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"no shipped data for the device 'test device' .*H100.*plait profile"):
        device_costs(cluster(8), TRAINING)
    with pytest.raises(BadInputError, match="unknown software stack 'none'"):
        device_costs(shipped("h100"), TRAINING, stack="none")
    with pytest.raises(BadInputError, match="A100-80G has no shipped data for fp8"):
        device_costs(shipped("a100"), TRAINING.model_copy(update={"precision": "fp8"}))


def test_stacks_differ_by_what_they_overlap() -> None:
    """Nothing is hidden by `plain`; a sharded optimizer's collectives by `megatron` but not by `plait`."""
    by_stack = {name: device_costs(shipped("h100"), TRAINING, stack=name) for name in ("plain", "plait", "megatron")}

    def left(name: str, *, sharded: bool, backward: float = 10.0) -> float:
        return by_stack[name].exposed_gradient_sync(1.0, backward, sharded=sharded)

    assert left("plain", sharded=False) == left("plait", sharded=True) == 1.0
    assert 0.0 < left("plait", sharded=False) < 1.0
    assert left("megatron", sharded=True) == left("megatron", sharded=False) < 1.0
    assert left("megatron", sharded=True, backward=0.1) > 0.9
    communication = [
        by_stack[name]
        .module(MLP, degree=8, block_tokens=8192, seq_len=4096, recompute="none", level="scale_up")
        .forward_communication_seconds
        for name in ("megatron", "plait")
    ]
    assert communication[0] < communication[1]
