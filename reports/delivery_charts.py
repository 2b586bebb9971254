"""What a plan delivers over weeks of failures, for a page: from ideal to delivered, and policies side by side."""

from __future__ import annotations

from typing import Any

from cost_models.delivery import Delivery
from reports.goodput import POLICY_NAMES, waterfall
from reports.svg import BLUE, RED, Chart, is_narrow


def waterfall_chart(delivery: Delivery) -> Chart:
    """Shares of the ideal, losses one after the other."""
    rows = waterfall(delivery)
    delivered = rows[-1][1]

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        top = 1.0
        for place, (name, share) in enumerate(rows):
            whole = name in ("ideal", "delivered")
            top = share if whole else top + share
            left, size = (0.0, share) if whole else (top, -share)
            axes.barh(place, 100 * size, 0.7, 100 * left, color=BLUE if whole else RED)
            axes.annotate(
                f"{100 * share:.2f} %" if abs(share) >= 5e-5 else "0 %",
                (1, place),
                xycoords=("axes fraction", "data"),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                annotation_clip=False,
            )
        axes.set_yticks(range(len(rows)), [name.replace("_", " ") for name, _ in rows])
        axes.invert_yaxis()
        axes.set_xlim(max(100 * delivered - 5, 0), 100)
        axes.set_xlabel("% of the ideal")

    return Chart(draw, (2.6, 2.8), f"From ideal to delivered: {100 * delivered:.2f} %")


def policies_chart(delivery: Delivery) -> Chart:
    """Median and the range from 5 to 95 % of the histories, by policy."""
    results = sorted(delivery.results, key=lambda item: item.outcome.mean)

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for place, result in enumerate(results):
            low, middle, high = (100 * value for value in result.outcome.quantiles())
            axes.plot([low, high], [place, place], color=BLUE, linewidth=3, solid_capstyle="round")
            axes.plot([middle], [place], "o", color=RED)
        labels = [
            result.policy.name if is_narrow(figure) else f"{result.policy.name}: {POLICY_NAMES[result.policy.name]}"
            for result in results
        ]
        axes.set_yticks(range(len(results)), labels)
        axes.set_xlabel("% of the ideal: median, 5 to 95 %")
        axes.grid(axis="x")

    best = results[-1]
    return Chart(
        draw, (2.8, 2.8), f"Policies compared; {best.policy.name} delivers most, {100 * best.outcome.mean:.2f} %"
    )
