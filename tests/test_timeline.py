"""The drawn timeline."""

from __future__ import annotations

from pathlib import Path

from cost_models.pipeline import action_spans
from reports.timeline import AFTER, draw
from specs.schedule import pipeline_actions


def test_picture(tmp_path: Path) -> None:
    for schedule, num_virtual in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)):
        actions = pipeline_actions(schedule, num_stages=2, num_micro_batches=4, num_virtual=num_virtual)
        places = 2 * num_virtual
        each = [1.0] * places
        bars = action_spans(actions, each, [2.0] * places, [0.1] * (places - 1), weight_seconds=each)
        draw(bars, tmp_path / f"{schedule}.png", title="demo")
        assert (tmp_path / f"{schedule}.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_step_shows_its_beginning_too_and_what_follows_the_passes(tmp_path: Path) -> None:
    sizes = {}
    for number in (4, 200):
        actions = pipeline_actions("1f1b", num_stages=2, num_micro_batches=number)
        bars = action_spans(actions, [1.0, 1.0], [2.0, 2.0], [0.1])
        end = 1.05 * max(bar.stop for bar in bars)
        draw(bars, tmp_path / f"{number}.svg", step_seconds=end)
        text = (tmp_path / f"{number}.svg").read_text()
        assert AFTER.lower() in text.lower()
        sizes[number] = float(text.split('height="')[1].split("pt")[0])
    assert sizes[200] == 2 * sizes[4]
