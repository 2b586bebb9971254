"""A plan's predictions as pictures: memory by rank, step time by term, what each freedom buys, what was not taken."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cost_models.buckets import holdings
from cost_models.memory import PlanMemory
from reports.compare import Comparison
from reports.comparison_plot import COLOURS
from reports.plan import MEMORY_NAMES, STEP_NAMES
from reports.svg import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PINK, RED, SKY, YELLOW, Chart, ink_on, is_narrow
from specs.plan import MemoryTerms, Plan
from specs.runlog import MemoryRecord
from specs.units import num_bytes, percent, seconds

MEMORY_COLOURS = dict(zip(MEMORY_NAMES, (BLUE, ORANGE, GREEN, SKY, PINK, YELLOW, GREY), strict=True))
MAX_BARS = 128  # ranks side by side; of more, the fullest of each stage


def memory_by_rank(plan: Plan) -> dict[str, MemoryTerms]:
    """Predicted peak of every rank of the first replica, in stage order, by label; of the fullest ones when many."""
    assert plan.predicted is not None
    counts = Counter(replica.pipeline for replica in plan.replicas)
    reserved = plan.predicted.peak_memory_terms.reserved
    memory = PlanMemory(plan, holdings(plan), counts, reserved_bytes=reserved)
    replica = plan.replicas[0]
    pipeline = plan.pipelines[replica.pipeline]
    by_stage = [memory.stage(replica.pipeline, stage) for stage in range(len(pipeline.stages))]
    if len(replica.ranks) > MAX_BARS:
        return {f"stage {stage}": max(terms, key=lambda item: item.total()) for stage, terms in enumerate(by_stage)}
    flat = [terms for stage in by_stage for terms in stage]
    return {str(rank): terms for rank, terms in zip(replica.ranks, flat, strict=True)}


def memory_chart(plan: Plan, measured: MemoryRecord | None) -> Chart:
    """Stacked bars by rank against what a rank may fill; dots where a run measured."""
    ranks = memory_by_rank(plan)
    cap = _cap(plan)
    scale, unit = (2**30, "GiB") if cap >= 2**30 else (2**20, "MiB")

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        places = range(len(ranks))
        bottom = [0.0] * len(ranks)
        for name, words in MEMORY_NAMES.items():
            values = [getattr(terms, name) / scale for terms in ranks.values()]
            if any(values):
                axes.bar(places, values, 0.86, bottom, color=MEMORY_COLOURS[name], label=words)
                bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        axes.axhline(cap / scale, color=RED, linewidth=1.5, label="limit")
        if measured is not None:
            found = [
                (place, measured.peak_bytes.get(int(label))) for place, label in enumerate(ranks) if label.isdigit()
            ]
            points = [(place, value / scale) for place, value in found if value is not None]
            axes.plot(
                *zip(*points, strict=True), "D", color=INK, markersize=4, label="measured peak"
            ) if points else None
        every = max(1, -(-len(ranks) // (8 if is_narrow(figure) else 24)))
        axes.set_xticks(list(places)[::every], list(ranks)[::every])
        axes.set_xlabel("rank of the first replica" if next(iter(ranks)).isdigit() else "fullest rank of each stage")
        axes.set_ylabel(unit)
        axes.set_xlim(-0.6, len(ranks) - 0.4)
        figure.legend(loc="outside lower left", ncols=2 if is_narrow(figure) else 9, fontsize=8)

    words = f"Memory by rank against the limit of {num_bytes(cap)}"
    return Chart(draw, (3.4, 4.2), words)


def _cap(plan: Plan) -> int:
    smallest = min(plan.cluster.devices[group.device].memory_bytes for group in plan.cluster.nodes)
    return smallest if plan.memory_cap_bytes is None else min(plan.memory_cap_bytes, smallest)


def step_chart(plan: Plan, comparison: Comparison | None) -> Chart:
    """Where the step's time goes, predicted above measured."""
    assert plan.predicted is not None
    columns = [("predicted", dict(plan.predicted.step_terms.model_dump()))]
    if comparison is not None:
        columns.append(("measured", {name: row.measured.median for name, row in comparison.terms.items()}))

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        longest = max(sum(parts.values()) for _, parts in columns)
        scale, unit = (1.0, "seconds") if longest >= 1 else (1e3, "milliseconds")
        for place, (_, parts) in enumerate(columns):
            left = 0.0
            for name, value in parts.items():
                shown = any(other[name] > 0.002 * longest for _, other in columns)
                label = STEP_NAMES[name] if place == 0 and shown else None
                axes.barh(place, value * scale, 0.7, left * scale, color=COLOURS[name], label=label)
                if value > (0.14 if is_narrow(figure) else 0.05) * longest:
                    ink = ink_on(COLOURS[name])
                    middle = (left + value / 2) * scale
                    axes.text(middle, place, seconds(value), ha="center", va="center", color=ink, fontsize=8)
                left += value
        if comparison is not None:
            spread = comparison.step_time.measured
            low, high = spread.median - spread.p10, spread.p90 - spread.median
            axes.errorbar(
                spread.median * scale,
                1.5,
                xerr=[[low * scale], [high * scale]],
                color=INK,
                capsize=4,
                label="10 to 90 %",
            )
        axes.set_yticks(range(len(columns)), [name for name, _ in columns])
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        figure.legend(loc="outside lower left", ncols=2 if is_narrow(figure) else 9, fontsize=8)

    words = "Step time by term: " + "; ".join(f"{name} {seconds(sum(parts.values()))}" for name, parts in columns)
    return Chart(draw, (1.3 + 0.5 * len(columns), 2.4 + 0.5 * len(columns)), words)


