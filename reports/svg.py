"""Figures for a page: SVG to put into HTML, whose ink and paper follow the page's colours, dark or light."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any, NamedTuple

# Stand-ins that no palette uses; in the SVG they become the page's variables.
INK, FAINT, PAPER = "#010203", "#8a8b8c", "#fdfcfb"
VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", PAPER: "var(--paper)"}
WIDE, NARROW = 12.0, 5.0  # inches; the page shows one of the two

# Okabe-Ito: told apart with any colour vision.
BLUE, SKY, ORANGE, PINK, RED, GREEN, YELLOW, GREY = (
    "#0072B2",
    "#56B4E9",
    "#E69F00",
    "#CC79A7",
    "#D55E00",
    "#009E73",
    "#F0E442",
    "#999999",
)
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)
ON_DARK = (BLUE, GREEN, RED)  # fills on which white is read better than black

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "plait",
    "font.size": 9,
    "font.family": "sans-serif",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "hatch.color": INK,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK),
    "grid.color": FAINT,
    "grid.alpha": 0.35,
}

# Draws into a figure that is so many inches wide; the height is its own business.
Draw = Callable[[Any], None]


class Chart(NamedTuple):
    """Heights in inches, wide and narrow; `words` say what is to be seen, for those who do not see it."""

    draw: Draw
    heights: tuple[float, float]
    words: str


class Drawn(NamedTuple):
    """Both versions of a chart as SVG elements."""

    wide: str
    narrow: str


def drawn(chart: Chart) -> Drawn:
    """Draw a chart at both widths."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    versions = []
    with mpl.rc_context(STYLE):
        for width, height in zip((WIDE, NARROW), chart.heights, strict=True):
            figure = Figure(figsize=(width, height), layout="constrained")
            chart.draw(figure)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
            versions.append(_inline(buffer.getvalue(), chart.words))
    return Drawn(*versions)


def is_narrow(figure: Any) -> bool:
    """Whether this is the version for small windows."""
    return bool(figure.get_figwidth() <= NARROW)


def ink_on(colour: str) -> str:
    """Text colour on a fill."""
    return "#ffffff" if colour in ON_DARK else "#000000"


def _inline(svg: str, words: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    label = words.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    for stand_in, variable in VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    return svg
