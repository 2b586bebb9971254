"""Models and clusters that ship with Plait, and the one way every command finds the model or cluster it was given.

A model is a preset name, a model file, or a Hugging Face `config.json` (or a folder that holds one).  A cluster
is a preset name such as `h100x64`, a cluster file, or a profile (the cluster that it was measured on).
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import NamedTuple

from pydantic import PositiveInt

from specs.base import Spec, parse, parse_document, read_json
from specs.cluster import MAX_DEVICES, ClusterSpec, Device, Link, NodeGroup
from specs.errors import BadInputError
from specs.huggingface import model_from_config
from specs.model import ModelSpec
from specs.profile import Profile

PRESETS = Path(__file__).parent / "presets"
MACHINES = PRESETS / "machines.json"
MODEL_NAMES = tuple(sorted(path.stem for path in PRESETS.glob("*.json") if path != MACHINES))


class Machine(Spec):
    """One kind of node (or NVLink domain): `devices_per_node` of a device, and the links inside and between."""

    devices_per_node: PositiveInt
    device: Device
    scale_up: Link
    scale_out: Link

    @property
    def partial_nodes(self) -> bool:
        """Racks of many trays can be filled in part; a server of 8 is bought whole."""
        return self.devices_per_node > 8


class ClusterName(NamedTuple):
    """`h100x64` in parts."""

    machine: str
    num_devices: int


def machines() -> dict[str, Machine]:
    """The shipped kinds of node by their name in cluster presets ("h100")."""
    data = read_json(MACHINES, "machine table")
    assert isinstance(data, dict)
    return {name: Machine.model_validate(row) for name, row in data.items()}


def model_preset(name: str) -> ModelSpec:
    """A shipped model.  Raises `BadInputError` that lists the known names."""
    if name not in MODEL_NAMES:
        raise BadInputError(
            f"unknown model {name!r}{_closest(name, MODEL_NAMES)} Known: {', '.join(MODEL_NAMES)}; or give a model "
            "file, or a Hugging Face config.json."
        )
    path = PRESETS / f"{name}.json"
    return parse(ModelSpec, read_json(path, "model"), f"model {path}")


def load_model(text: str) -> ModelSpec:
    """The model that a user named: a preset, else a model file, a `config.json` or a folder that holds one.

    Raises `BadInputError` with what is known or what is wrong with the file.
    """
    if text in MODEL_NAMES:
        return model_preset(text)
    path = Path(text)
    if not _means_path(text):
        return model_preset(text)  # unknown: raises with the known names
    if path.is_dir():
        inner = path / "config.json"
        if not inner.is_file():
            raise BadInputError(f"model folder {path} holds no config.json. Give the folder of a Hugging Face model.")
        path = inner
    data = read_json(path, "model")
    if isinstance(data, dict) and "layers" in data and "embedding" in data:
        return parse_document(ModelSpec, data, f"model {path}")
    return model_from_config(data, name=_model_name(path), where=f"model {path}")


def cluster_preset(name: str) -> ClusterSpec:
    """A cluster of one kind of node, e.g. `h100x64`: 64 H100 in nodes of 8.

    The count is a multiple of the node size, or less than one node; racks (GB200, GB300: domains of 72) may end
    in a partial domain.  Raises `BadInputError` with the known devices or the nearest counts that exist.
    """
    kind, num_devices = _parse_cluster_name(name)
    machine = machines()[kind]
    size = machine.devices_per_node
    nodes, rest = divmod(num_devices, size)
    if nodes and rest and not machine.partial_nodes:
        raise BadInputError(
            f"cluster {name}: {num_devices} is not a multiple of the node size {size}. "
            f"Use {kind}x{nodes * size} or {kind}x{(nodes + 1) * size}."
        )
    device = machine.device
    groups = [NodeGroup(count=nodes, devices_per_node=size, device=device.name)] if nodes else []
    if rest:
        groups.append(NodeGroup(count=1, devices_per_node=rest, device=device.name))
    return ClusterSpec(
        name=name,
        devices={device.name: device},
        nodes=tuple(groups),
        links={"scale_up": machine.scale_up, "scale_out": machine.scale_out},
    )


def load_cluster(text: str) -> ClusterSpec:
    """The cluster that a user named: a preset such as `h100x64`, a cluster file, or a profile's cluster.

    Raises `BadInputError` with what is known or what is wrong with the file.
    """
    path = Path(text)
    if not _means_path(text) or path.is_dir():
        return cluster_preset(text)
    data = read_json(path, "cluster")
    if isinstance(data, dict) and "cluster" in data and "modules" in data:
        return parse_document(Profile, data, f"profile {path}").cluster
    return parse_document(ClusterSpec, data, f"cluster {path}")


def _parse_cluster_name(name: str) -> ClusterName:
    known = tuple(sorted(machines()))
    form = re.fullmatch(r"(?P<machine>.+)x(?P<count>-?\d+)", name, flags=re.ASCII)
    if form is None:
        raise BadInputError(
            f"unknown cluster {name!r}. Name a preset as DEVICExCOUNT, e.g. h100x64, with one of: {', '.join(known)}; "
            "or give a cluster file or a profile."
        )
    kind, digits = form["machine"], form["count"]
    if kind not in known:
        raise BadInputError(
            f"unknown device {kind!r} in cluster {name!r}{_closest(kind, known)} Known: {', '.join(known)}; "
            "or give a cluster file or a profile."
        )
    count = int(digits) if len(digits) < 10 else MAX_DEVICES + 1
    if count < 1:
        size = machines()[kind].devices_per_node
        raise BadInputError(
            f"cluster {name} has no devices (count {count}). Use a count of 1 to {size}, e.g. {kind}x{size}, "
            f"or a multiple of {size}."
        )
    if count > MAX_DEVICES:
        raise BadInputError(f"cluster {name} has more than {MAX_DEVICES:,} devices. Use a smaller count.")
    return ClusterName(kind, count)


def _means_path(text: str) -> bool:
    """Whether a text that is no preset can only be meant as a file or folder."""
    separators = tuple(filter(None, (os.sep, os.altsep)))
    return text.endswith(".json") or any(sign in text for sign in separators) or (text != "" and Path(text).exists())


def _model_name(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _closest(name: str, known: tuple[str, ...]) -> str:
    match = difflib.get_close_matches(name.lower(), known, n=1)
    return f", did you mean {match[0]}?" if match else "."
