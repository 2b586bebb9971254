"""Software stacks as parameter sets: what a framework overlaps, moves and reserves.  Data in `data/stacks.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from specs.errors import BadInputError
from specs.profile import StepOverhead

_DATA = Path(__file__).parent / "data" / "stacks.json"


@dataclass(frozen=True, slots=True)
class Stack:
    """Overlaps are fractions of the communication that can hide behind computing."""

    name: str
    source: str
    tensor_overlap: float
    gradient_overlap: float
    shards_overlap: bool  # whether a sharded optimizer's collectives overlap too
    optimizer_bytes_per_element: float
    reserved_bytes: int
    jitter: float
    overhead: StepOverhead

    def exposed(self, seconds: float, backward_seconds: float, *, sharded: bool) -> float:
        """Gradient collectives of `seconds` that one backward pass does not hide."""
        if sharded and not self.shards_overlap:
            return seconds
        return seconds - self.gradient_overlap * min(seconds, backward_seconds)


@cache
def stacks() -> dict[str, Stack]:
    """Shipped stacks by name."""
    table = json.loads(_DATA.read_text(encoding="utf-8"))
    return {
        name: Stack(name=name, overhead=StepOverhead(**entry.pop("overhead")), **entry) for name, entry in table.items()
    }


def stack(name: str) -> Stack:
    """Raises `BadInputError` for an unknown name."""
    if name not in stacks():
        raise BadInputError(f"unknown software stack {name!r}. Known: {', '.join(stacks())}.")
    return stacks()[name]
