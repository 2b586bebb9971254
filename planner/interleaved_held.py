"""What the virtual stages of an interleaved schedule hold.

After its first forwards a stage has a forward and a backward in turn (`specs.schedule.stage_actions`).  It is fullest
after each of these forwards, when one virtual stage has just worked and another is about to.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.knapsack import ROUNDING
from planner.space import Grid
from specs.layout import balanced_cuts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Moments(NamedTuple):
    """When a stage is fullest: micro-batches held, [moment, v], and the virtual stage at work, [moment]."""

    held: Ints
    working: Ints

    def fullest(self, full: Floats | Ints) -> Moments:
        """Those that are the fullest by some measure."""
        most = full >= full.max() * (1.0 - ROUNDING)
        return Moments(self.held[most], self.working[most])

    def at_work(self) -> Floats:
        """The part of these moments at which each virtual stage is at work, [v]."""
        return np.bincount(self.working, minlength=self.held.shape[1]) / len(self.working)


def moments_on(grid: Grid) -> tuple[Moments, ...]:
    """When every stage is fullest."""
    return _moments(grid.num_stages, grid.num_micro_batches, grid.num_virtual)


def held_at_first(grid: Grid) -> Ints:
    """Micro-batches that every stage holds before its first backward, [stage, v]: one of its fullest moments."""
    forwards, _ = _passes(grid.num_stages, grid.num_micro_batches, grid.num_virtual)
    return forwards[_warm_up(grid.num_stages, grid.num_micro_batches, grid.num_virtual)]


@lru_cache(maxsize=1024)
def _moments(num_stages: int, num_micro_batches: int, num_virtual: int) -> tuple[Moments, ...]:
    """As `specs.schedule.most_held`, of all stages.  With turns all alike, more than three only repeat what happens."""
    few = min(num_micro_batches, 3 * num_stages) if num_micro_batches % num_stages == 0 else num_micro_batches
    forwards, backwards = _passes(num_stages, few, num_virtual)
    numbers = np.arange(len(forwards) - 1)
    working = np.concatenate([np.diff(passes, axis=0).argmax(axis=1) for passes in (forwards, backwards)])
    found = []
    for ahead in _warm_up(num_stages, few, num_virtual).tolist():
        after_forward = forwards[1:] - backwards[np.maximum(0, numbers + 1 - ahead)]
        before_backward = forwards[np.minimum(ahead + numbers, len(numbers))] - backwards[:-1]
        held = np.concatenate([after_forward, before_backward])
        kept = [_fullest(held[working == virtual]) for virtual in range(num_virtual)]
        found.append(Moments(np.concatenate(kept), np.repeat(np.arange(num_virtual), [len(own) for own in kept])))
    return tuple(found)


def _fullest(held: Ints) -> Ints:
    """Moments than which none is as full in every respect."""
    moments = np.array(sorted(set(map(tuple, held.tolist()))))
    kept: Ints = moments[(moments[:, None] <= moments[None]).all(axis=2).sum(axis=1) == 1]
    return kept


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
