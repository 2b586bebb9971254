"""One self-contained page about a plan, or about a run under it: no script, nothing to load, dark and light."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from cost_models.delivery import Delivery
from cost_models.pipeline import Span
from reports.account import account_of, attempts_of
from reports.compare import Comparison, compare
from reports.contingency import POLICY_NAMES, next_best, ranks_text
from reports.delivery_charts import policies_chart, waterfall_chart
from reports.goodput import verdict
from reports.layout_chart import layout_chart
from reports.plan import headline
from reports.plan_charts import alternatives_chart, gap_words, ladder_chart, memory_chart, step_chart
from reports.plan_record import as_json
from reports.run_charts import history_chart, loss_chart, seconds_chart
from reports.svg import Drawn, drawn
from reports.timeline_chart import timeline_chart
from specs.errors import BadInputError
from specs.plan import Plan
from specs.runlog import MemoryRecord, Record
from specs.units import num_bytes, percent, rate, seconds

NOTHING_LOST = 1e-4  # of the ideal: a chart of it would show nothing
TEMPLATE = Path(__file__).with_name("page.html.j2")


class Card(NamedTuple):
    """A number and what it is."""

    value: str
    name: str


class Table(NamedTuple):
    """`left`: how many columns are words, aligned left."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: int


@dataclass(frozen=True)
class Section:
    """A question and its answer."""

    title: str
    text: tuple[str, ...] = ()
    charts: tuple[Drawn, ...] = ()
    table: Table | None = None


@dataclass(frozen=True)
class Inputs:
    """What a page is made of.  `spans` and `delivery` None: left out, `missing` says why."""

    plan: Plan
    spans: Sequence[Span] | None = None
    delivery: Delivery | None = None
    records: Sequence[Record] = ()
    missing: tuple[str, ...] = field(default=())


def page(inputs: Inputs, *, source: str) -> str:
    """HTML.  Raises `BadInputError` for a plan without predictions."""
    from jinja2 import Environment, StrictUndefined

    plan = inputs.plan
    if plan.predicted is None:
        raise BadInputError(f"{source}: the plan has no predicted numbers. Add them with `plait estimate`.")
    comparison, missing = None, list(inputs.missing)
    try:
        comparison = compare(plan, inputs.records, where=source) if inputs.records else None
    except BadInputError as error:  # a run that broke off before it was warm has its history all the same
        missing.append(f"Measured beside predicted: {error}")
    inputs = replace(inputs, missing=tuple(missing))
    lead = headline(plan).split("\n")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=f"{plan.model.name} on {plan.cluster.name}",
        lead=[*lead, gap_words(plan)],
        cards=_cards(plan, comparison),
        sections=[*_plan_sections(inputs, comparison), *_run_sections(inputs), *_tables(plan)],
        footer=f"Made by {plan.made.created_by} at {plan.made.created_at}, from {source}.",
    )


def _cards(plan: Plan, comparison: Comparison | None) -> list[Card]:
    predicted = plan.predicted
    assert predicted is not None
    cards = [
        Card(seconds(predicted.step_time_seconds), "step, predicted"),
        Card(rate(predicted.tokens_per_second, "tokens"), "speed, predicted"),
        Card(rate(predicted.goodput_tokens_per_second, "tokens"), "goodput, predicted"),
        Card(num_bytes(predicted.peak_memory_bytes), "fullest rank, predicted"),
    ]
    if comparison is not None:
        error, peak = comparison.step_time.error, comparison.memory.get("peak")
        cards += [
            Card(
                seconds(comparison.step_time.measured.median),
                "step, measured" + ("" if error is None else f" (prediction {percent(error, signed=True)})"),
            ),
            Card(rate(comparison.tokens_per_second.measured.median, "tokens"), "speed, measured"),
            Card(rate(comparison.account.goodput_tokens_per_second, "tokens"), "goodput, measured"),
            *([] if peak is None else [Card(num_bytes(int(peak.measured.median)), "fullest rank, measured")]),
        ]
    return cards


