"""The passes of one predicted step, for a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cost_models.pipeline import Span
from reports.svg import PAPER, Chart, ink_on, is_narrow
from reports.timeline import COLOURS, NEXT_COLOURS
from specs.units import percent, seconds

WORDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
BARS_PER_STAGE = (40, 16)  # in a wide and a narrow window; of more than that, nothing can be told apart


def timeline_chart(spans: Sequence[Span]) -> Chart:
    """Of one replica; of a long step the beginning."""
    num_stages = 1 + max(span.stage for span in spans)
    makespan = max(span.stop for span in spans)
    ordered = sorted(spans, key=lambda span: span.start)
    idle = 1 - sum(span.stop - span.start for span in spans) / (num_stages * makespan)

    def draw(figure: Any) -> None:
        from matplotlib.patches import Patch

        axes = figure.add_subplot()
        shown = ordered[: BARS_PER_STAGE[is_narrow(figure)] * num_stages]
        end = makespan if len(shown) == len(ordered) else shown[-1].start
        scale, unit = (1.0, "seconds") if end >= 1 else (1e3, "milliseconds")
        bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
        used: dict[str, str] = {}
        for span in shown:
            kind, number, virtual = span.action
            colour = (NEXT_COLOURS if virtual % 2 else COLOURS)[kind]
            used.setdefault(colour, WORDS[kind] + (", odd virtual stages" if virtual % 2 else ""))
            bars.setdefault((span.stage, colour), []).append((span.start * scale, (span.stop - span.start) * scale))
            if span.stop - span.start > 0.018 * end and span.stop <= end:
                middle = (span.start + span.stop) / 2 * scale
                ink = ink_on(colour)
                axes.text(middle, span.stage, str(number), ha="center", va="center", fontsize=7, color=ink)
        for (stage, colour), places in bars.items():
            axes.broken_barh(places, (stage - 0.4, 0.8), facecolors=colour, edgecolors=PAPER, linewidth=0.8)
        axes.set_yticks(range(num_stages), [str(stage) for stage in range(num_stages)])
        axes.set_ylabel("stage")
        axes.invert_yaxis()
        axes.set_xlim(0, end * scale)
        axes.set_xlabel(unit if end == makespan else f"{unit}, the first of {makespan * scale:.3g}")
        figure.legend(
            handles=[Patch(color=colour, label=words) for colour, words in used.items()],
            loc="outside lower left",
            ncols=2 if is_narrow(figure) else 6,
            fontsize=8,
        )

    height = 1.3 + 0.3 * num_stages
    words = f"Passes of one step on {num_stages} stages: {seconds(makespan)}, {percent(idle)} idle"
    return Chart(draw, (height, height + 0.4), words)
