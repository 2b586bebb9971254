"""What the virtual stages of an interleaved schedule hold.

After its first forwards a stage has a forward and a backward in turn (`specs.schedule.stage_actions`), and it is
fullest after each of these forwards.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.space import Grid
from specs.layout import balanced_cuts

Ints = npt.NDArray[np.int64]


def held_on(grid: Grid) -> tuple[Ints, ...]:
    """Micro-batches that every stage holds at the moments at which it is fullest, [moment, v]."""
    return _held(grid.num_stages, grid.num_micro_batches, grid.num_virtual)


def held_at_first(grid: Grid) -> Ints:
    """Micro-batches that every stage holds before its first backward, [stage, v]: one of its fullest moments."""
    forwards, _ = _passes(grid.num_stages, grid.num_micro_batches, grid.num_virtual)
    return forwards[_warm_up(grid.num_stages, grid.num_micro_batches, grid.num_virtual)]


@lru_cache(maxsize=1024)
def _held(num_stages: int, num_micro_batches: int, num_virtual: int) -> tuple[Ints, ...]:
    """As `specs.schedule.most_held`, of all stages.  With turns all alike, more than three only repeat what happens."""
    few = min(num_micro_batches, 3 * num_stages) if num_micro_batches % num_stages == 0 else num_micro_batches
    forwards, backwards = _passes(num_stages, few, num_virtual)
    found = []
    for ahead in _warm_up(num_stages, few, num_virtual).tolist():
        after = np.minimum(np.arange(ahead, ahead + len(backwards) - 1), len(forwards) - 1)
        moments = np.array(sorted(set(map(tuple, (forwards[after] - backwards[:-1]).tolist()))))
        beaten = (moments[:, None] <= moments[None]).all(axis=2).sum(axis=1) > 1
        found.append(moments[~beaten])
    return tuple(found)


@lru_cache(maxsize=1024)
def _passes(num_stages: int, num_micro_batches: int, num_virtual: int) -> tuple[Ints, Ints]:
    """By virtual stage, forwards and backwards among the first so many of a stage, [number, v]: turns of micro-batches
    pass all virtual stages, backwards in reverse.
    """
    turns = np.diff(balanced_cuts(num_micro_batches, max(1, num_micro_batches // num_stages)))
    order = np.repeat(np.tile(np.arange(num_virtual), len(turns)), np.repeat(turns, num_virtual))
    passes = np.zeros((2, len(order) + 1, num_virtual), dtype=np.int64)
    for own, of in zip(passes, (order, num_virtual - 1 - order), strict=True):
        own[np.arange(1, len(order) + 1), of] = 1
    forwards, backwards = passes.cumsum(axis=1)
    return forwards, backwards


def _warm_up(num_stages: int, num_micro_batches: int, num_virtual: int) -> Ints:
    """Forwards of every stage before its first backward."""
    longest = -(-num_micro_batches // max(1, num_micro_batches // num_stages))
    ahead = 2 * (num_stages - 1 - np.arange(num_stages)) + (num_virtual - 1) * longest
    return np.minimum(ahead + 1, num_micro_batches * num_virtual)
