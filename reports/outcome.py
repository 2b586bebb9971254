"""How a run ended, in a few numbers: what `plait train --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from specs.runlog import EndRecord, EvaluationRecord, IncidentRecord, Record, StepRecord


def outcome(records: Sequence[Record]) -> dict[str, object]:
    """Of a run's log: last step, why it ended, losses (nats per token), time of a step (seconds), incidents.

    What the log does not have is None: a run of one step has no step after warm-up, one that broke off no end.
    """
    steps = [record for record in records if isinstance(record, StepRecord)]
    timed = [record.seconds for record in steps if not record.warm_up]
    held_out = [record.loss for record in records if isinstance(record, EvaluationRecord)]
    ends = [record.reason for record in records if isinstance(record, EndRecord)]
    return {
        "step": steps[-1].step if steps else None,
        "ended": ends[-1] if ends else None,
        "loss": steps[-1].loss if steps else None,
        "held_out_loss": held_out[-1] if held_out else None,
        "median_step_seconds": median(timed) if timed else None,
        "num_incidents": sum(isinstance(record, IncidentRecord) for record in records),
    }
