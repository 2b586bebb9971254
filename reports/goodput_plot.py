"""The waterfall from ideal to delivered and the policies side by side, as a picture."""

from __future__ import annotations

from pathlib import Path

from cost_models.delivery import Delivery
from reports.figures import new_figure, save_figure
from reports.goodput import waterfall

BLUE, RED = "#0072B2", "#D55E00"  # Okabe-Ito: told apart with any colour vision


def draw(delivery: Delivery, path: Path) -> None:
    """Write the picture; the format follows the file's ending.  Raises `BadInputError` when that cannot be done."""
    figure, _ = new_figure(width=10.0, height=3.6)
    figure.clear()
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    rows = waterfall(delivery)
    top = 1.0
    for place, (name, share) in enumerate(rows):
        whole = name in ("ideal", "delivered")
        height = share if whole else -share
        top = share if whole else top + share
        left.barh(place, height, left=0.0 if whole else top, color=BLUE if whole else RED)
        left.text(1.005, place, f"{100 * share:.2f} %", va="center", fontsize=8)
    left.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    left.invert_yaxis()
    left.set_xlim(max(rows[-1][1] - 0.05, 0.0), 1.0)
    left.set_xlabel("share of ideal")
    results = sorted(delivery.results, key=lambda item: item.outcome.mean)
    for place, result in enumerate(results):
        low, middle, high = result.outcome.quantiles()
        right.plot([low, high], [place, place], color=BLUE)
        right.plot([middle], [place], "o", color=BLUE)
    right.set_yticks(range(len(results)), [result.policy.name for result in results], fontsize=8)
    right.set_xlabel("share of ideal: 5, 50, 95 %")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