def ladder_chart(plan: Plan) -> Chart:
    """Step time of the best layout under each freedom."""
    rungs = [rung for rung in plan.ladder if rung.step_time_seconds is not None]

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        times = [rung.step_time_seconds or 0.0 for rung in rungs]
        scale, unit = (1.0, "seconds") if max(times) >= 1 else (1e3, "milliseconds")
        axes.barh(range(len(rungs)), [value * scale for value in times], 0.65, color=BLUE)
        for place, (rung, value) in enumerate(zip(rungs, times, strict=True)):
            gain = rung.gain_over_previous
            told = f"  -{100 * gain:.1f} %" if gain is not None and gain >= 5e-4 else ""
            axes.text(value * scale * 0.99, place, f"{seconds(value)}{told}", ha="right", va="center", color="#ffffff")
        axes.set_yticks(range(len(rungs)), [rung.freedom for rung in rungs])
        axes.invert_yaxis()
        axes.set_xlabel(f"{unit} per step")

    words = "; ".join(f"{rung.freedom}: {seconds(rung.step_time_seconds or 0.0)}" for rung in rungs)
    return Chart(draw, (0.9 + 0.32 * len(rungs),) * 2, f"Step time by freedom: {words}")


def alternatives_chart(plan: Plan) -> Chart:
    """Step time and peak memory of the plan and of those that were not taken."""
    assert plan.predicted is not None
    cap = _cap(plan)
    scale, unit = (2**30, "GiB") if cap >= 2**30 else (2**20, "MiB")
    others = [
        (other.step_time_seconds, other.peak_memory_bytes / scale, number)
        for number, other in enumerate(plan.alternatives, start=1)
        if other.step_time_seconds is not None and other.peak_memory_bytes is not None
    ]
    own = (plan.predicted.step_time_seconds, plan.predicted.peak_memory_bytes / scale)

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        time, name = (1.0, "seconds") if own[0] >= 1 else (1e3, "milliseconds")
        axes.plot(own[0] * time, own[1], "*", color=RED, markersize=14, label="this plan")
        for step, memory, number in others:
            axes.plot(step * time, memory, "o", color=BLUE)
            axes.annotate(str(number), (step * time, memory), xytext=(5, 5), textcoords="offset points")
        axes.axhline(cap / scale, color=FAINT, linestyle="--", label="limit")
        axes.margins(0.12)
        axes.set_xlabel(f"{name} per step")
        axes.set_ylabel(f"peak memory, {unit}")
        axes.legend(loc="best")

    words = f"Step time against peak memory of this plan and {len(others)} others"
    return Chart(draw, (3.2, 3.2), words)


def gap_words(plan: Plan) -> str:
    """What the solver proved, in a sentence; empty without a certificate."""
    found = plan.certificate
    if found is None:
        return ""
    if found.status == "optimal":
        return f"Proven: no layout of these freedoms is better (gap {percent(found.gap)})."
    return f"No layout of these freedoms can be more than {percent(found.gap)} better."
