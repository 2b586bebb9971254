"""The options of every distinct module at a grid point, with their costs: what the inner searches choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.layout import Option

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class OptionTable:
    """The ways to run one distinct module, as parallel arrays.

    Seconds of a micro-batch's forward and backward with communication; seconds of gradient sync and of the optimizer
    once a step (lower bounds that add up over modules); sum of squares of the two passes' computing seconds; bytes
    held always, per micro-batch in flight, and at work.  Where the schedule splits the backward pass, `backward` is
    its part for the input, `weight` the seconds of its part for the weights, and `deferred` the bytes of a
    micro-batch that waits for that; else both are 0.
    """

    forward: Floats
    backward: Floats
    sync: Floats
    update: Floats
    spread: Floats
    static: Floats
    activation: Floats
    working: Floats
    weight: Floats
    deferred: Floats


@dataclass(frozen=True)
class Menu:
    """For every distinct module its options, and their costs in the same order; `every`: all of them in one table, in
    which those of each module begin at `firsts`.
    """

    options: tuple[tuple[Option, ...], ...]
    tables: tuple[OptionTable, ...]
    every: OptionTable
    firsts: Ints

    @staticmethod
    def of(options: Sequence[tuple[Option, ...]], costs: Sequence[Floats]) -> Menu:
        """`costs` of each module, [row of `OptionTable`, option]."""
        every, stops = np.concatenate(costs, axis=1), np.cumsum([len(own) for own in options])
        firsts = np.concatenate([[0], stops[:-1]])
        tables = (OptionTable(*every[:, a:b]) for a, b in zip(firsts.tolist(), stops.tolist(), strict=True))
        return Menu(tuple(options), tuple(tables), OptionTable(*every), firsts)

    def least(self, values: Floats) -> Floats:
        """Of values of all options the least of each distinct module."""
        found: Floats = np.minimum.reduceat(values, self.firsts)
        return found
