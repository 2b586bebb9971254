"""Writes docs/tree.md: every source file with the first line of its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "specs": "contracts",
    "cost_models": "seconds, bytes and goodput of a layout, pure",
    "planner": "search for the best layout",
    "executor": "runs a plan in PyTorch",
    "recovery": "keeps a run going when devices fail",
    "profiles": "measures a cluster in place",
    "reports": "tables, pictures and pages",
    "exports": "a plan in the words of other engines",
    "commands": "one file per command",
    "benchmarks": "dated measurements and published runs",
    "examples": "to read along",
    "tests": "oracles and invariants",
}


def page() -> str:
    """The page, from the files as they are."""
    lines = ["# Which file does what?", "", "Written by `python docs/tree.py` from the files' own first lines."]
    for room, words in ROOMS.items():
        files = [path for path in sorted((ROOT / room).rglob("*.py")) if path.name != "__init__.py"]
        if files:
            lines += ["", f"## {room}: {words}", "", "| file | |", "| --- | --- |"]
            lines += [f"| `{path.relative_to(ROOT)}` | {summary(path)} |" for path in files]
    return "\n".join(lines) + "\n"


def summary(path: Path) -> str:
    """First line of a file's docstring, escaped for a table."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0].replace("|", "\\|")


if __name__ == "__main__":
    (ROOT / "docs" / "tree.md").write_text(page(), encoding="utf-8")
