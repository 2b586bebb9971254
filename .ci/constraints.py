"""Prints constraints.txt for the packages installed in .venv: run it after the suite passed with newer versions.

.venv/bin/python .ci/constraints.py > constraints.txt
"""

from __future__ import annotations

from importlib.metadata import distributions

HEAD = """\
# The versions that the test suite last passed with (CPython 3.11, Linux).  `make install` installs these;
# pyproject.toml states the ranges that are meant to work.  Releases that dropped Python 3.10 are left open there."""
NOT_OURS = {"plait", "pip", "setuptools"}


def main() -> None:
    """One line per package, by name; build tags such as `+cpu` are left off."""
    lines = {}
    for package in distributions():
        name = package.metadata["Name"]
        if name in NOT_OURS:
            continue
        newer_only = ">=3.11" in (package.metadata.get("Requires-Python") or "").replace(" ", "")
        marker = ' ; python_version >= "3.11"' if newer_only else ""
        lines[name.lower()] = f"{name}=={package.version.split('+')[0]}{marker}"
    print(HEAD, *(lines[name] for name in sorted(lines)), sep="\n")


if __name__ == "__main__":
    main()
