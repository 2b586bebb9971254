"""The drawn timeline."""

from __future__ import annotations

from pathlib import Path

from cost_models.pipeline import action_spans
from reports.timeline import draw
from specs.schedule import pipeline_actions


def test_picture(tmp_path: Path) -> None:
    for schedule, num_virtual in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)):
        actions = pipeline_actions(schedule, num_stages=2, num_micro_batches=4, num_virtual=num_virtual)
        places = 2 * num_virtual
        each = [1.0] * places
        bars = action_spans(actions, each, [2.0] * places, [0.1] * (places - 1), weight_seconds=each)
        draw(bars, tmp_path / f"{schedule}.png", title="demo")
        assert (tmp_path / f"{schedule}.png").read_bytes().startswith(b"\x89PNG")
