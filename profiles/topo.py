"""What `nvidia-smi topo -m` prints, as a cluster: devices of a node, how they are joined, network cards beside them.

The devices are a graph whose edges are bonds of NVLinks.  Where it falls into several islands of equally many devices,
each joined to all others of its own, as bridged PCIe cards are, an island is a scale-up domain: blocks of it run over
NVLink, and only what crosses islands takes the slower path.  Else a whole node is one domain, as fast as its slowest
pair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import networkx

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

    def between(self, one: int, other: int) -> str:
        """The path of a pair."""
        return self.devices[one][other - (other > one)]

    def graph(self) -> networkx.Graph[int]:
        """Devices; NVLinks between them."""
        pairs = list(combinations(range(len(self.devices)), 2))
        graph: networkx.Graph[int] = networkx.empty_graph(len(self.devices))
        graph.add_edges_from(pair for pair in pairs if self.between(*pair).startswith("NV"))
        return graph

    def islands(self) -> list[list[int]]:
        """Scale-up domains: devices that NVLinks join each to each, if all devices lie in such groups of one size; else
        all devices together.
        """
        every = list(range(len(self.devices)))
        found = sorted(sorted(island) for island in networkx.connected_components(self.graph()))
        sizes = {len(island) for island in found}
        whole = all(self.between(*pair).startswith("NV") for island in found for pair in combinations(island, 2))
        return found if len(sizes) == 1 and whole and sizes != {1} else [every]

    def slowest(self, devices: Sequence[int]) -> str:
        """The worst path of any pair of these; fewer NVLinks are worse than more."""
        return _worst({self.between(*pair) for pair in combinations(devices, 2)})

    def slowest_across(self) -> str:
        """The worst path between islands."""
        islands = self.islands()
        pairs = ((i, j) for one, other in combinations(islands, 2) for i in one for j in other)
        return _worst({self.between(*pair) for pair in pairs})

    def near_cards(self) -> int:
        """Network cards on one PCIe switch with a device, the ones that serve it directly."""
        return sum(any(entry in NEAR for entry in row) for row in self.cards.values())


def _worst(entries: set[str]) -> str:
    far = [entry for entry in entries if entry in PATHS]
    if far:
        return max(far, key=PATHS.index)
    return min(entries, key=lambda entry: int(entry.removeprefix("NV")))


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

    Islands take places by their first device; between those of one node lies the slower of its own path and, if there
    are several nodes, the network.  Raises `BadInputError` when the table says nothing about links that the device has.
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
    islands = topology.islands()
    if len(islands) > 1:
        across = _link(topology, topology.slowest_across(), "slowest pair across islands", machine)
        if num_nodes == 1 or across.bytes_per_second < out.bytes_per_second:
            out = across
    together = len(islands[0])
    inside = machine.scale_up
    if together > 1:
        inside = _link(topology, _worst({topology.slowest(island) for island in islands}), "slowest pair", machine)
    return ClusterSpec(
        name=name,
        devices={device.name: device},
        nodes=(NodeGroup(count=num_nodes * len(islands), devices_per_node=together, device=device.name),),
        links={"scale_up": inside, "scale_out": out},
    )


def _link(topology: Topology, path: str, which: str, machine: Machine) -> Link:
    """A ring is as fast as its slowest pair."""
    kind = machine.device.name.split("-")[0]
    known = NVLINK_BYTES_PER_SECOND if path.startswith("NV") else PCIE_BYTES_PER_SECOND
    if kind not in known:
        raise BadInputError(
            f"{topology.path} has the path {path} between devices, for which no rate of {kind} is known "
            f"(known: {', '.join(known)}). Measure it (plait profile), or import nccl-tests."
        )
    source = f"nvidia-smi topo -m, {topology.path.name}: {which} {path}; datasheet rate per link, latency as shipped"
    links = int(path.removeprefix("NV")) if path.startswith("NV") else 0
    return Link(
        name=f"{links} NVLinks" if links else f"PCIe x16, {path}",
        bytes_per_second=(links or 1) * known[kind],
        latency_seconds=machine.scale_up.latency_seconds,
        source=source,
    )
