"""Choose one option for every module of a stage: least seconds within a number of bytes, exactly.

    minimise    sum over kinds k, options c of  n[k, c] seconds[k, c]
    subject to  sum over c of n[k, c] = counts[k]                     every module runs one way
                sum over k, c of n[k, c] bytes[k, c] <= capacity      the stage fits
                n integer >= 0                                        equal modules are counted, not named

The linear relaxation is solved by its convex hulls (`relax`): it gives a bound, a feasible rounding and the price of
a byte at the optimum.  Under that price every option has a reduced cost; only labels whose reduced costs add up to
less than the distance between bound and rounding can be better, so few labels survive (`choose`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# Outcomes of modules of one kind that are put together at once, at most.
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
    """One undominated outcome: totals, and how often each option is taken, by kind."""

    seconds: float
    tail: float
    memory: float
    selection: list[list[tuple[int, int]]]


def hull(seconds: Floats, memory: Floats) -> list[int]:
    """Options on the lower convex hull, from least memory to least seconds."""
    points: list[int] = []
    for index in np.lexsort((seconds, memory)):
        option = int(index)
        if points and seconds[option] >= seconds[points[-1]]:
            continue
        while len(points) >= 2:
            a, b = points[-2], points[-1]
            along = (seconds[b] - seconds[a]) * (memory[option] - memory[a])
            if along < (seconds[option] - seconds[a]) * (memory[b] - memory[a]):
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
    if relaxed.rounded - relaxed.bound <= slack:
        best = Label(relaxed.rounded, 0.0, _total(relaxed.selection, memory), relaxed.selection)
        return best if best.seconds < cutoff else None
    limit = min(relaxed.rounded, cutoff) + slack
    no_tail = [np.zeros_like(values) for values in seconds]
    labels = enumerate_labels(counts, seconds, no_tail, memory, capacity, price=relaxed.price, limit=limit)
    if not labels:
        return None
    best = min(labels, key=lambda label: label.seconds)
    return best if best.seconds < cutoff else None


def enumerate_labels(
    counts: Sequence[int],
    seconds: Sequence[Floats],
    tails: Sequence[Floats],
    memory: Sequence[Floats],
    capacity: float,
    *,
    price: float,
    limit: float,
    max_labels: int = 200_000,
) -> list[Label]:
    """All outcomes within `capacity` and at most `limit` seconds that none beats in seconds, tail and memory.

    `price` (seconds per byte, any number >= 0) only decides how early hopeless labels are seen to be so.
    Raises `MemoryError` past `max_labels` labels.
    """
    duals = [s + price * m for s, m in zip(seconds, memory, strict=True)]
    floor = sum(n * float(d.min()) for n, d in zip(counts, duals, strict=True)) - price * capacity
    allowance = limit - floor
    rest = sum(n * float(m.min()) for n, m in zip(counts, memory, strict=True))
    state = np.zeros((4, 1))  # rows: seconds, tail, memory, reduced cost
    steps: list[tuple[int, Ints, Ints]] = []
    for kind, count in enumerate(counts):
        reduced = duals[kind] - duals[kind].min()
        options = np.flatnonzero(reduced <= allowance)
        table = np.stack([seconds[kind], tails[kind], memory[kind], reduced])[:, options]
        batches = [_Batch(table, np.eye(reduced.size, dtype=np.int64)[options])]
        least = float(memory[kind].min())
        while count:
            power = min(count.bit_length() - 1, len(batches))
            if power == len(batches):
                power -= not _double(batches, allowance)
            while power and state.shape[1] * batches[power].values.shape[1] > MOST_GROWN:
                power -= 1
            batch = batches[power]
            count -= 1 << power
            rest -= least * (1 << power)
            grown = _sums(state, batch.values)
            alive = np.flatnonzero((grown[3] <= allowance) & (grown[2] + rest <= capacity))
            alive = alive[_undominated(grown[:3, alive])]
            if not alive.size:
                return []
            if alive.size > max_labels:
                raise MemoryError(f"{alive.size} labels")
            state = grown[:, alive]
            parents, own = np.divmod(alive, batch.values.shape[1])
            steps.append((kind, parents, batch.taken[own]))
    found = np.flatnonzero(state[0] <= limit)
    return [_label(state[:, index], int(index), steps, len(counts)) for index in found]


class _Batch(NamedTuple):
    """Undominated outcomes of so many modules of one kind, a power of two: their totals in rows as above, and how often
    each option is taken, [outcome, option].
    """

    values: Floats
    taken: Ints


def _double(batches: list[_Batch], allowance: float) -> bool:
    """Add the outcomes of twice as many modules as the last batch has, if they are few enough."""
    values, taken = batches[-1]
    if values.shape[1] ** 2 > MOST_GROWN:
        return False
    grown = _sums(values, values)
    alive = np.flatnonzero(grown[3] <= allowance)
    alive = alive[_undominated(grown[:3, alive])]
    first, second = np.divmod(alive, values.shape[1])
    batches.append(_Batch(grown[:, alive], taken[first] + taken[second]))
    return True


def _sums(first: Floats, second: Floats) -> Floats:
    """Every column of the one plus every column of the other."""
    sums: Floats = (first[:, :, None] + second[:, None, :]).reshape(len(first), -1)
    return sums


def _label(totals: Floats, index: int, steps: list[tuple[int, Ints, Ints]], num_kinds: int) -> Label:
    """Walk back through the steps and count the options taken."""
    taken: dict[int, Ints] = {}
    for kind, parents, options in reversed(steps):
        taken[kind] = taken.get(kind, 0) + options[index]
        index = int(parents[index])
    selection = [
        [(int(option), int(taken[kind][option])) for option in np.flatnonzero(taken[kind])] if kind in taken else []
        for kind in range(num_kinds)
    ]
    return Label(float(totals[0]), float(totals[1]), float(totals[2]), selection)


def _undominated(values: Floats) -> Ints:
    """Columns of (seconds, tail, memory) that no other column equals or beats in all three."""
    if values.shape[1] and values[1].min() == values[1].max():
        order = np.lexsort((values[0], values[2]))
        seconds = values[0, order]
        best = np.minimum.accumulate(seconds)
        keep = np.ones(order.size, dtype=bool)
        keep[1:] = seconds[1:] < best[:-1]
        return order[keep]
    order = np.lexsort((values[1], values[0], values[2]))  # by memory, then seconds, then tail
    seconds, tails = values[0, order], values[1, order]
    # Sweep by memory; the staircase holds the (seconds, tail) pairs that no earlier one beats.
    stair_seconds: list[float] = []
    stair_tails: list[float] = []
    kept = []
    for index, (second, tail) in enumerate(zip(seconds.tolist(), tails.tolist(), strict=True)):
        place = bisect_right(stair_seconds, second)
        if place and stair_tails[place - 1] <= tail:
            continue
        stop = place
        while stop < len(stair_tails) and stair_tails[stop] >= tail:
            stop += 1
        if place and stair_seconds[place - 1] == second:
            place -= 1
        stair_seconds[place:stop] = [second]
        stair_tails[place:stop] = [tail]
        kept.append(index)
    return order[np.array(kept, dtype=np.int64)]


def _total(selection: list[list[tuple[int, int]]], values: Sequence[Floats]) -> float:
    return sum(n * float(v[option]) for chosen, v in zip(selection, values, strict=True) for option, n in chosen)
