"""Common ground of every contract: strict immutable pydantic models, identity by hash, whole-file writes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from specs.errors import BadInputError

SCHEMA_VERSION = 1


class Spec(BaseModel):
    """A frozen record that refuses unknown keys."""

    # Validators are built at their first use: a command uses few of all kinds of records.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Document(Spec):
    """A spec that is a file of its own: it carries a schema version and can be identified by its content."""

    schema_version: int = SCHEMA_VERSION

    def sha256(self) -> str:
        """Hex digest of the canonical JSON form (sorted keys, no white space)."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the document as JSON, whole or not at all.  Raises `BadInputError` when the disk refuses."""
        write_whole(path, self.model_dump_json(indent=1, exclude_defaults=False) + "\n")


DocumentType = TypeVar("DocumentType", bound=Document)


def load_document(kind: type[DocumentType], path: Path, what: str) -> DocumentType:
    """Read and check a document; `what` names it in messages ("plan", "profile", ...)."""
    return parse_document(kind, read_json(path, what), f"{what} {path}")


def parse_document(kind: type[DocumentType], data: object, where: str) -> DocumentType:
    """Check the schema version first (its sentence is the useful one), then validate plain data."""
    version = data.get("schema_version", SCHEMA_VERSION) if isinstance(data, dict) else SCHEMA_VERSION
    if version != SCHEMA_VERSION:
        raise BadInputError(
            f"{where}: schema_version is {version!r}, this version of plait reads {SCHEMA_VERSION}. "
            "Make the file again with this version."
        )
    return parse(kind, data, where)


def parse(kind: type[DocumentType], data: object, where: str) -> DocumentType:
    """Validate plain data; the first problem becomes one clear sentence."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise BadInputError(f"{where}: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's complaints as a sentence, with the number of the others."""
    problems = error.errors()
    first = problems[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    # A bad element makes pydantic call its list too short as well: that is no second problem.
    others = [p for p in problems[1:] if not (p["type"] == "too_short" and p["loc"] == first["loc"][: len(p["loc"])])]
    more = f" ({len(others)} more like it)" if others else ""
    sentence = f"{place}: {message}{more}" if place else f"{message}{more}"
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."


def read_json(path: Path, what: str) -> object:
    """Parse a JSON file; every failure is a `BadInputError` that names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"{what} {path} does not exist. Check the path.") from None
    except IsADirectoryError:
        raise BadInputError(f"{what} {path} is a folder, a JSON file is needed.") from None
    except RecursionError:
        raise BadInputError(f"{what} {path} is not valid JSON: it is nested too deeply.") from None
    except ValueError as error:  # bad syntax, bad UTF-8, numbers of thousands of digits
        raise BadInputError(f"{what} {path} is not valid JSON: {error}.") from None
    except OSError as error:
        raise BadInputError(f"{what} {path} cannot be read: {error.strerror}.") from None


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file whole or not at all: temporary file in the same folder, fsync, rename.

    Raises `BadInputError` (with the cause) when the disk is full or the folder cannot be written; the file
    that was there before is then untouched.
    """
    payload = data.encode() if isinstance(data, str) else data
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise BadInputError(
            f"{path} cannot be written ({len(payload):,} bytes): {error.strerror}. Free space or choose another place."
        ) from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
