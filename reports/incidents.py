"""Interruptions of a run: what happened, how it went on, and where the seconds went."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from specs.runlog import INCIDENT_BUCKETS, IncidentRecord
from specs.units import seconds as format_seconds


def render(incidents: Iterable[IncidentRecord]) -> Table:
    """Three rows for each interruption."""
    table = Table(title="Interruptions", title_justify="left", title_style="bold", box=None, show_header=False)
    for record in incidents:
        batch = "" if record.batch_kept else f", {record.global_batch} sequences per step"
        redone = f", {record.redone_steps} steps trained again" if record.redone_steps else ", no step lost"
        parts = [
            f"{part.replace('_', ' ')} {format_seconds(record.seconds[part])}"
            for part in INCIDENT_BUCKETS
            if record.seconds.get(part)
        ]
        table.add_row(f"after step {record.step}", record.cause)
        table.add_row(
            "", f"went on with {record.world_size} ranks: {record.policy}{batch}; {record.layout}".rstrip("; ")
        )
        table.add_row("", f"state from {record.source}{redone}; {', '.join(parts)}")
    return table
