"""Numbers as people read them: capacity in binary units, rates in decimal ones, times with three digits."""

from __future__ import annotations


def seconds(value: float) -> str:
    """`812 us`, `3.42 ms`, `1.23 s`, `4 min 05 s`, `2 h 10 min`."""
    if value < 0:
        return f"-{seconds(-value)}"
    if value == 0:
        return "0"
    if value < 0.9995e-3:
        return f"{_three_digits(value * 1e6)} us"
    if value < 0.9995:
        return f"{_three_digits(value * 1e3)} ms"
    if value < 99.95:
        return f"{_three_digits(value)} s"
    if value < 3600:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest:02d} s"
    hours, rest = divmod(round(value / 60), 60)
    return f"{hours} h {rest:02d} min"


def num_bytes(value: float) -> str:
    """`312 B`, `4.00 KiB`, `78.3 GiB`."""
    if value < 0:
        return f"-{num_bytes(-value)}"
    if value < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 999.5 or unit == "TiB":
            break
    return f"{_three_digits(value)} {unit}"


def rate(value: float, unit: str) -> str:
    """`812 tokens/s`, `1.23M tokens/s`; `unit` is what is counted per second."""
    for factor, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{_three_digits(value / (1e3 if sign == 'k' else factor))}{sign} {unit}/s"
    return f"{value:,.0f} {unit}/s"


def percent(fraction: float, *, signed: bool = False) -> str:
    """`12.3 %`, `1,765 %`; with a sign for differences."""
    value = fraction * 100
    digits = 1 if abs(value) < 999.5 else 0
    return f"{value:+,.{digits}f} %" if signed else f"{value:,.{digits}f} %"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
