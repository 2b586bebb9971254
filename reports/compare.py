"""Predicted against measured: a plan's numbers beside what its run's log says.

Measured step time and its terms are medians over the steps that are neither warm-up nor repeated later; the
spread is from the 10th to the 90th percentile.  Each term has its own median, so they need not add up to the
step's to the last digit.  error = (predicted - measured) / measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reports.account import Account, account_of, attempts_of
from specs.base import load_document
from specs.errors import BadInputError
from specs.plan import Plan, StepTerms
from specs.runlog import MemoryRecord, Record, StepRecord, read_log
from specs.units import percent, seconds

TERM_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "tp_communication": "TP communication",
    "pipeline_idle": "pipeline idle",
    "gradient_sync": "gradient sync",
    "optimizer": "optimizer",
    "data": "data",
    "other": "other",
}


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of a few numbers."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Percentiles by linear interpolation between the sorted values; `values` must not be empty."""
        median = statistics.median(values)
        if len(values) == 1:
            return Spread(median, median, median)
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        # Interpolation between equal values may miss them by a rounding error.
        return Spread(median, max(min(tenths[0], median), min(values)), min(max(tenths[-1], median), max(values)))


@dataclass(frozen=True)
class Row:
    """One quantity.  `error` is a fraction, None where nothing was measured."""

    predicted: float
    measured: Spread

    @property
    def error(self) -> float | None:
        return (self.predicted - self.measured.median) / self.measured.median if self.measured.median else None

    @property
    def difference(self) -> float:
        """Measured less predicted."""
        return self.measured.median - self.predicted


@dataclass(frozen=True)
class Comparison:
    """Everything that the report shows."""

    step_time: Row
    terms: dict[str, Row]
    memory: dict[str, Row]
    memory_method: str
    tokens_per_second: Row
    predicted_goodput: float
    steady_goodput: float
    account: Account
    num_steps: int
    estimated: bool
    explanation: str
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """Plain data: rows as {predicted, measured, p10, p90, error}."""
        return {
            "step_time_seconds": _row_json(self.step_time),
            "step_terms_seconds": {name: _row_json(row) for name, row in self.terms.items()},
            "memory_bytes": {name: _row_json(row) for name, row in self.memory.items()},
            "memory_method": self.memory_method,
            "tokens_per_second": _row_json(self.tokens_per_second),
            "goodput_tokens_per_second": {
                "predicted": self.predicted_goodput,
                "measured": self.account.goodput_tokens_per_second,
                "measured_steady_state": self.steady_goodput,
            },
            "wall_seconds": self.account.wall_seconds,
            "seconds": self.account.seconds,
            "num_steps": self.num_steps,
            "num_attempts": self.account.num_attempts,
            "num_wasted_steps": self.account.num_wasted_steps,
            "finished": self.account.finished,
            "prediction_is_estimated": self.estimated,
            "explanation": self.explanation,
            "notes": list(self.notes),
        }


def _row_json(row: Row) -> dict[str, float | None]:
    measured = asdict(row.measured)
    return {
        "predicted": row.predicted,
        "measured": measured["median"],
        "p10": measured["p10"],
        "p90": measured["p90"],
        "error": row.error,
    }


def compare_run(folder: Path) -> Comparison:
    """Compare the plan and the log of a run folder.  Raises `BadInputError` when one of them cannot serve."""
    if not folder.is_dir():
        raise BadInputError(f"run folder {folder} does not exist. Give the folder that `plait train --out` made.")
    plan = load_document(Plan, folder / "plan.json", "plan")
    return compare(plan, read_log(folder / "log.jsonl"), where=f"run {folder}")


