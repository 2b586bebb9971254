"""The drawn timeline against the cost model's simulation and the rules of a schedule."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.pipeline import simulate
from reports.timeline import Bar, bars_of, draw
from specs.plan import Schedule
from specs.schedule import Action

times = st.floats(0.01, 10.0)


@settings(deadline=None)
@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 5), st.integers(1, 7), st.data())
def test_bars_agree_with_the_simulation(
    schedule: Schedule, num_stages: int, num_micro_batches: int, data: st.DataObject
) -> None:
    forward = data.draw(st.lists(times, min_size=num_stages, max_size=num_stages))
    backward = data.draw(st.lists(times, min_size=num_stages, max_size=num_stages))
    transfer = data.draw(st.lists(st.floats(0, 2), min_size=num_stages - 1, max_size=num_stages - 1))
    bars = bars_of(schedule, forward, backward, transfer, num_micro_batches)
    timing = simulate(schedule, forward, backward, transfer, num_micro_batches)
    assert max(bar.stop for bar in bars) == pytest.approx(timing.makespan_seconds)
    rows: dict[int, list[Bar]] = defaultdict(list)
    for bar in bars:
        rows[bar.stage].append(bar)
    assert [rows[stage][-1].stop for stage in range(num_stages)] == pytest.approx(list(timing.finish_seconds))
    for row in rows.values():
        assert len(row) == 2 * num_micro_batches
        assert all(left.stop <= right.start for left, right in pairwise(row))
    at = {(bar.stage, bar.action): bar for bar in bars}
    for stage in range(num_stages - 1):
        for number in range(num_micro_batches):
            assert at[stage + 1, Action("F", number)].start >= at[stage, Action("F", number)].stop + transfer[stage]
            assert at[stage, Action("B", number)].start >= at[stage + 1, Action("B", number)].stop + transfer[stage]


def test_picture(tmp_path: Path) -> None:
    draw(bars_of("1f1b", [1, 1.2], [2, 2.2], [0.1], 4), tmp_path / "t.png", title="demo")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