def _plan_sections(inputs: Inputs, comparison: Comparison | None) -> list[Section]:
    plan = inputs.plan
    memory = next((record for record in reversed(inputs.records) if isinstance(record, MemoryRecord)), None)
    layouts = []
    for number in range(len(plan.pipelines)):
        count = sum(replica.pipeline == number for replica in plan.replicas)
        if count:
            layouts.append(drawn(layout_chart(plan, number)))
    sections = [
        Section(
            "How is the model cut?",
            (
                "Each rectangle is a block of ranks that holds one copy of the modules below it, with its degree. "
                "Thin lines lie between blocks and where a choice changes, thick ones where a pipeline stage ends.",
            ),
            tuple(layouts),
        ),
        Section(
            "Does it fit?",
            ("Memory at its peak, by rank, against what a rank may fill.",),
            (drawn(memory_chart(plan, memory)),),
        ),
        Section(
            "Where does a step's time go?",
            (comparison.explanation,) if comparison else ("Means over ranks; they add up to the step.",),
            (drawn(step_chart(plan, comparison)),),
        ),
    ]
    if inputs.spans is not None:
        text = "Each number is a micro-batch; where there is no bar, a stage waits."
        sections.append(Section("What does the pipeline do?", (text,), (drawn(timeline_chart(inputs.spans)),)))
    if plan.ladder:
        text = "The best layout with one more freedom each, all priced by the same model."
        sections.append(Section("What does each freedom buy?", (text,), (drawn(ladder_chart(plan)),)))
    if inputs.delivery is not None:
        found = inputs.delivery
        said = verdict(found)
        delivered = found.chosen.outcome.mean
        text = (
            f"{found.days:g} days of failures, saves and restarts, played {found.trials} times under policy "
            f"{found.chosen.policy.name}: {percent(delivered)} of the ideal is delivered."
        )
        all_kept = 1.0 - delivered < NOTHING_LOST
        charts = () if all_kept else (drawn(waterfall_chart(found)), drawn(policies_chart(found)))
        told = "So few devices hardly ever fail in that time." if all_kept else said
        sections.append(Section("What is left after failures?", (text, *([told] if told else [])), charts))
    if inputs.missing:
        sections.append(Section("What is not shown", inputs.missing))
    return sections


def _run_sections(inputs: Inputs) -> list[Section]:
    if not inputs.records:
        return []
    attempts = attempts_of(inputs.records)
    if not any(attempt.steps for attempt in attempts):
        return []
    account = account_of(attempts)
    wasted = account.num_wasted_steps
    starts = "1 start" if account.num_attempts == 1 else f"{account.num_attempts} starts"
    text = f"{len(account.kept)} steps kept, {wasted} done in vain, {starts}, {seconds(account.wall_seconds)} in all."
    history = drawn(history_chart(attempts, inputs.records))
    return [
        Section("What happened?", (text,), (history,)),
        Section("What did it learn?", (), (drawn(loss_chart(attempts)),)),
        Section("Where did the run's time go?", (), (drawn(seconds_chart(account.seconds)),)),
    ]


def _tables(plan: Plan) -> list[Section]:
    rows = []
    for number, pipeline in enumerate(as_json(plan)["pipelines"]):
        for index, stage in enumerate(pipeline["stages"]):
            for run in stage["modules"]:
                place = f"{number}.{index}" if len(plan.pipelines) > 1 else str(index)
                blocks = " + ".join(map(str, run["blocks"]))
                rows.append((place, run["modules"], blocks, run["recompute"], f"zero {run['zero']}"))
    layout = Table(("stage", "modules", "blocks of ranks", "recompute", "optimizer"), rows, 5)
    sections = []
    if plan.alternatives:
        others = [
            (
                str(number),
                other.layout,
                other.reason,
                "" if other.step_time_seconds is None else seconds(other.step_time_seconds),
                "" if other.peak_memory_bytes is None else num_bytes(other.peak_memory_bytes),
            )
            for number, other in enumerate(plan.alternatives, start=1)
        ]
        table = Table(("", "layout", "why not", "step", "peak memory"), others, 3)
        chart = alternatives_chart(plan)
        sections.append(Section("What was not taken?", (), (drawn(chart),) if chart else (), table))
    if plan.contingencies:
        sections.append(_losses(plan))
    return [*sections, Section("The layout in full", (), (), layout)]


def _losses(plan: Plan) -> Section:
    """What each lost device leads to."""
    assert plan.predicted is not None
    rows = []
    for one in plan.contingencies:
        speed = percent(one.predicted.tokens_per_second / plan.predicted.tokens_per_second)
        whole = one.global_batch == plan.training.global_batch
        rows.append(
            (
                ranks_text(one),
                f"{POLICY_NAMES[one.policy]}: {one.layout}",
                next_best(one),
                speed,
                "whole" if whole else str(one.global_batch),
                num_bytes(one.predicted.peak_memory_bytes),
            )
        )
    table = Table(("rank", "its replica", "next best", "speed", "batch", "peak memory"), rows, 3)
    return Section("What happens when a device is lost?", ("Solved beforehand, and kept in the plan.",), (), table)
