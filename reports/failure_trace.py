"""A run with failures beside what the same failures should have cost: seconds by bucket, tokens, goodput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.table import Table

from cost_models.failure_trace import TracePrediction, WayOn, predict_trace, trace_of
from reports.account import Account, account_of, attempts_of
from specs.base import load_document
from specs.options import TrainOptions
from specs.plan import Plan
from specs.runlog import CheckpointRecord, IncidentRecord, Record, read_log
from specs.units import percent, rate, seconds

STARTING = ("program_startup", "accelerator_initialization", "training_preparation", "checkpoint_restore")
# What the prediction takes from the run itself; all else follows from plans.
MEASURED = "start-up, evaluation, saves and the parts of an interruption as measured, on average; steps as planned"


# The plan that a run's options lead to without some ranks.
PlanWithout = Callable[[Plan, TrainOptions, frozenset[int]], Plan]


@dataclass(frozen=True)
class TraceComparison:
    """Seconds by bucket, predicted and measured.  Steps on fewer ranks beyond those on all of them stand apart."""

    predicted: TracePrediction
    account: Account
    rows: tuple[tuple[str, float, float], ...]

    @property
    def predicted_goodput(self) -> float:
        """Kept tokens per second of wall clock."""
        return self.predicted.tokens / self.predicted.wall_seconds

    @property
    def error(self) -> float:
        """# (predicted - measured) / measured goodput"""
        return self.predicted_goodput / self.account.goodput_tokens_per_second - 1.0

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "goodput_tokens_per_second": {
                "predicted": self.predicted_goodput,
                "measured": self.account.goodput_tokens_per_second,
                "error": self.error,
            },
            "seconds": {name: {"predicted": ours, "measured": found} for name, ours, found in self.rows},
            "assumes": MEASURED,
        }


def compare_failures(folder: Path, plan_without: PlanWithout) -> TraceComparison | None:
    """Of a run folder; None for a run without interruptions or without a kept step.  Raises `BadInputError`."""
    records = read_log(folder / "log.jsonl")
    if not any(isinstance(record, IncidentRecord) for record in records):
        return None
    plan = load_document(Plan, folder / "plan.json", "plan")
    options = load_document(TrainOptions, folder / "options.json", "options")
    return compare_records(plan, records, lambda lost: plan_without(plan, options, lost))


def compare_records(plan: Plan, records: Sequence[Record], way_on: WayOn) -> TraceComparison | None:
    """As `compare_failures`, of a log that was read."""
    incidents = [record for record in records if isinstance(record, IncidentRecord)]
    account = account_of(attempts_of(records))
    if not incidents or not account.kept:
        return None
    events, means = trace_of(incidents)
    saves = [record.seconds for record in records if isinstance(record, CheckpointRecord)]
    number = account.kept[-1].step
    interruptions = means.with_run(
        startup=sum(account.seconds.get(bucket, 0.0) for bucket in STARTING),
        evaluation=account.seconds.get("evaluation", 0.0),
        save=fmean(saves) if saves else 0.0,
        num_saves=len(saves),
    )
    found = predict_trace(plan, events, num_steps=number, interruptions=interruptions, way_on=way_on)
    return TraceComparison(found, account, _rows(found, account))


def _rows(predicted: TracePrediction, account: Account) -> tuple[tuple[str, float, float], ...]:
    ours = {str(bucket): spent for bucket, spent in predicted.seconds.items()}
    ours["step"] -= predicted.degraded_seconds
    ours["degraded_operation"] = predicted.degraded_seconds
    found = dict(account.seconds)
    found["program_startup"] = sum(found.pop(bucket, 0.0) for bucket in STARTING)
    names = sorted({*ours, *found}, key=lambda name: -found.get(name, 0.0))
    return tuple((name, ours.get(name, 0.0), found.get(name, 0.0)) for name in names)


def render(comparison: TraceComparison) -> Table:
    """Bucket by bucket, then the whole."""
    table = Table(
        title="With these failures",
        caption=MEASURED,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for number, name in enumerate(("", "predicted", "measured")):
        table.add_column(name, header_style="dim", justify="right" if number else "left")
    for name, ours, found in comparison.rows:
        if ours or found:
            table.add_row(name.replace("_", " "), seconds(ours), seconds(found))
    table.add_row("wall clock", seconds(comparison.predicted.wall_seconds), seconds(comparison.account.wall_seconds))
    table.add_row(
        f"goodput ({percent(comparison.error, signed=True)})",
        rate(comparison.predicted_goodput, "tokens"),
        rate(comparison.account.goodput_tokens_per_second, "tokens"),
        style="bold",
    )
    return table
