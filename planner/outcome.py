"""What a search brings back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from planner.layout import Layout


@dataclass
class Outcome:
    """What a search found.  `seconds` and `bound` are `inf` when nothing fits."""

    layout: Layout | None
    seconds: float
    bound: float
    complete: bool
    labels: int = 0
    nodes: int = 0
    evaluated: int = 0
    pruned: Counter[str] = field(default_factory=Counter)

    @property
    def gap(self) -> float:
        return max(0.0, (self.seconds - self.bound) / self.seconds) if self.layout is not None else 0.0
