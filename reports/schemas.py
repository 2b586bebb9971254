"""JSON schemas of the files that Plait reads and writes, from the contracts themselves."""

from __future__ import annotations

from pydantic import BaseModel, TypeAdapter

from specs.cluster import ClusterSpec
from specs.failures import FailureModel
from specs.model import ModelSpec
from specs.plan import Plan
from specs.profile import Profile
from specs.runlog import Record

DOCUMENTS: dict[str, type[BaseModel]] = {
    "plan": Plan,
    "profile": Profile,
    "model": ModelSpec,
    "cluster": ClusterSpec,
    "failures": FailureModel,
}
NAMES = (*DOCUMENTS, "runlog")


def schema_of(name: str) -> dict[str, object]:
    """JSON Schema (draft 2020-12) of one kind of file; `runlog`: of one line of a run log."""
    if name == "runlog":
        schema = TypeAdapter[object](Record).json_schema()
        schema["title"] = "Run log: one of these objects per line"
    else:
        schema = DOCUMENTS[name].model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
