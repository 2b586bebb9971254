"""Samples of all ranks made into one timing; repetitions that something disturbed are left out."""

from __future__ import annotations

import torch
import torch.distributed as dist

from specs.profile import Timing


def undisturbed(seconds: list[float]) -> list[int]:
    """Indices of the middle half of the repetitions by their slowest rank's `seconds`; a collective.

    Whole repetitions are taken or left, so that the parts of those that stay still add up.
    """
    slowest = _table(seconds).max(dim=0).values
    cut = len(seconds) // 4
    return sorted(slowest.argsort(stable=True).tolist()[cut : len(seconds) - cut])


def _table(samples: list[float]) -> torch.Tensor:
    """[ranks, repetitions]; a collective."""
    mine = torch.tensor(samples, dtype=torch.float64)
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    parts = [torch.empty_like(mine, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.to(device))
    return torch.stack(parts).cpu()


def gathered_timing(samples: list[float], *, floor: float = 1e-9, averaged: int = 1) -> Timing:
    """Mean and spread over ranks and repetitions; a collective.  A mean below `floor`, a clock tick, becomes that.

    Each sample is a mean over `averaged` passes, whose skew is that of one as long as they are independent.
    """
    table = _table(samples)
    by_rank, by_repetition = table.mean(dim=1), table.mean(dim=0)
    mean = max(float(table.mean()), floor, 1e-12)
    return Timing(
        mean_seconds=mean,
        std_seconds=float(by_repetition.std()) if by_repetition.numel() > 1 else 0.0,
        min_seconds=float(table.min()),
        max_seconds=float(table.max()),
        rank_spread=float(by_rank.max() - by_rank.min()) / mean,
        skew_seconds=float((table.max(dim=0).values - by_repetition).mean()) * averaged**0.5,
        repetitions=len(samples),
    )
