"""Pictures of the experiments' results: what a table says, at a glance."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks.testbed import agreement, nonuniform, slow_rank
from benchmarks.testbed.measure import Measured

# Okabe-Ito.
MEASURED, PREDICTED, CHOSEN, FAINT = "#0072B2", "#E69F00", "#D55E00", "#999999"


def draw_agreement(found: Sequence[agreement.Agreement], path: Path) -> None:
    """A panel a case: every plan, the chosen one marked, beside the line where prediction and measurement are equal."""

    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(3.2 * columns, 3.2 * lines), squeeze=False)
    for axis, item in zip(axes.flat, found, strict=False):
        names = list(item.predicted)
        predicted = {name: 1e3 * item.predicted[name] for name in names}
        measured = {name: 1e3 * item.measured[name].seconds for name in names}
        below = [max(0.0, measured[name] - 1e3 * item.measured[name].p10) for name in names]
        above = [max(0.0, 1e3 * item.measured[name].p90 - measured[name]) for name in names]
        axis.errorbar(
            list(predicted.values()),
            list(measured.values()),
            yerr=[below, above],
            fmt="o",
            color=MEASURED,
            markersize=4,
            linewidth=0.8,
        )
        chosen = agreement.CHOSEN
        axis.plot([predicted[chosen]], [measured[chosen]], "*", markersize=12, color=CHOSEN, label="chosen")
        every = [*measured.values(), *predicted.values()]
        ends = [0.9 * min(every), 1.1 * max(every)]
        axis.plot(ends, ends, linewidth=0.8, color=FAINT)
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=item.case.name)
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            scale.set_major_formatter(StrMethodFormatter("{x:g}"))
            scale.set_minor_formatter(NullFormatter())
        axis.legend(loc="upper left", frameon=False)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    figure.supxlabel("predicted step, ms")
    figure.supylabel("measured step, ms (bars: middle 80 %)")
    _save(figure, path)


def draw_nonuniform(found: Sequence[nonuniform.Outcome], path: Path) -> None:
    """Step time that the chosen plan saves against the best uniform one, predicted and measured, a pair of bars a case.

    Thin lines: from the chosen plan's slow turns beside the rival's fast ones to the other way about (middle 80 %).
    """
    some = [item for item in found if item.measured_saving(nonuniform.UNIFORM) is not None]
    some.sort(key=lambda item: item.measured_saving(nonuniform.UNIFORM) or 0.0)
    figure, axis = plt.subplots(figsize=(7.0, 1.2 + 0.6 * len(some)))
    for place, item in enumerate(some):
        rival, chosen = item.measured[nonuniform.UNIFORM], item.measured[nonuniform.CHOSEN]
        saved = 100.0 * (1.0 - chosen.seconds / rival.seconds)
        ends = [100.0 * (1.0 - chosen.p90 / rival.p10), 100.0 * (1.0 - chosen.p10 / rival.p90)]
        foreseen = 100.0 * (item.predicted_saving(nonuniform.UNIFORM) or 0.0)
        first = place == 0
        axis.barh(place + 0.18, saved, 0.34, color=MEASURED, label="measured" if first else None)
        axis.plot(ends, [place + 0.18] * 2, color="black", linewidth=0.9)
        axis.barh(place - 0.18, foreseen, 0.34, color=PREDICTED, label="predicted" if first else None)
    axis.set_yticks(range(len(some)), [f"{item.case.name}\n{_where(item.case)}" for item in some])
    axis.axvline(0.0, color="black", linewidth=0.8)
    axis.set_xlabel("step time saved, % of the best uniform plan's")
    axis.legend(loc="lower right", frameon=False)
    _save(figure, path)


def _where(case: nonuniform.Case) -> str:
    return f"{case.bed.num_hosts} x {case.bed.ranks_per_host} ranks"


def draw_slow_rank(found: slow_rank.Recovery, path: Path) -> None:
    """Step times of healthy ranks, even cuts and cuts by speed, and the least that the slow rank leaves possible."""
    names = ("healthy", slow_rank.EVEN, slow_rank.BY_SPEED)
    figure, axis = plt.subplots(figsize=(7.0, 2.6))
    bars(axis, names, (found.healthy, found.even, found.by_speed))
    axis.axvline(1e3 * found.bound, color=CHOSEN, linestyle="--", linewidth=1.2)
    axis.text(1e3 * found.bound, 2.48, " no cut can beat this", color=CHOSEN, va="center", fontsize=9)
    axis.set_xlabel("step, ms (lines: middle 80 %)")
    axis.set_ylim(2.7, -0.5)
    _save(figure, path)


def bars(axis: Axes, names: Sequence[str], each: Sequence[Measured]) -> None:
    """Horizontal bars of step milliseconds with their spread, the first on top."""
    for place, measured in enumerate(each):
        axis.barh(place, 1e3 * measured.seconds, 0.6, color=MEASURED)
        axis.plot([1e3 * measured.p10, 1e3 * measured.p90], [place] * 2, color="black", linewidth=0.9)
    axis.set_yticks(range(len(names)), list(names))


def draw_host_lost(
    names: Sequence[str], measured: Sequence[Sequence[float]], predicted: Sequence[float], path: Path
) -> None:
    """Goodput of every policy in tokens/s: the median of the runs, each run a dot; what was predicted beside it."""
    figure, axis = plt.subplots(figsize=(7.0, 3.0))
    for place, (runs, foreseen) in enumerate(zip(measured, predicted, strict=True)):
        first = place == 0
        axis.barh(place - 0.18, statistics.median(runs), 0.34, color=MEASURED, label="measured" if first else None)
        axis.plot(runs, [place - 0.18] * len(runs), "o", color="black", markersize=3)
        axis.barh(place + 0.18, foreseen, 0.34, color=PREDICTED, label="predicted" if first else None)
    axis.set_yticks(range(len(names)), list(names))
    axis.invert_yaxis()
    axis.set_xlabel("goodput, tokens/s, with one of two hosts lost for a while")
    axis.legend(loc="lower right", frameon=False)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
