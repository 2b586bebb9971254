"""Clusters: ranks in node order, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from specs.base import first_problem
from specs.cluster import ClusterSpec

DEVICE = {
    "name": "a",
    "memory_bytes": 10,
    "memory_bytes_per_second": 1.0,
    "peak_flop_per_second": {"bf16": 1.0},
    "source": "s",
}
LINK = {"name": "l", "bytes_per_second": 1.0, "latency_seconds": 0.0, "source": "s"}


def cluster(*groups: tuple[int, int, str], **changes: Any) -> ClusterSpec:
    data = {
        "name": "c",
        "devices": {"a": DEVICE, "b": {**DEVICE, "name": "b"}},
        "nodes": [{"count": n, "devices_per_node": d, "device": device} for n, d, device in groups],
        "links": {"scale_up": LINK, "scale_out": LINK},
    }
    return ClusterSpec.model_validate({**data, **changes})


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.sampled_from("ab")), min_size=1, max_size=4))
def test_ranks_are_numbered_node_by_node(groups: list[tuple[int, int, str]]) -> None:
    """Oracle: the nodes laid out one by one."""
    built = cluster(*groups)
    nodes = [(size, device) for count, size, device in groups for _ in range(count)]
    devices = [device for size, device in nodes for _ in range(size)]
    assert built.num_nodes == len(nodes)
    assert built.num_devices == len(devices)
    assert [built.device_of(rank).name for rank in range(len(devices))] == devices
    starts = built.node_starts()
    assert [stop - start for start, stop in pairwise(starts)] == [size for size, _ in nodes]
    assert built.ranks() == tuple(range(len(devices)))
    with pytest.raises(ValueError, match="outside the cluster"):
        built.device_of(len(devices))


def test_missing_ranks_keep_their_numbers() -> None:
    built = cluster((2, 4, "a"), missing=[1, 6], slow={"3": 0.5})
    assert built.ranks() == (0, 2, 3, 4, 5, 7)
    assert built.num_devices == 8
    assert built.slow == {3: 0.5}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"nodes": [{"count": 1, "devices_per_node": 1, "device": "z"}]},
            "nodes name the device 'z', `devices` has: a, b",
        ),
        ({"links": {"scale_out": LINK}}, "links need the level scale_up"),
        ({"links": {"scale_up": LINK}}, "2 nodes need a link of level scale_out"),
        ({"missing": [8]}, "rank 8 is outside the cluster's 8 devices"),
        ({"missing": [-1]}, "rank -1 is outside the cluster's 8 devices"),
        ({"slow": {"9": 0.5}}, "rank 9 is outside the cluster's 8 devices"),
        ({"slow": {"1": 0}}, "slow.1: Input should be greater than 0"),
        ({"nodes": []}, "nodes: Tuple should have at least 1 item"),
        (
            {"nodes": [{"count": 0, "devices_per_node": 1, "device": "a"}]},
            "nodes.0.count: Input should be greater than 0",
        ),
        (
            {"nodes": [{"count": 10**6, "devices_per_node": 10**6, "device": "a"}]},
            "1,000,000,000,000 devices are more than 1,048,576",
        ),
        ({"devices": {}}, "devices: Dictionary should have at least 1 item"),
        ({"devices": {"a": {**DEVICE, "memory_bytes": -1}}}, "devices.a.memory_bytes: Input should be greater than 0"),
    ],
)
def test_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        cluster((2, 4, "a"), **changes)
    assert expected in first_problem(caught.value)


def test_one_node_needs_no_outer_link() -> None:
    assert cluster((1, 4, "a"), links={"scale_up": LINK}).num_nodes == 1
