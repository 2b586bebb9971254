"""Draws token_contiguous.svg: a stage of seven ranks whose modules have different compositions.

.venv/bin/python docs/figures/token_contiguous.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import rcParams
from matplotlib.figure import Figure

NUM_RANKS = 7
MODULES = [("attention", (4, 3)), ("MLP", (7,)), ("attention", (4, 3)), ("MLP", (1,) * 7), ("head", (2, 2, 3))]
BLOCK_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999"]


def main() -> None:
    """Write the figure beside this script."""
    rcParams["svg.hashsalt"] = "plait"  # same bytes every time
    rcParams["svg.fonttype"] = "none"  # text stays text: small file, searchable
    figure = Figure(figsize=(8.2, 6.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(-2.4, NUM_RANKS + 0.1)
    y = 0.0
    for rank in range(NUM_RANKS):
        axes.text(rank + 0.5, y - 0.35, f"rank {rank}", ha="center", fontsize=9)
    for number, (name, blocks) in enumerate(MODULES):
        _chunks(axes, y, "tokens of a micro-batch" if number == 0 else "same chunks")
        y += 0.62
        _module(axes, y, name, blocks)
        y += 1.12
    _chunks(axes, y, "loss", "loss")
    axes.set_ylim(y + 0.6, -0.7)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


def _chunks(axes, y: float, label: str, what: str = "chunk") -> None:
    for rank in range(NUM_RANKS):
        axes.add_patch(_box(rank + 0.03, y, 0.94, 0.34, facecolor="#eeeeee", edgecolor="#777777", linewidth=0.8))
        axes.text(rank + 0.5, y + 0.17, f"{what} {rank}", ha="center", va="center", fontsize=8)
    axes.text(-0.15, y + 0.17, label, ha="right", va="center", fontsize=9, color="#555555")


def _module(axes, y: float, name: str, blocks: tuple[int, ...]) -> None:
    start = 0
    for block, size in enumerate(blocks):
        colour = BLOCK_COLOURS[block]
        axes.add_patch(_box(start + 0.03, y, size - 0.06, 0.78, facecolor=colour, edgecolor="none", alpha=0.25))
        for rank in range(start, start + size):
            axes.add_patch(_box(rank + 0.08, y + 0.06, 0.84, 0.42, facecolor=colour, edgecolor="none", alpha=0.55))
            share = "all" if size == 1 else f"1/{size}"
            axes.text(
                rank + 0.5, y + 0.27, f"{share} of weights", ha="center", va="center", fontsize=6.5, color="black"
            )
        gather = f"gather {size} chunks, scatter sums back" if size > 2 else "gather 2, scatter sums"
        if size > 1:
            axes.text(start + size / 2, y + 0.63, gather, ha="center", va="center", fontsize=7, color="#222222")
        start += size
    if max(blocks) == 1:
        axes.text(NUM_RANKS / 2, y + 0.63, "no communication", ha="center", va="center", fontsize=7, color="#222222")
    degrees = (
        " + ".join(map(str, blocks)) if len(set(blocks)) > 1 or len(blocks) < 4 else f"{len(blocks)} x {blocks[0]}"
    )
    axes.text(-0.15, y + 0.39, f"{name}: {degrees}", ha="right", va="center", fontsize=10)


def _box(x: float, y: float, width: float, height: float, **style: object):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **style)


if __name__ == "__main__":
    main()
