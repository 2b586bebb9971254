"""A plan's predictions as pictures: memory by rank, step time by term, what each freedom buys, what was not taken."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any, NamedTuple

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
MAX_BARS = 128  # ranks side by side
FEW_BARS = 8


class Bars(NamedTuple):
    """Predicted peaks by label, which of the ranks they are in words, and where another replica begins."""

    terms: dict[str, MemoryTerms]
    words: str
    starts: tuple[int, ...]


def memory_by_rank(plan: Plan) -> Bars:
    """Of every rank, replica by replica; of one replica of each kind when there are many; of the fullest in each stage.

    Replicas of one kind share a pipeline, so that rank for rank they hold the same.
    """
    assert plan.predicted is not None
    counts = Counter(replica.pipeline for replica in plan.replicas)
    reserved = plan.predicted.peak_memory_terms.reserved
    memory = PlanMemory(plan, holdings(plan), counts, reserved_bytes=reserved)
    by_stage = {
        number: [memory.stage(number, stage) for stage in range(len(plan.pipelines[number].stages))]
        for number in sorted(counts)
    }
    first = {replica.pipeline: replica for replica in reversed(plan.replicas)}
    kinds = [first[number] for number in sorted(first)]
    for shown, words in (
        (plan.replicas, "rank"),
        (kinds, "rank; the other replicas hold the same" if len(kinds) == 1 else "rank, of one replica of each kind"),
    ):
        if sum(len(replica.ranks) for replica in shown) <= MAX_BARS:
            sizes = [len(replica.ranks) for replica in shown]
            flat = [terms for replica in shown for stage in by_stage[replica.pipeline] for terms in stage]
            ranks = [rank for replica in shown for rank in replica.ranks]
            return Bars(dict(zip(map(str, ranks), flat, strict=True)), words, tuple(accumulate(sizes))[:-1])
    fullest = {
        f"{number}.{stage}" if len(kinds) > 1 else str(stage): max(terms, key=MemoryTerms.total)
        for number, stages in by_stage.items()
        for stage, terms in enumerate(stages)
    }
    starts = tuple(accumulate(len(stages) for stages in by_stage.values()))[:-1]
    several = "kind of replica and " if len(kinds) > 1 else ""
    return Bars(fullest, f"{several}stage: the fullest rank of each", starts)


def memory_chart(plan: Plan, measured: MemoryRecord | None) -> Chart:
    """Stacked bars by rank against what a rank may fill; dots where a run measured."""
    ranks, which, starts = memory_by_rank(plan)
    are_ranks = which.startswith("rank")
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
        for start in starts:
            axes.axvline(start - 0.5, color=FAINT, linewidth=0.8, linestyle=":")
        if measured is not None and are_ranks:
            found = [(place, measured.peak_bytes.get(int(label))) for place, label in enumerate(ranks)]
            points = [(place, value / scale) for place, value in found if value is not None]
            axes.plot(
                *zip(*points, strict=True), "D", color=INK, markersize=4, label="measured peak"
            ) if points else None
        every = max(1, -(-len(ranks) // (8 if is_narrow(figure) else 24)))
        axes.set_xticks(list(places)[::every], list(ranks)[::every])
        axes.set_xlabel(which)
        axes.set_ylabel(unit)
        margin = max(0.0, (FEW_BARS - len(ranks)) / 2)  # a few bars are not as wide as the page
        axes.set_xlim(-0.6 - margin, len(ranks) - 0.4 + margin)
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


def alternatives_chart(plan: Plan) -> Chart | None:
    """Step time and peak memory of the plan and of those that were not taken; None when none of them has both."""
    assert plan.predicted is not None
    cap = _cap(plan)
    scale, unit = (2**30, "GiB") if cap >= 2**30 else (2**20, "MiB")
    points = [
        (other.step_time_seconds, other.peak_memory_bytes, str(number))
        for number, other in enumerate(plan.alternatives, start=1)
        if other.step_time_seconds is not None and other.peak_memory_bytes is not None
    ]
    if not points:
        return None
    names: dict[tuple[str, str], list[str]] = {}  # plans that differ by less than can be seen share their label
    for step, memory, number in points:
        names.setdefault((f"{step:.2e}", f"{memory:.1e}"), []).append(number)
    own = (plan.predicted.step_time_seconds, plan.predicted.peak_memory_bytes)

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        time, name = (1.0, "seconds") if own[0] >= 1 else (1e3, "milliseconds")
        for step, memory, number in points:
            place = step * time, memory / scale
            axes.plot(*place, "o", color=BLUE)
            alike = names[f"{step:.2e}", f"{memory:.1e}"]
            if number == alike[0]:
                axes.annotate(", ".join(alike), place, xytext=(6, 6), textcoords="offset points")
        axes.plot(own[0] * time, own[1] / scale, "*", color=RED, markersize=14, label="this plan")
        axes.axhline(cap / scale, color=FAINT, linestyle="--", label="limit")
        axes.plot([], [], "o", color=BLUE, label="others, by their number below")
        axes.margins(x=0.12)
        axes.set_ylim(0, 1.15 * max(cap, own[1], *(memory for _, memory, _ in points)) / scale)
        axes.set_xlabel(f"{name} per step")
        axes.set_ylabel(f"peak memory, {unit}")
        figure.legend(loc="outside lower left", ncols=3, fontsize=8)

    return Chart(draw, (3.2, 3.2), f"Step time against peak memory of this plan and {len(points)} others")


def gap_words(plan: Plan) -> str:
    """What the solver proved, in a sentence; empty without a certificate."""
    found = plan.certificate
    if found is None:
        return ""
    if found.status == "optimal":
        return f"Proven: no layout of these freedoms is better (gap {percent(found.gap)})."
    gap = percent(found.gap) if found.gap >= 1e-3 else f"{100 * found.gap:.2f} %"
    return f"No layout of these freedoms can be more than {gap} better."
