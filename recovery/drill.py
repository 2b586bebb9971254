"""Drills: a run with faults on purpose: what happened, what it cost, whether the losses are right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from recovery.start import start_run
from specs.base import load_document
from specs.errors import BadInputError, PlaitError
from specs.faults import Fault
from specs.options import TrainOptions
from specs.plan import Plan
from specs.runlog import EndRecord, IncidentRecord, StepRecord, read_log

LOSS_TOLERANCE = 1e-5  # relative, in fp32: sums in another order
# Options of a run that its drill takes over.
KEPT = ("data", "tokenizer", "initial_weights", "seed", "backend", "checkpoint_every", "profile", "hang_seconds")


class DrillFailedError(PlaitError):
    """The drill found that a run would not have gone on as promised."""

    exit_code = 1


@dataclass(frozen=True)
class DrillReport:
    """`worst`: largest relative difference of a loss to the run without faults; None when there is none to compare."""

    incidents: tuple[IncidentRecord, ...]
    end: EndRecord | None
    num_steps: int
    worst: float | None


def run_drill(
    source: Path,
    out: Path,
    given: Mapping[str, object],
    *,
    faults: Iterable[Fault],
    returns: Mapping[int, int],
) -> DrillReport:
    """Train the plan of `source` (a plan file, or a run whose options are taken too) in `out`, with faults.

    Raises `BadInputError` for faults that the plan cannot have, `DrillFailedError` when a loss is not what the run in
    `source` had, and whatever ended the run.
    """
    is_run = source.is_dir()
    plan_path = source / "plan.json" if is_run else source
    plan = load_document(Plan, plan_path, "plan")
    faults = tuple(faults)
    _check(plan, faults, returns)
    options = dict(given)
    if is_run:
        before = load_document(TrainOptions, source / "options.json", "options")
        taken = {name: getattr(before, name) for name in KEPT} | before.optimizer.model_dump()
        options = taken | {name: value for name, value in given.items() if value is not None}
    start_run(plan_path, out, options, resume=False, faults=faults, returns=returns)
    report = read_report(out, against=source if is_run else None)
    if report.worst is not None and report.worst > LOSS_TOLERANCE:
        raise DrillFailedError(
            f"losses differ from {source} by up to {report.worst:.1e} (relative), {LOSS_TOLERANCE:.0e} is what another "
            "order of sums explains. The drill's log is kept; please report this."
        )
    return report


def _check(plan: Plan, faults: Iterable[Fault], returns: Mapping[int, int]) -> None:
    for rank in [*(fault.rank for fault in faults), *returns]:
        if rank >= plan.cluster.num_devices:
            raise BadInputError(f"rank {rank} is outside the plan's {plan.cluster.num_devices} devices (from 0).")


def read_report(run: Path, *, against: Path | None) -> DrillReport:
    """What the log of a drill shows; `against`: the folder of a run of the same plan and options without faults.

    Losses are compared up to the first step of a smaller global batch.
    """
    records = read_log(run / "log.jsonl")
    incidents = tuple(record for record in records if isinstance(record, IncidentRecord))
    steps = {record.step: record for record in records if isinstance(record, StepRecord)}
    end = next((record for record in records if isinstance(record, EndRecord)), None)
    worst = None
    if against is not None:
        shrunk = min((incident.step for incident in incidents if not incident.batch_kept), default=math.inf)
        clean = {r.step: r.loss for r in read_log(against / "log.jsonl") if isinstance(r, StepRecord)}
        common = [step for step in steps if step in clean and step <= shrunk]
        worst = max((abs(steps[s].loss / clean[s] - 1.0) for s in common), default=None)
    return DrillReport(incidents, end, len(steps), worst)
