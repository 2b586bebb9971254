"""Which runs of the chain each stage may take at all: by work alone, before anything within memory is asked.

Seconds of forward f, backward b, both T and weight gradients w are least over all options.  T of every module by itself
adds up along the chain: stages before position p take at least L_p, that of all modules there; those after it A_p.
With the symbols of `planner.paths` a family of paths of a stage s with i own forwards, j own backwards, k weight
gradients and r returns is within Z only if, for the stage's run from p to q,

    L_p + 2 x before s + r (A_q + 2 x after s) + min(i, j) T + (i - j)+ f + (j - i)+ b + k w <= Z

where ( )+ is 0 below 0.  (Round trips in between, gradient sync and optimizer would add to that.)  Every stage also
does all of its work, m (T + w) <= Z.  Runs that no chain of P such runs passes through go, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.paths import PipelineShape

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Least:
    """Least seconds of every content, memory aside, each by itself; `along`: T on however many stages."""

    forward: Floats
    backward: Floats
    both: Floats
    weight: Floats
    along: Floats


class Runs(NamedTuple):
    """Runs of the chain, in order of `starts`, then of `stops`: positions, and numbers of their contents."""

    starts: Ints
    stops: Ints
    numbers: Ints


def all_runs(contents: Ints, possible: npt.NDArray[np.bool_] | None = None) -> Runs:
    """Every run of the chain; of those contents only that are `possible`."""
    there = contents >= 0
    starts, stops = np.nonzero(there if possible is None else there & possible[contents])
    return Runs(starts, stops, contents[starts, stops])


def possible_runs(shape: PipelineShape, contents: Ints, least: Least, below: float) -> list[Runs] | None:
    """The runs of every stage that may be part of a partition within `below` seconds; None when there is none."""
    possible = shape.num_micro_batches * (least.both + least.weight) <= below
    starts, stops, numbers = all_runs(contents, possible)
    before = np.concatenate([[0.0], least.along[contents[0, 1:]]])[starts]
    after = np.concatenate([least.along[contents[:-1, -1]], [0.0]])[stops]
    own = np.stack([least.both, least.forward, least.backward, least.weight])[:, numbers]
    found: list[Ints] = []
    reached = _marked(len(contents), np.zeros(1, dtype=np.int64))
    for stage in range(shape.num_stages):
        some = np.flatnonzero(reached[starts])
        both, forward, backward, weight = own[:, some]
        room = below - shape.transfers_before(stage) - before[some]
        fits = np.ones(some.size, dtype=bool)
        for path in shape.paths(stage):
            if path.turns:
                continue
            seconds = min(path.forward, path.backward) * both
            if path.forward > path.backward:
                seconds += (path.forward - path.backward) * forward
            elif path.backward > path.forward:
                seconds += (path.backward - path.forward) * backward
            if path.weight:
                seconds += path.weight * weight
            if path.returns:
                seconds += path.returns * (after[some] + shape.transfers_after(stage))
            fits &= seconds <= room
        some = some[fits]
        found.append(some)
        reached = _marked(len(contents), stops[some])
    needed = _marked(len(contents), np.full(1, len(contents) - 1))
    for stage in reversed(range(shape.num_stages)):
        some = found[stage] = found[stage][needed[stops[found[stage]]]]
        needed = _marked(len(contents), starts[some])
    if not all(some.size for some in found):
        return None
    return [Runs(starts[some], stops[some], numbers[some]) for some in found]


def distinct(numbers: Sequence[Ints], size: int) -> Ints:
    """All of some numbers below `size`, ascending, each once."""
    return np.flatnonzero(_marked(size, np.concatenate(list(numbers))))


def _marked(size: int, positions: Ints) -> npt.NDArray[np.bool_]:
    marks = np.zeros(size, dtype=bool)
    marks[positions] = True
    return marks
