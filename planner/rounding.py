"""The best rounding of a knapsack's relaxation where the largest working memory of all that is taken needs room, too.

At most one module from the optimum, which `planner.knapsack.choose_beside` finds at more cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.knapsack import ROUNDING, Floats, relax


@dataclass(frozen=True)
class Rounding:
    """Seconds, and for each kind the (option, count) that are taken."""

    seconds: float
    selection: list[list[tuple[int, int]]]


def best_rounding(
    counts: Sequence[int],
    seconds: Sequence[Floats],
    memory: Sequence[Floats],
    working: Sequence[Floats],
    capacity: float,
    *,
    enough: float = 0.0,
) -> Rounding | None:
    """By kind, of each option: seconds, bytes held and bytes at work.  `enough` seconds end the search; None where
    nothing fits.

    Each possible value W of the largest working memory is tried, with W less for the rest: those of the least bounds
    first, of equal ones the largest, until no other bound is less.  Any price p of a byte bounds all of them,

    # seconds within W  >=  sum over kinds of n min over options that work within W of (s + p m)  -  p (capacity - W)

    and the prices of the relaxations that were solved are taken.
    """
    works = np.array(sorted(set(np.concatenate(list(working)).tolist()), reverse=True))  # np.unique imports numpy.ma
    works = works[works >= max(float(own.min()) for own in working)]
    orders = [np.argsort(own) for own in working]
    within = [np.searchsorted(w[order], works, side="right") - 1 for w, order in zip(working, orders, strict=True)]

    def least(of: Sequence[Floats]) -> Floats:
        sums = np.zeros(len(works))
        for count, own, order, last in zip(counts, of, orders, within, strict=True):
            sums += count * np.minimum.accumulate(own[order])[last]
        return sums

    bounds: Floats = np.where(least(memory) <= capacity - works, least(seconds), np.inf)
    best: tuple[float, int, Rounding] | None = None
    while True:
        index = int(bounds.argmin())
        if bounds[index] == np.inf or (best is not None and bounds[index] >= best[0] * (1.0 + ROUNDING)):
            return None if best is None else best[2]
        usable = [np.flatnonzero(own <= works[index]) for own in working]
        relaxed = relax(
            counts,
            [s[own] for s, own in zip(seconds, usable, strict=True)],
            [m[own] for m, own in zip(memory, usable, strict=True)],
            capacity - float(works[index]),
        )
        if relaxed is not None:
            duals = [s + relaxed.price * m for s, m in zip(seconds, memory, strict=True)]
            bounds = np.maximum(bounds, least(duals) - relaxed.price * (capacity - works))
            if best is None or (relaxed.rounded, index) < best[:2]:
                selection = [
                    [(int(own[option]), number) for option, number in taken]
                    for own, taken in zip(usable, relaxed.selection, strict=True)
                ]
                best = relaxed.rounded, index, Rounding(relaxed.rounded, selection)
                if relaxed.rounded <= enough:
                    return best[2]
        bounds[index] = np.inf
