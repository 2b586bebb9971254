"""Any damage to any file is accepted or refused with a sentence: no crash, no hang."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specs.base import Document, parse_document
from specs.cluster import ClusterSpec
from specs.errors import BadInputError
from specs.model import ModelSpec
from specs.plan import Plan
from specs.presets import cluster_preset, model_preset
from specs.profile import Profile
from specs.tensors import num_parameters
from tests import runs
from tests.test_docs import EXAMPLES

PROFILE = next(json.loads(block.text) for block in EXAMPLES if block.info == "json profile")
DOCUMENTS: dict[str, tuple[type[Document], Any]] = {
    "plan": (Plan, runs.plan().model_dump(mode="json")),
    "model": (ModelSpec, model_preset("demo").model_dump(mode="json")),
    "cluster": (ClusterSpec, cluster_preset("gb200x100").model_dump(mode="json")),
    "profile": (Profile, PROFILE),
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -1, 2, 3, 7, 10**6, 10**9, 10**18, 10**40, -(10**40)])
    | st.integers(-3, 300)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["mlp", "attention", "moe", "layer.0.mlp", "head", "H100", "scale_up", "full", "1f1b"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all nodes below the root."""
    found: list[tuple[Any, ...]] = []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        found += [(*path, key), *places(value, (*path, key))]
    return found


def damage(document: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    """A copy with one node replaced, removed, doubled or renamed."""
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    last = path[-1]
    match how:
        case "remove":
            del parent[last]
        case "double" if isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        case "rename" if isinstance(parent, dict):
            parent[f"{last}x"] = parent.pop(last)
        case _:
            parent[last] = value
    return changed


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_documents(name: str, data: st.DataObject) -> None:
    kind, document = DOCUMENTS[name]
    for _ in range(data.draw(st.integers(1, 3))):
        paths = places(document)
        if not paths:
            break
        path = data.draw(st.sampled_from(paths))
        how = data.draw(st.sampled_from(["replace", "replace", "remove", "double", "rename"]))
        document = damage(document, path, how, data.draw(VALUES))
    with contextlib.suppress(BadInputError):
        use(parse_document(kind, document, f"{name} x.json"))


def use(document: Document) -> None:
    """What every command does with an accepted file."""
    document.sha256()
    match document:
        case ModelSpec():
            num_parameters(document.modules())
        case ClusterSpec():
            document.ranks()
            document.node_starts()
        case Plan():
            modules = dict(document.model.modules())
            for pipeline in document.pipelines:
                for stage in pipeline.stages:
                    for placement in stage.modules:
                        for rank in range(stage.num_ranks):
                            placement.units_of(rank, modules[placement.module])


def test_undamaged_documents_are_accepted() -> None:
    for kind, document in DOCUMENTS.values():
        use(parse_document(kind, document, "x"))