def compare(plan: Plan, records: Sequence[Record], *, where: str) -> Comparison:
    """Compare a plan with a run's records; `where` names the run in errors."""
    predicted = plan.predicted
    if predicted is None:
        raise BadInputError(f"{where}: its plan has no predicted numbers. Add them with `plait estimate`.")
    attempts = attempts_of(records)
    account = account_of(attempts)
    steady = [step for step in account.kept if not step.warm_up]
    if not steady:
        raise BadInputError(
            f"{where}: no step to measure ({len(account.kept)} steps kept, all of them warm-up). Train for more steps."
            if account.kept
            else f"{where}: the log has no step. The run stopped before its first one."
        )
    terms = {
        name: Row(getattr(predicted.step_terms, name), Spread.of([getattr(step.terms, name) for step in steady]))
        for name in StepTerms.model_fields
    }
    step_time = Row(predicted.step_time_seconds, Spread.of([step.seconds for step in steady]))
    rates = [step.tokens / step.seconds for step in steady if step.seconds]
    memory_records = [record for attempt in attempts for record in attempt.memory]
    return Comparison(
        step_time=step_time,
        terms=terms,
        memory=_memory_rows(plan, memory_records),
        memory_method=memory_records[-1].method if memory_records else "",
        tokens_per_second=Row(predicted.tokens_per_second, Spread.of(rates or [0.0])),
        predicted_goodput=predicted.goodput_tokens_per_second,
        steady_goodput=_steady_goodput(account, steady),
        account=account,
        num_steps=len(steady),
        estimated=predicted.estimated,
        explanation=explain(step_time, terms),
        notes=_notes(plan, records, account, bool(memory_records)),
    )


def _steady_goodput(account: Account, steady: Sequence[StepRecord]) -> float:
    """Kept tokens per second without start-up: steps after warm-up, and what training waited for checkpoints."""
    spent = sum(step.seconds for step in steady) + account.seconds.get("checkpoint_save", 0.0)
    return sum(step.tokens for step in steady) / spent if spent else 0.0


def _memory_rows(plan: Plan, records: Sequence[MemoryRecord]) -> dict[str, Row]:
    """Fullest rank against fullest rank; their parts where the record has them."""
    if not records or plan.predicted is None:
        return {}
    last = records[-1]
    rank = max(last.peak_bytes, key=lambda candidate: last.peak_bytes[candidate])
    terms = plan.predicted.peak_memory_terms
    pairs = {
        "peak": (plan.predicted.peak_memory_bytes, last.peak_bytes[rank]),
        "weights, gradients, optimizer": (
            terms.weights + terms.gradients + terms.optimizer,
            last.static_bytes.get(rank, 0),
        ),
        "activations": (terms.activations, last.activation_bytes.get(rank, 0)),
    }
    return {name: Row(expected, Spread.of([found])) for name, (expected, found) in pairs.items()}


def explain(step_time: Row, terms: dict[str, Row]) -> str:
    """One plain sentence on the largest difference between prediction and measurement."""
    name = max(terms, key=lambda term: abs(terms[term].difference))
    row, gap = terms[name], step_time.difference
    total = (
        f"A step takes {seconds(step_time.measured.median)}, {seconds(abs(gap))} "
        f"({percent(abs(gap) / step_time.predicted)}) {'more' if gap > 0 else 'less'} than predicted"
    )
    part = (
        f"{TERM_NAMES[name]} ({seconds(row.measured.median)} measured, {seconds(row.predicted)} predicted: "
        f"{seconds(abs(row.difference))} {'more' if row.difference > 0 else 'less'}"
    )
    if gap * row.difference <= 0:
        return f"{total}; the largest single difference goes the other way: {part}), and other terms outweigh it."
    share = row.difference / gap
    offset = "; other terms offset some of it" if share > 1.005 else ""
    return f"{total}; the largest part of that is {part}, {percent(share)} of the gap{offset})."


def _notes(plan: Plan, records: Sequence[Record], account: Account, has_memory: bool) -> tuple[str, ...]:
    notes = []
    hashes = {record.plan_sha256 for record in records if record.kind == "start"}
    if hashes and hashes != {plan.sha256()}:
        notes.append("plan.json is not, or not for the whole run, the plan that was trained with.")
    if not account.finished:
        notes.append("The run has no end record: it was killed or still runs.")
    if account.num_wasted_steps:
        notes.append(
            f"{account.num_wasted_steps} steps were done twice after a restart; the first time counts as lost."
        )
    if not has_memory:
        notes.append("The log has no memory record.")
    return tuple(notes)
