"""A plan's layout as a picture: layers along, ranks across, coloured by degree, with stages and recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from reports.svg import FAINT, GREY, INK, PALETTE, PAPER, Chart, ink_on, is_narrow
from specs.layout import block_starts
from specs.model import Module
from specs.plan import ModulePlacement, Pipeline, Plan

BANDS = ("attention", "feed-forward")
GAP = 0.32  # between the bands, of a band's height
STRIP = 0.1  # of recomputation, under each band


class Run(NamedTuple):
    """Neighbouring modules of one band that lie alike: from `start` to `stop` along the chain's layers."""

    band: int
    start: float
    stop: float
    stage: int
    placement: ModulePlacement
    module: Module


def layout_chart(plan: Plan, number: int) -> Chart:
    """Of one pipeline of a plan."""
    pipeline = plan.pipelines[number]
    degrees = sorted({placement.degree for placement in pipeline.chain()})
    colours = {degree: PALETTE[index % len(PALETTE)] for index, degree in enumerate(degrees)}
    runs = list(_runs(plan, pipeline))

    edge = _edge_width(plan)

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.add_subplot()
        for run in runs:
            _draw_run(axes, run, colours, labelled=plan.model.num_layers / (25 if is_narrow(figure) else 60))
        _draw_stages(axes, plan, pipeline)
        axes.set_yticks([_bottom(band) + 0.5 for band in range(2)], BANDS)
        axes.tick_params(length=0)
        axes.set_xlim(-1.6 * edge, plan.model.num_layers + 1.6 * edge)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= plan.model.num_layers])
        axes.set_ylim(_bottom(1) - STRIP - 0.05, _bottom(0) + 1.3)
        axes.set_xlabel("layer (left of them the embedding, right the head)")
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        _legend(figure, colours, runs)

    words = f"Layout of {len(pipeline.stages)} stages, degrees {', '.join(map(str, degrees))}"
    return Chart(draw, (3.1, 3.3), words)


def _edge_width(plan: Plan) -> float:
    """Of the embedding and of the head, in layers."""
    return plan.model.num_layers / 50


def _bottom(band: int) -> float:
    return (1 - band) * (1 + GAP)


def _runs(plan: Plan, pipeline: Pipeline) -> Iterator[Run]:
    modules = dict(plan.model.modules())
    last, edge = plan.model.num_layers, _edge_width(plan)
    items: list[Run] = []
    own = [stage.runs() for stage in pipeline.stages]
    for turn in range(pipeline.num_virtual):
        for stage, runs in enumerate(own):
            for placement in runs[turn]:
                module = modules[placement.module]
                if module.kind in ("embedding", "head"):
                    at = -1.5 * edge if module.kind == "embedding" else last + 0.5 * edge
                    items += [Run(band, at, at + edge, stage, placement, module) for band in range(2)]
                    continue
                layer = int(placement.module.split(".")[1])
                band = 0 if placement.module.endswith("attention") else 1
                items.append(Run(band, layer, layer + 1, stage, placement, module))
    for band in range(2):
        for _, group in groupby((item for item in items if item.band == band), key=_alike):
            first, *rest = group
            yield first._replace(stop=rest[-1].stop if rest else first.stop)


def _alike(run: Run) -> tuple[object, ...]:
    placement = run.placement
    ends = run.start if run.module.kind in ("embedding", "head") else None
    return run.stage, ends, placement.blocks, placement.cuts, placement.recompute


def _draw_run(axes: Any, run: Run, colours: dict[int, str], *, labelled: float) -> None:
    """Blocks one above the other, rank 0 on top; thin lines between ranks lie where the weights are cut.

    Runs of fewer than `labelled` layers have no room for their degree.
    """
    bottom, blocks = _bottom(run.band), run.placement.blocks
    width, total = run.stop - run.start, sum(blocks)
    for index, (start, size) in enumerate(zip(block_starts(blocks), blocks, strict=False)):
        top, height = bottom + 1 - start / total, size / total
        colour = colours.get(size, GREY)
        axes.bar(run.start, height, width, top - height, align="edge", color=colour, edgecolor=PAPER, linewidth=1.2)
        cuts = run.placement.block_cuts(index, run.module)
        for cut in cuts[1:-1]:
            y = top - height * cut / cuts[-1]
            axes.plot([run.start, run.stop], [y, y], color=PAPER, linewidth=0.4)
        if width > labelled and height > 0.15:
            axes.text(
                run.start + width / 2,
                top - height / 2,
                str(size),
                ha="center",
                va="center",
                color=ink_on(colour),
                clip_on=True,
            )
    if run.placement.recompute in ("selective", "full"):
        full = run.placement.recompute == "full"
        axes.bar(
            run.start,
            STRIP * 0.8,
            width,
            bottom - STRIP,
            align="edge",
            color=INK if full else FAINT,
            edgecolor=PAPER,
            linewidth=0.5,
        )


def _draw_stages(axes: Any, plan: Plan, pipeline: Pipeline) -> None:
    """A bracket over the modules of each stage, and lines where stages end, stepped when inside a layer."""
    top = _bottom(0) + 1.06
    margin = plan.model.num_layers / 250
    own = [stage.runs() for stage in pipeline.stages]
    places = [(stage, runs[turn]) for turn in range(pipeline.num_virtual) for stage, runs in enumerate(own)]
    every = max(1, round(len(places) * 3 / plan.model.num_layers)) if len(places) > 8 else 1
    for index, (stage, placements) in enumerate(places):
        layers = [int(p.module.split(".")[1]) for p in placements if "." in p.module]
        start = min(layers, default=0) if index else -1.5 * _edge_width(plan)
        stop = (
            max(layers, default=0) + 1 if index < len(places) - 1 else plan.model.num_layers + 1.5 * _edge_width(plan)
        )
        if placements[0].module.endswith(("mlp", "moe")):
            start += 0.5
        if placements[-1].module.endswith("attention"):
            stop -= 0.5
        axes.plot([start + margin, stop - margin], [top, top], color=INK, linewidth=2)
        label = f"stage {stage}" if len(places) <= 6 else str(stage)
        if index % every == 0:
            axes.text((start + stop) / 2, top + 0.05, label, ha="center", va="bottom")
        if index:
            boundary = (start - 0.5, start + 0.5) if start % 1 else (start, start)
            for band, shift in enumerate((1, 0)):
                low = _bottom(band)
                at = boundary[shift] if start % 1 else start
                axes.plot([at, at], [low - STRIP, low + 1], color=INK, linewidth=1.4)


def _legend(figure: Any, colours: dict[int, str], runs: list[Run]) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(color=colour, label=f"degree {degree}") for degree, colour in colours.items()]
    modes = {run.placement.recompute for run in runs}
    entries += [
        Patch(color=colour, label=f"recomputed {words}")
        for mode, colour, words in (("selective", FAINT, "selectively"), ("full", INK, "in full"))
        if mode in modes
    ]
    figure.legend(handles=entries, loc="outside lower left", ncols=len(entries) if figure.get_figwidth() > 6 else 3)
