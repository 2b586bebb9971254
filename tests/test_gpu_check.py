"""The GPU check's own code, on a CPU with a model of seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import REAL, TINY, peak_flop, step_flop
from specs.tensors import num_parameters


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_says_that_no_gpu_is_there(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check needs an NVIDIA GPU and torch sees none here")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout


@pytest.mark.gloo
def test_whole_check_on_a_cpu(tmp_path: Path) -> None:
    done = run("--tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu_check_tiny.json").read_text())
    assert found == json.loads(done.stdout)
    assert found["step_time_seconds"]["predicted"] > 0
    assert found["step_time_seconds"]["measured"] > 0
    assert found["memory_bytes"]["peak"]["measured"] > 0
    assert found["step_time_over_plain_torch"] > 0
    assert found["mfu"] is None  # no datasheet rate of this CPU is shipped


def test_operations_of_a_step() -> None:
    """Six for each weight in a product and token, and attention's, which the mask halves."""
    for size in (REAL, TINY):
        model = size.model()
        vectors = size.hidden * (2 * size.layers + 1)
        weights = num_parameters(model.modules()) - vectors - size.vocab * size.hidden
        tokens = size.global_batch * size.seq_len
        scores = 12 * size.layers * size.hidden * size.seq_len / 2
        assert step_flop(model, size) == pytest.approx(tokens * (6 * weights + scores), rel=1e-9)


def test_datasheet_rate_by_the_name_that_torch_gives() -> None:
    assert peak_flop("NVIDIA H200", "bf16") == pytest.approx(989e12, rel=0.01)
    assert peak_flop("NVIDIA H100 80GB HBM3", "bf16") == pytest.approx(989e12, rel=0.01)
    assert peak_flop("NVIDIA A100-SXM4-80GB", "bf16") == pytest.approx(312e12, rel=0.01)
    assert peak_flop("Some CPU core", "bf16") is None
