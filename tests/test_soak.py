"""One run of the soak: what its script checks of 40."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import soak

pytestmark = pytest.mark.gloo


def test_a_run_with_faults_of_several_kinds_holds_what_the_soak_checks(tmp_path: Path) -> None:
    """Unlike replicas, a worker slowed down and another one killed."""
    assert soak(range(20, 21), 0, 16, tmp_path) == 0
