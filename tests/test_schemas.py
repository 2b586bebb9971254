"""JSON schemas: one for each kind of file, closed, and printed by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

import cli
from reports.schemas import DOCUMENTS, NAMES, schema_of
from specs.runlog import Record


@pytest.mark.parametrize("name", NAMES)
def test_the_command_prints_it(name: str) -> None:
    result = CliRunner().invoke(cli.app, ["schema", name])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == schema_of(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_closed(name: str) -> None:
    """`extra="forbid"` everywhere: a typing error cannot pass for a default."""

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("type") == "object" and "properties" in node:
                assert node["additionalProperties"] is False, node.get("title")
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(schema_of(name))


GOLDEN = Path(__file__).parent / "golden"


def test_the_plan_format_is_frozen() -> None:
    """A change is a decision: `plait schema plan > tests/golden/plan.schema.json`, and a line in the changelog."""
    assert json.loads((GOLDEN / "plan.schema.json").read_text()) == schema_of("plan")


def test_every_field_of_a_document_is_in_its_schema() -> None:
    for name, kind in DOCUMENTS.items():
        properties = schema_of(name)["properties"]
        assert isinstance(properties, dict)
        assert set(properties) == set(kind.model_fields)
        assert "schema_version" in properties


def test_the_log_has_every_kind_of_record() -> None:
    union = get_args(Record)[0]
    kinds = {kind.model_fields["kind"].default for kind in get_args(union)}
    discriminator = schema_of("runlog")["discriminator"]
    assert isinstance(discriminator, dict)
    assert set(discriminator["mapping"]) == kinds
