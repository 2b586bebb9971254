"""The failure model: shipped defaults, and per-second rates and seconds for a number of ranks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from specs.base import load_document
from specs.failures import FailureModel

SECONDS_PER_DAY = 86400.0
SECONDS_PER_HOUR = 3600.0
_DEFAULT = Path(__file__).parent / "data" / "failure_model.json"


@cache
def default_failure_model() -> FailureModel:
    """Published rates of large GPU clusters with their sources; marked estimated for any other cluster."""
    return FailureModel.model_validate(json.loads(_DEFAULT.read_text(encoding="utf-8")))


def load_failure_model(path: Path | None) -> FailureModel:
    """A user's failure model, or the published defaults for None."""
    return default_failure_model() if path is None else load_document(FailureModel, path, "failure model")


def stall_seconds(model: FailureModel, bytes_per_rank: float) -> float:
    """Training waits this long for one save.

    # stall: s = s0 + S / B    S bytes one rank writes, B its rate to host memory, s0 fixed
    """
    saving = model.checkpointing
    return saving.stall_fixed_seconds + bytes_per_rank / saving.stall_bytes_per_second


def lag_seconds(model: FailureModel, bytes_per_rank: float, num_ranks: int) -> float:
    """From the end of the stall until storage holds the save.

    # lag: L = max(S / b, N S / B)    S bytes per rank, b its write rate, N ranks, B rate of the storage
    """
    saving = model.checkpointing
    return max(
        bytes_per_rank / saving.write_bytes_per_second,
        bytes_per_rank * num_ranks / saving.storage_write_bytes_per_second,
    )


def load_seconds(model: FailureModel, bytes_per_rank: float, num_ranks: int) -> float:
    """Reading a save back on all ranks; the same form as the lag, with the read rates."""
    saving = model.checkpointing
    return max(
        bytes_per_rank / saving.read_bytes_per_second,
        bytes_per_rank * num_ranks / saving.storage_read_bytes_per_second,
    )


def restart_seconds(model: FailureModel, num_ranks: int) -> float:
    """# restart: t = t0 + a N    N ranks; processes, groups and first step, without detection and load"""
    return model.restarting.fixed_seconds + model.restarting.per_rank_seconds * num_ranks


def class_rates(model: FailureModel, num_ranks: int) -> list[float]:
    """Failures per second of each class on that many ranks."""
    return [item.failures_per_device_day * num_ranks / SECONDS_PER_DAY for item in model.classes]
