"""Interruptions of a run as a table: what happened, how it went on, and where the seconds went."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from specs.runlog import IncidentRecord
from specs.units import seconds as format_seconds

PARTS = ("failure_detection", "partial_step", "replanning", "reforming", "state_transfer")


def render(incidents: Iterable[IncidentRecord]) -> Table:
    """One row for each interruption; seconds by part."""
    table = Table(title="Interruptions", title_justify="left", box=None, pad_edge=False)
    for heading in ("after step", "what happened", "went on with", "ranks", "state from", "redone"):
        table.add_column(heading)
    for part in PARTS:
        table.add_column(part.replace("_", " "), justify="right")
    for record in incidents:
        batch = "" if record.batch_kept else f", batch {record.global_batch}"
        table.add_row(
            str(record.step),
            record.cause,
            f"{record.policy}{batch}",
            str(record.world_size),
            record.source,
            str(record.redone_steps),
            *(format_seconds(record.seconds.get(part, 0.0)) for part in PARTS),
        )
    return table
