"""Piecewise log-log interpolation of measured curves."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence


def log_log(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Value at `x` of the curve through (xs, ys), ascending in x, all positive.

    Below the first point: its value (what is left there is latency).  Above the last: proportional to x.
    """
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1] * x / xs[-1]
    high = bisect_left(xs, x)
    if xs[high] == x:
        return ys[high]
    low = high - 1
    part = math.log(x / xs[low]) / math.log(xs[high] / xs[low])
    return math.exp(math.log(ys[low]) * (1.0 - part) + math.log(ys[high]) * part)
