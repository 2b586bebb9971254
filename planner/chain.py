"""The module chain as the search sees it: distinct modules, places where a stage may begin, and what runs contain.

Two runs of modules with the same counts of distinct modules are the same problem for a stage, so every run gets the
number of its content; a stage is then solved once per content, however often that content occurs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from planner.constraints import Rule, Rules
from specs.model import ModelSpec, Module, NamedModule

# Where a stage may begin: at whole layers (the embedding and the head may stand alone), or at any module.
Boundaries = Literal["layers", "modules"]
NO_CONTENT = -1


@dataclass(frozen=True)
class Chain:
    """A model's chain.  `positions` are the module indices at which stages may begin, with 0 and the length.

    `modules` are distinct by themselves or by what the user's constraints say of them (`rules`, alike in order).
    `contents[i, j]` numbers the content of the run from positions[i] to positions[j] (`NO_CONTENT` where i >= j);
    `counts[content, k]` says how many of `modules[k]` it has, `spans[content]` the largest j - i.
    """

    names: tuple[str, ...]
    kinds: tuple[int, ...]
    modules: tuple[Module, ...]
    rules: tuple[Rule, ...]
    positions: tuple[int, ...]
    contents: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    spans: npt.NDArray[np.int64]

    @property
    def num_positions(self) -> int:
        return len(self.positions)

    @property
    def totals(self) -> npt.NDArray[np.int64]:
        """How many of each distinct module the whole model has."""
        whole: npt.NDArray[np.int64] = self.counts[self.contents[0, -1]]
        return whole


def make_chain(model: ModelSpec, boundaries: Boundaries = "layers", rules: Rules | None = None) -> Chain:
    """The chain of a model under the user's rules (None: none)."""
    named = model.modules()
    by_module = (Rule(),) * len(named) if rules is None else rules.by_module
    fixed = None if rules is None else rules.boundaries
    known: dict[tuple[Module, Rule], int] = {}
    ruled = zip((module for _, module in named), by_module, strict=True)
    kinds = tuple(known.setdefault(pair, len(known)) for pair in ruled)
    positions = _positions(named, boundaries) if fixed is None else fixed
    contents, counts, spans = _contents(kinds, positions, len(known))
    modules, of_kind = tuple(module for module, _ in known), tuple(rule for _, rule in known)
    return Chain(tuple(name for name, _ in named), kinds, modules, of_kind, positions, contents, counts, spans)


def layer_starts(named: tuple[NamedModule, ...]) -> list[int]:
    """Index of the first module of every layer that has one."""
    starts, previous = [], ""
    for index, (name, _) in enumerate(named):
        layer = name.rsplit(".", 1)[0]
        if name.startswith("layer.") and layer != previous:
            starts.append(index)
        previous = layer
    return starts


def even_boundaries(model: ModelSpec, num_stages: int) -> tuple[int, ...] | None:
    """Module indices where the stages of an even split begin, plus the length; None with fewer layers than stages.

    Layers go to stages in numbers that differ by at most one, the embedding to the first and the head to the last.
    """
    named = model.modules()
    starts = layer_starts(named)
    if len(starts) < num_stages:
        return None
    inner = [starts[len(starts) * stage // num_stages] for stage in range(1, num_stages)]
    return (0, *inner, len(named))


def _positions(named: tuple[NamedModule, ...], boundaries: Boundaries) -> tuple[int, ...]:
    if boundaries == "modules":
        return tuple(range(len(named) + 1))
    return tuple(sorted({0, *layer_starts(named), len(named) - 1, len(named)}))


def _contents(
    kinds: tuple[int, ...], positions: tuple[int, ...], num_kinds: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Number every run by its counts of distinct modules."""
    one_hot = np.zeros((len(kinds) + 1, num_kinds), dtype=np.int64)
    one_hot[np.arange(1, len(kinds) + 1), kinds] = 1
    before = one_hot.cumsum(axis=0)[list(positions)]
    starts, stops = np.triu_indices(len(positions), k=1)
    counts, number = np.unique(before[stops] - before[starts], axis=0, return_inverse=True)
    contents = np.full((len(positions), len(positions)), NO_CONTENT, dtype=np.int64)
    contents[starts, stops] = number.reshape(-1)
    spans = np.zeros(len(counts), dtype=np.int64)
    np.maximum.at(spans, number.reshape(-1), stops - starts)
    return contents, counts, spans
