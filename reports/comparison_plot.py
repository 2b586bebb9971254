"""A comparison as a picture: the step's terms stacked, predicted beside measured."""

from __future__ import annotations

from pathlib import Path

from reports.compare import TERM_NAMES, Comparison
from reports.figures import new_figure, save_figure
from specs.units import percent, seconds

# Okabe-Ito colours: told apart with any colour vision.
COLOURS = {
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "tp_communication": "#E69F00",
    "pipeline_idle": "#CC79A7",
    "gradient_sync": "#D55E00",
    "optimizer": "#009E73",
    "data": "#F0E442",
    "other": "#999999",
}
DARK = ("forward", "optimizer", "gradient_sync")


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture; the format follows the file's ending.  Raises `BadInputError` when that cannot be done."""
    figure, axes = new_figure(width=7.0, height=4.6)
    columns = (
        ("predicted", {name: row.predicted for name, row in comparison.terms.items()}),
        ("measured", {name: row.measured.median for name, row in comparison.terms.items()}),
    )
    tallest = max(sum(parts.values()) for _, parts in columns)
    for position, (_, parts) in enumerate(columns):
        bottom = 0.0
        for name, value in parts.items():
            visible = any(column[name] > 0.002 * tallest for _, column in columns)
            label = TERM_NAMES[name] if position == 0 and visible else None
            axes.bar(position, value * 1e3, 0.62, bottom=bottom * 1e3, color=COLOURS[name], label=label)
            if value > 0.04 * tallest:
                ink = "white" if name in DARK else "black"
                middle = (bottom + value / 2) * 1e3
                axes.text(position, middle, seconds(value), ha="center", va="center", fontsize=9, color=ink)
            bottom += value
    measured = comparison.step_time.measured
    axes.errorbar(
        1.4,  # beside the bar, clear of its labels
        measured.median * 1e3,
        yerr=[[(measured.median - measured.p10) * 1e3], [(measured.p90 - measured.median) * 1e3]],
        color="black",
        capsize=6,
        linewidth=1.2,
        label="step, 10 % to 90 %",
    )
    error = comparison.step_time.error or 0.0
    verdict = f"{percent(abs(error))} {'below' if error < 0 else 'above'} the measured median"
    axes.set_xticks(
        [0, 1], [f"predicted\n{seconds(comparison.step_time.predicted)}", f"measured\n{seconds(measured.median)}"]
    )
    axes.set_xlim(-0.6, 1.6)
    axes.set_ylabel("milliseconds per step")
    axes.set_title(f"The predicted step time is {verdict}", loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, reverse=True)
    save_figure(figure, path)
