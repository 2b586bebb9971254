"""Failure rates from a user's own incident list, with exact Poisson intervals."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specs.errors import BadInputError
from specs.failures import FailureClass, FailureModel


@dataclass(frozen=True, slots=True)
class Incident:
    """A row of the list: `count` failures of one class; times where they were noted."""

    name: str
    count: int
    repair_hours: float | None
    detect_seconds: float | None


def poisson_interval(count: int, exposure: float, *, confidence: float = 0.95) -> tuple[float, float]:
    """Exact interval of a rate from a count (Garwood 1936).

    # [chi2(a / 2; 2 k) / 2, chi2(1 - a / 2; 2 k + 2) / 2] / exposure      a = 1 - confidence, k count
    """
    from scipy.stats import chi2

    tail = (1.0 - confidence) / 2.0
    low = float(chi2.ppf(tail, 2 * count)) / 2.0 if count else 0.0
    return low / exposure, float(chi2.ppf(1.0 - tail, 2 * count + 2)) / 2.0 / exposure


def read_incidents(path: Path) -> list[Incident]:
    """Rows of a CSV file with a header: `class`, and if known `repair_hours`, `detect_seconds`, `count` (else 1).

    Other columns (date, host, note) are ignored.  Raises `BadInputError` with the line that cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames is None or "class" not in reader.fieldnames:
                found = ", ".join(reader.fieldnames or ()) or "nothing"
                raise BadInputError(f"{path}: the header must have the column `class`; it has: {found}.")
            return [_incident(path, reader.line_num, row) for row in reader]
    except OSError as error:
        raise BadInputError(f"incident list {path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"incident list {path} is not a CSV file: {error}.") from None


def _incident(path: Path, line: int, row: dict[str, str | None]) -> Incident:
    name = (row["class"] or "").strip()
    if not name:
        raise BadInputError(f"{path}, line {line}: the class is empty.")
    count = _number(path, line, row, "count")
    if count is not None and count != int(count):
        raise BadInputError(f"{path}, line {line}: count is {count:g}, a whole number is needed.")
    return Incident(
        name=name,
        count=1 if count is None else int(count),
        repair_hours=_number(path, line, row, "repair_hours"),
        detect_seconds=_number(path, line, row, "detect_seconds"),
    )


def _number(path: Path, line: int, row: dict[str, str | None], column: str) -> float | None:
    text = (row.get(column) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1e12:
        raise BadInputError(f"{path}, line {line}: {column} is {text!r}, a number >= 0 is needed.")
    return value


def fit(
    incidents: Sequence[Incident], base: FailureModel, *, num_devices: int, days: float, source: str
) -> FailureModel:
    """`base` with the rates of the list (and its mean repair and detection times where it has them).

    A class of `base` that never occurred gets rate 0 and an upper bound.  Raises `BadInputError` for a class that
    `base` does not know.
    """
    exposure = num_devices * days
    known = {item.name: item for item in base.classes}
    for incident in incidents:
        if incident.name not in known:
            raise BadInputError(
                f"the incident list has the class {incident.name!r}; known are: {', '.join(known)}. "
                "Rename it, or give a failure model with that class."
            )
    classes = [
        _fit_class(item, [i for i in incidents if i.name == item.name], exposure, source) for item in base.classes
    ]
    return base.model_copy(update={"name": source, "classes": tuple(classes)})


def _fit_class(item: FailureClass, incidents: Sequence[Incident], exposure: float, source: str) -> FailureClass:
    count = sum(incident.count for incident in incidents)
    repair = _mean([(i.repair_hours, i.count) for i in incidents]) if item.blast_radius != "none" else None
    detect = _mean([(i.detect_seconds, i.count) for i in incidents])
    kept = [name for name, value in (("repair", repair), ("detection", detect)) if value is None]
    note = f"{source}: {count} in {exposure:,.0f} device-days"
    if kept:
        note += f"; {' and '.join(kept)} from: {item.source}"
    return FailureClass(
        name=item.name,
        domain=item.domain,
        failures_per_device_day=count / exposure,
        blast_radius=item.blast_radius,
        detect_seconds=item.detect_seconds if detect is None else detect,
        repair_hours=repair or item.repair_hours,
        memory_copy_survives=item.memory_copy_survives,
        count=count,
        device_days=exposure,
        rate_interval=poisson_interval(count, exposure),
        source=note,
    )


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, count) for value, count in values if value is not None]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None
