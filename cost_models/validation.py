"""Predicted against published: every row of a table, and what the errors amount to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Literal

from cost_models.published import Row, Run, load_rows
from cost_models.run_memory import run_memory_bytes
from cost_models.run_time import RunModel, hardware_of
from specs.errors import BadInputError

Quantity = Literal["step_time_seconds", "peak_memory_bytes", "fits"]

# Rank correlation is told for sweeps of at least this many rows.
SWEEP_ROWS = 10


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """One quantity of one row.  `relative_error` = predicted / measured - 1; `skipped` gives the reason instead."""

    id: str
    source_group: str
    gpu: str
    quantity: Quantity
    measured: float | None = None
    predicted: float | None = None
    relative_error: float | None = None
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Errors of a group of rows; all are fractions.  `rank_correlation` is Spearman's, None below ten rows."""

    group: str
    quantity: Quantity
    count: int
    median_absolute_error: float
    mean_absolute_error: float
    percentile_90_absolute_error: float
    worst_error: float
    bias: float
    rank_correlation: float | None


@dataclass(frozen=True, slots=True)
class Validation:
    """All rows, and summaries over everything, by source, GPU and software stack, of dense models and of experts."""

    rows: tuple[ValidationRow, ...]
    summary: tuple[ErrorSummary, ...]

    def as_dict(self) -> dict[str, object]:
        """Plain data: `rows` and `summary`."""
        rows = [{key: value for key, value in asdict(row).items() if value is not None} for row in self.rows]
        return {"rows": rows, "summary": [asdict(item) for item in self.summary]}


def validate(path: Path) -> Validation:
    """Predict every row of a table of published runs.  Raises `BadInputError` for a table that cannot be read."""
    table = load_rows(path)
    if not table:
        raise BadInputError(f"{path} has no rows. Give a table with one training run per row.")
    rows: list[ValidationRow] = []
    kinds: dict[str, tuple[str, ...]] = {}
    for row in table:
        if row.run is not None:
            kinds[row.id] = (f"stack {row.run.stack}", "dense" if row.run.experts is None else "mixture of experts")
        rows += _predicted(row)
    return Validation(tuple(rows), tuple(_summaries(rows, kinds)))


def _predicted(row: Row) -> list[ValidationRow]:
    def entry(quantity: Quantity, measured: float | None, predicted: float | None, problem: str = "") -> ValidationRow:
        if not problem and measured is not None and measured <= 0.0:
            problem = f"the measured value {measured:g} is not positive"
        if problem or measured is None or predicted is None:
            return ValidationRow(row.id, row.source_group, row.gpu, quantity, measured, skipped=problem)
        error = predicted / measured - 1.0
        return ValidationRow(row.id, row.source_group, row.gpu, quantity, measured, predicted, error)

    result = []
    if row.step_seconds is not None:
        predicted = RunModel(row.run).step_seconds() if row.run is not None else None
        result.append(entry("step_time_seconds", row.step_seconds, predicted, row.problem))
    elif row.time_rests_on_flops:
        result.append(entry("step_time_seconds", None, None, "step time rests on a FLOPs formula"))
    if row.memory_bytes is not None:
        predicted = run_memory_bytes(row.run) if row.run is not None else None
        result.append(entry("peak_memory_bytes", row.memory_bytes, predicted, row.problem))
    if row.run is not None and row.run.out_of_memory:
        result.append(_fit_row(row, row.run))
    if not result:
        reason = row.problem or "neither step time nor memory was printed"
        result.append(entry("step_time_seconds", None, None, reason))
    return result


def _fit_row(row: Row, run: Run) -> ValidationRow:
    """A run that ran out of memory: `measured` is the device's memory, the prediction should exceed it."""
    capacity = float(hardware_of(run.gpu).device.memory_bytes)
    predicted = run_memory_bytes(run)
    return ValidationRow(row.id, row.source_group, row.gpu, "fits", capacity, predicted, predicted / capacity - 1.0)


def _summaries(rows: Sequence[ValidationRow], kinds: Mapping[str, tuple[str, ...]]) -> Iterable[ErrorSummary]:
    groups: defaultdict[tuple[str, Quantity], list[ValidationRow]] = defaultdict(list)
    for row in rows:
        if row.relative_error is None or row.quantity == "fits":
            continue
        for group in ("all", f"source {row.source_group}", f"gpu {row.gpu}", *kinds[row.id]):
            groups[group, row.quantity].append(row)
    for (group, quantity), members in groups.items():
        errors = [row.relative_error for row in members if row.relative_error is not None]
        absolute = sorted(abs(error) for error in errors)
        yield ErrorSummary(
            group=group,
            quantity=quantity,
            count=len(errors),
            median_absolute_error=median(absolute),
            mean_absolute_error=mean(absolute),
            percentile_90_absolute_error=absolute[min(len(absolute) - 1, int(0.9 * len(absolute)))],
            worst_error=max(errors, key=abs),
            bias=median(errors),
            rank_correlation=_rank_correlation(members) if len(members) >= SWEEP_ROWS else None,
        )


def _rank_correlation(rows: Sequence[ValidationRow]) -> float:
    """Spearman's: the correlation of mean ranks."""
    return _correlation(_ranks([row.measured or 0.0 for row in rows]), _ranks([row.predicted or 0.0 for row in rows]))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, ties share their mean."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for index in order[start:stop]:
            ranks[index] = (start + stop + 1) / 2
        start = stop
    return ranks


def _correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson's; 0 when one side does not vary."""
    x_mean, y_mean = mean(xs), mean(ys)
    covariance = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    spread = (sum((x - x_mean) ** 2 for x in xs) * sum((y - y_mean) ** 2 for y in ys)) ** 0.5
    return covariance / spread if spread else 0.0
