"""Choose one option for every module of a stage: least seconds within a number of bytes, exactly.

    minimise    sum over kinds k, options c of  n[k, c] seconds[k, c]
    subject to  sum over c of n[k, c] = counts[k]                     every module runs one way
                sum over k, c of n[k, c] bytes[k, c] <= capacity      the stage fits
                n integer >= 0                                        equal modules are counted, not named

The linear relaxation is solved by its convex hulls (`relax`): it gives a bound, a feasible rounding and the price of
a byte at the optimum.  Under that price every option has a reduced cost; only outcomes whose reduced costs add up to
less than the distance between bound and rounding can be better, so few survive (`choose`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# Ways to run the modules of one kind that are listed outright, at most; of more modules halves are put together.
MOST_LISTED = 2_000
# Outcomes that are put together at once, at most.
MOST_GROWN = 100_000
# Relative slack for sums of floating-point seconds that are equal on paper.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Relaxation:
    """Bound and rounding of the knapsack.  `price` is seconds per byte; `selection[k]` lists (option, count)."""

    bound: float
    price: float
    rounded: float
    selection: list[list[tuple[int, int]]]


@dataclass(frozen=True)
class Label:
    """An outcome: its seconds, and how often each option is taken, by kind."""

    seconds: float
    selection: list[list[tuple[int, int]]]


def hull(seconds: Floats, memory: Floats) -> list[int]:
    """Options on the lower convex hull, from least memory to least seconds."""
    points: list[int] = []
    s, m = seconds.tolist(), memory.tolist()
    for option in np.lexsort((seconds, memory)).tolist():
        if points and s[option] >= s[points[-1]]:
            continue
        while len(points) >= 2:
            a, b = points[-2], points[-1]
            if (s[b] - s[a]) * (m[option] - m[a]) < (s[option] - s[a]) * (m[b] - m[a]):
                break
            points.pop()
        points.append(option)
    return points


def relax(
    counts: Sequence[int], seconds: Sequence[Floats], memory: Sequence[Floats], capacity: float
) -> Relaxation | None:
    """Linear relaxation by taking hull segments in order of seconds saved per byte; None when nothing fits."""
    hulls = [hull(s, m) for s, m in zip(seconds, memory, strict=True)]
    used = sum(n * float(m[h[0]]) for n, m, h in zip(counts, memory, hulls, strict=True))
    if used > capacity:
        return None
    total = sum(n * float(s[h[0]]) for n, s, h in zip(counts, seconds, hulls, strict=True))
    taken: list[dict[int, int]] = [{h[0]: n} for n, h in zip(counts, hulls, strict=True)]
    segments = []
    for kind, points in enumerate(hulls):
        for a, b in pairwise(points):
            saved, extra = float(seconds[kind][a] - seconds[kind][b]), float(memory[kind][b] - memory[kind][a])
            segments.append((saved / extra, kind, a, b, saved, extra))
    segments.sort(key=lambda segment: -segment[0])
    bound, price = None, 0.0
    for slope, kind, a, b, saved, extra in segments:
        number = taken[kind].get(a, 0)
        fit = min(number, int((capacity - used) // extra))
        if fit < number and bound is None:
            bound, price = total - slope * (capacity - used), slope
        if fit:
            taken[kind][a] = number - fit
            taken[kind][b] = taken[kind].get(b, 0) + fit
            used, total = used + fit * extra, total - fit * saved
    selection = [[(option, n) for option, n in sorted(of_kind.items()) if n] for of_kind in taken]
    return Relaxation(total if bound is None else bound, price, total, selection)


def choose(
    counts: Sequence[int],
    seconds: Sequence[Floats],
    memory: Sequence[Floats],
    capacity: float,
    *,
    cutoff: float = np.inf,
) -> Label | None:
    """The exact optimum; None when nothing fits or nothing is below `cutoff`."""
    relaxed = relax(counts, seconds, memory, capacity)
    if relaxed is None or relaxed.bound >= cutoff:
        return None
    slack = ROUNDING * max(1e-300, relaxed.rounded)
    selection: list[list[tuple[int, int]]] | None = relaxed.selection
    if relaxed.rounded - relaxed.bound > slack:
        limit = min(relaxed.rounded, cutoff) + slack
        selection = _least(counts, seconds, memory, capacity, relaxed.price, limit)
    if selection is None:
        return None
    found = sum(n * float(s[option]) for s, chosen in zip(seconds, selection, strict=True) for option, n in chosen)
    return Label(found, selection) if found < cutoff else None


def choose_beside(
    counts: Sequence[int],
    seconds: Sequence[Floats],
    memory: Sequence[Floats],
    working: Sequence[Floats],
    capacity: float,
    prices: Floats,
) -> tuple[Label | None, int]:
    """As `choose` where the largest working memory of all that is taken needs room, too; and how often that was asked.

    The largest is no sum, so each of its possible values is tried, those of the least bounds first; any `prices` of a
    byte give bounds.
    """
    least_working = max(float(own.min()) for own in working)
    works = np.array(sorted({work for own in working for work in own.tolist() if work >= least_working}))
    duals = -(capacity - works)[:, None] * prices
    for count, s, m, own in zip(counts, seconds, memory, working, strict=True):
        order = np.argsort(own)
        least = np.minimum.accumulate(s[order, None] + m[order, None] * prices)
        duals += count * least[np.searchsorted(own[order], works, side="right") - 1]
    bounds, best, asked = duals.max(axis=1), None, 0
    for index in np.argsort(bounds).tolist():
        cutoff = np.inf if best is None else best.seconds
        if bounds[index] >= cutoff:
            break
        usable = [np.flatnonzero(own <= works[index]) for own in working]
        label = choose(
            counts,
            [s[u] for s, u in zip(seconds, usable, strict=True)],
            [m[u] for m, u in zip(memory, usable, strict=True)],
            capacity - float(works[index]),
            cutoff=cutoff,
        )
        asked += 1
        if label is not None:
            chosen = zip(label.selection, usable, strict=True)
            best = Label(label.seconds, [[(int(u[option]), n) for option, n in own] for own, u in chosen])
    return best, asked


def _least(
    counts: Sequence[int],
    seconds: Sequence[Floats],
    memory: Sequence[Floats],
    capacity: float,
    price: float,
    limit: float,
) -> list[list[tuple[int, int]]] | None:
    """The selection of least seconds within `capacity`; None when none has at most `limit` seconds.

    # seconds = floor + sum of reduced costs + price x (capacity - bytes)      floor = sum of least (seconds + price x
    #   bytes) - price x capacity;  the last term is >= 0, so reduced costs add up to limit - floor at most
    """
    duals = [s + price * m for s, m in zip(seconds, memory, strict=True)]
    least = [float(d.min()) for d in duals]
    allowance = limit - (sum(n * d for n, d in zip(counts, least, strict=True)) - price * capacity)
    usable = [np.flatnonzero(d - low <= allowance) for d, low in zip(duals, least, strict=True)]
    selection = [[(int(own[0]), n)] for own, n in zip(usable, counts, strict=True)]
    free = [kind for kind, own in enumerate(usable) if own.size > 1]
    fixed = [(kind, int(own[0])) for kind, own in enumerate(usable) if own.size == 1]
    room = capacity - sum(counts[kind] * float(memory[kind][option]) for kind, option in fixed)
    allowance -= sum(counts[kind] * (float(duals[kind][option]) - least[kind]) for kind, option in fixed)
    parts = {
        kind: _outcomes(
            counts[kind],
            np.array([seconds[kind][usable[kind]] - least[kind], memory[kind][usable[kind]]]),
            price,
            allowance,
        )
        for kind in free
    }
    order = sorted(free, key=lambda kind: parts[kind].values.shape[1])
    rest = sum(float(part.values[1].min()) for part in parts.values())
    state = np.zeros((2, 1))
    steps: list[tuple[Ints, Ints]] = []
    for kind in order:
        rest -= float(parts[kind].values[1].min())
        state, before, own = _together(state, parts[kind].values, price, allowance, room - rest)
        steps.append((before, own))
    if not state.shape[1]:
        return None
    index = int(state[0].argmin())
    for kind, (before, own) in zip(reversed(order), reversed(steps), strict=True):
        taken = parts[kind].taken[own[index]].tolist()
        selection[kind] = [(option, n) for option, n in zip(usable[kind].tolist(), taken, strict=True) if n]
        index = int(before[index])
    return selection


class _Outcomes(NamedTuple):
    """Undominated outcomes of the modules of one kind: their seconds, less the least (seconds + price x bytes) of each
    module, and bytes, [row, outcome]; and how often each option is taken, [outcome, option].
    """

    values: Floats
    taken: Ints


def _outcomes(count: int, table: Floats, price: float, allowance: float) -> _Outcomes:
    """Of `count` modules with options of these values, [row, option]."""
    num_options = table.shape[1]
    if count == 1 or comb(count + num_options - 1, count) <= MOST_LISTED:
        taken = _compositions(count, num_options)
        values = table @ taken.T
        kept = _worthwhile(values, price, allowance, np.inf)
        return _Outcomes(values[:, kept], taken[kept])
    some, others = (_outcomes(part, table, price, allowance) for part in (count // 2, count - count // 2))
    values, first, second = _together(some.values, others.values, price, allowance, np.inf)
    return _Outcomes(values, some.taken[first] + others.taken[second])


def _together(first: Floats, second: Floats, price: float, allowance: float, room: float) -> tuple[Floats, Ints, Ints]:
    """Undominated sums of an outcome of each within both limits, and which two outcomes they are of."""
    width = max(1, MOST_GROWN // max(1, second.shape[1]))
    found, pairs = np.empty((2, 0)), np.empty(0, dtype=np.int64)
    for start in range(0, first.shape[1], width):
        sums = (first[:, start : start + width, None] + second[:, None, :]).reshape(2, -1)
        found = np.concatenate([found, sums], axis=1)
        pairs = np.concatenate([pairs, np.arange(sums.shape[1]) + start * second.shape[1]])
        kept = _worthwhile(found, price, allowance, room)
        found, pairs = found[:, kept], pairs[kept]
    before, after = np.divmod(pairs, second.shape[1])
    return found, before, after


@lru_cache(maxsize=256)
def _compositions(count: int, num_options: int) -> Ints:
    """Every way to take `count` modules in so many options, [way, option]."""
    if num_options == 1:
        return np.array([[count]])
    rows = []
    for first in range(count + 1):
        others = _compositions(count - first, num_options - 1)
        rows.append(np.insert(others, 0, first, axis=1))
    return np.concatenate(rows)


def _worthwhile(values: Floats, price: float, allowance: float, room: float) -> Ints:
    """Columns of (seconds, bytes) within both limits that no other one equals or beats in both."""
    seconds, memory = values
    alive = np.flatnonzero((seconds + price * memory <= allowance) & (memory <= room))
    if alive.size > 1:
        alive = alive[np.lexsort((seconds[alive], memory[alive]))]
        own = seconds[alive]
        alive = alive[np.concatenate([[True], own[1:] < np.minimum.accumulate(own)[:-1]])]
    return alive
