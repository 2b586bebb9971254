"""What `nvidia-smi topo -m` prints, as a cluster: devices of a node, their slowest path, network cards beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specs.cluster import ClusterSpec, Link, NodeGroup
from specs.errors import BadInputError
from specs.presets import Machine

# Bytes per second and direction of one NVLink, by generation of the device.       [NVIDIA datasheets]
NVLINK_BYTES_PER_SECOND = {"A100": 25e9, "H100": 25e9, "H200": 25e9, "B200": 50e9, "B300": 50e9}
# PCIe x16 per direction: 32 GB/s in generation 4, 64 GB/s in 5; before protocol overhead.
PCIE_BYTES_PER_SECOND = {"A100": 32e9, "A10G": 32e9, "L40S": 32e9, "H100": 64e9, "H200": 64e9, "B200": 64e9}
# From near to far; an entry NV12 is a bond of 12 NVLinks.
PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")
NEAR = ("PIX", "PXB")


@dataclass(frozen=True, slots=True)
class Topology:
    """Paths between devices (row by row, without themselves) and from network cards to devices."""

    path: Path
    devices: tuple[tuple[str, ...], ...]
    cards: dict[str, tuple[str, ...]]

    def slowest(self) -> str:
        """The worst path of any pair; fewer NVLinks are worse than more."""
        entries = {entry for row in self.devices for entry in row}
        far = [entry for entry in entries if entry in PATHS]
        if far:
            return max(far, key=PATHS.index)
        return min(entries, key=lambda entry: int(entry.removeprefix("NV")))

    def near_cards(self) -> int:
        """Network cards on one PCIe switch with a device, the ones that serve it directly."""
        return sum(any(entry in NEAR for entry in row) for row in self.cards.values())


def read_topology(path: Path) -> Topology:
    """Raises `BadInputError` for a file that is not that table."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}. Check the path.") from None
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), None)
    if header is None:
        raise BadInputError(f"{path} is not what `nvidia-smi topo -m` prints (no line of GPU0, GPU1, ...).")
    count = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in header)
    rows = {words[0]: words[1 : count + 1] for words in lines if words and re.fullmatch(r"(GPU|NIC|mlx)\w*", words[0])}
    devices = []
    for index in range(count):
        row = rows.get(f"GPU{index}", [])
        if len(row) != count or row[index] != "X":
            raise BadInputError(f"{path}: the line of GPU{index} is missing or short. Give the table unchanged.")
        devices.append(tuple(entry for place, entry in enumerate(row) if place != index))
    for entry in {entry for row in devices for entry in row}:
        if entry not in PATHS and not re.fullmatch(r"NV[1-9]\d*", entry):
            raise BadInputError(f"{path}: unknown path {entry!r} between devices. Known: {', '.join(PATHS)}, NV#.")
    cards = {name: tuple(row) for name, row in rows.items() if not name.startswith("GPU") and len(row) == count}
    return Topology(path, tuple(devices), cards)


def cluster_of(
    topology: Topology, name: str, machine: Machine, *, num_nodes: int, card_gigabits: float | None
) -> ClusterSpec:
    """`num_nodes` such nodes of a shipped device.  `card_gigabits` None: the device's usual network.

    Raises `BadInputError` when the table says nothing about links that the device has.
    """
    size, device = len(topology.devices), machine.device
    out = machine.scale_out
    if card_gigabits is not None:
        cards = topology.near_cards()
        if not cards:
            raise BadInputError(f"{topology.path} has no network card beside a device. Leave --card-gigabits away.")
        out = Link(
            name=f"{cards} cards of {card_gigabits:g} Gbit/s for {size} devices",
            bytes_per_second=cards * card_gigabits * 1e9 / 8 / size,
            latency_seconds=out.latency_seconds,
            source=f"nvidia-smi topo -m, {topology.path.name}: cards on a device's PCIe switch; latency as shipped",
        )
    return ClusterSpec(
        name=name,
        devices={device.name: device},
        nodes=(NodeGroup(count=num_nodes, devices_per_node=size, device=device.name),),
        links={"scale_up": _scale_up(topology, machine) if size > 1 else machine.scale_up, "scale_out": out},
    )


def _scale_up(topology: Topology, machine: Machine) -> Link:
    """A ring over all devices is as fast as its slowest pair."""
    slowest, kind = topology.slowest(), machine.device.name.split("-")[0]
    known = NVLINK_BYTES_PER_SECOND if slowest.startswith("NV") else PCIE_BYTES_PER_SECOND
    if kind not in known:
        raise BadInputError(
            f"{topology.path} has the path {slowest} between devices, for which no rate of {kind} is known "
            f"(known: {', '.join(known)}). Measure it (plait profile), or import nccl-tests."
        )
    source = (
        f"nvidia-smi topo -m, {topology.path.name}: slowest pair {slowest}; datasheet rate per link, latency as shipped"
    )
    if slowest.startswith("NV"):
        links = int(slowest.removeprefix("NV"))
        return machine.scale_up.model_copy(
            update={"name": f"{links} NVLinks", "bytes_per_second": links * known[kind], "source": source}
        )
    return Link(
        name=f"PCIe x16, {slowest}",
        bytes_per_second=known[kind],
        latency_seconds=machine.scale_up.latency_seconds,
        source=source,
    )
