"""The devices and links of the machines that a profile saw, as a cluster."""

from __future__ import annotations

import os
import time

import torch

from executor.device import device_name
from specs.cluster import ClusterSpec, Device, Link, LinkLevel, NodeGroup, Precision
from specs.profile import CollectiveTiming

GEMM_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}


def _seconds(device: torch.device, call, repetitions: int) -> float:  # type: ignore[no-untyped-def]
    """Best of some repetitions."""
    best = float("inf")
    for _ in range(repetitions):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def measured_device(device: torch.device, precision: Precision, local_size: int) -> Device:
    """This rank's device with its best matrix rate and copy bandwidth, measured here."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    n = GEMM_SIZE[device.type]
    a, b = (torch.ones((n, n), dtype=dtype, device=device) for _ in range(2))
    matmul = _seconds(device, lambda: a @ b, 5)
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    copy = _seconds(device, lambda: target.copy_(source), 5)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_size
    return Device(
        name=device_name(device),
        kind="gpu" if device.type == "cuda" else "cpu",
        memory_bytes=memory,
        memory_bytes_per_second=2 * source.numel() * 4 / copy,
        peak_flop_per_second={precision: 2 * n**3 / matmul},
        source=f"measured: best of 5 products of {n} x {n} matrices and copies of {COPY_BYTES[device.type] >> 20} MiB",
    )


def seen_cluster(
    device: Device, collectives: tuple[CollectiveTiming, ...], *, world_size: int, local_size: int
) -> ClusterSpec:
    """Nodes and links as measured; a link's rate is that of its largest transfer, its latency the smallest's time."""
    links: dict[LinkLevel, Link] = {}
    for level in ("scale_up", "scale_out"):
        transfers = sorted(
            (c.payload_bytes, c.timing.mean_seconds)
            for c in collectives
            if c.op == "point_to_point" and c.level == level
        )
        if transfers:
            size, seconds = transfers[-1]
            links[level] = Link(
                name=f"measured {level}",
                bytes_per_second=size / seconds,
                latency_seconds=transfers[0][1],
                source="measured: sends between two ranks, smallest and largest payload",
            )
    if "scale_up" not in links:
        links["scale_up"] = Link(
            name="none",
            bytes_per_second=device.memory_bytes_per_second,
            latency_seconds=0.0,
            source="one rank per node: no link inside a node was measured; the device's memory bandwidth",
        )
    return ClusterSpec(
        name=f"{world_size} x {device.name}",
        devices={device.name: device},
        nodes=(NodeGroup(count=world_size // local_size, devices_per_node=local_size, device=device.name),),
        links=links,
    )
