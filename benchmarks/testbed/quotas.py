"""Shares of a core for ranks: CPU quotas by cgroups (controller `cpu`, version 1 or 2).

A rank that waits must not lend its core to the others, or plans whose ranks wait run faster than on devices of their
own.  So where there are more ranks than cores every rank gets a quota, and the quotas together leave some of the
machine.  Each rank also stays on one core (`held_back`), since a quota that moves between cores is handed over late,
and comes before all processes outside, so that other work on the machine changes the times little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from specs.errors import BadInputError

CGROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))  # version 1, version 2
# Short beside a module, so that a rank is slow and not stopped; not below the kernel's tick, at which quotas end.
PERIOD_MICROSECONDS = 5_000
WEIGHT = 100  # against 1 of a process outside
GROUP = "PLAIT_TESTBED_GROUP"  # environment of a rank: its group
USED_SHARE = 0.9  # of the machine by all ranks; the rest is for agents, the kernel's network and the system


def share_of_core(num_ranks: int) -> float:
    """What each of that many ranks may use: a core where there are enough, else its part of most of them."""
    num_cores = len(os.sched_getaffinity(0))
    return 1.0 if num_ranks <= num_cores else USED_SHARE * num_cores / num_ranks


@contextmanager
def quotas(name: str, shares: Mapping[int, float]) -> Iterator[dict[int, Path]]:
    """A cgroup for each rank, with its share of a core; removed when the block ends.

    Raises:
        BadInputError: the controller is missing, or this user may not make groups.
    """
    try:
        yield {rank: make_quota(name, rank, share) for rank, share in shares.items()}
    finally:
        remove_quotas(name)


def held_back_arguments(groups: Mapping[int, Path]) -> list[str]:
    """What stands before a module so that each rank enters its group: `python -m` these, module, arguments."""
    return ["benchmarks.testbed.held_back", ",".join(f"{rank}={group}" for rank, group in groups.items())]


def cgroup_root() -> Path:
    """Where groups of the controller `cpu` are made."""
    for root in CGROUPS:
        if (root / "cpu.cfs_quota_us").exists() or (root / "cgroup.controllers").exists():
            return root
    for root in CGROUPS[:1]:
        if root.is_dir() and os.access(root, os.W_OK):  # the root group of version 1 shows no quota file of its own
            return root
    raise BadInputError("shares of a core need the cgroup controller cpu, none is mounted under /sys/fs/cgroup.")


def make_quota(name: str, rank: int, share: float) -> Path:
    """A group with its share of a core."""
    folder = cgroup_root() / f"{name}-rank{rank}"
    try:
        folder.mkdir()
        if (folder / "cpu.max").exists():
            (folder / "cpu.weight").write_text(str(100 * WEIGHT))
        else:
            (folder / "cpu.shares").write_text(str(1024 * WEIGHT))
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        set_share(folder, share)
    except OSError as error:
        raise BadInputError(f"{folder}: no CPU quota can be set ({error.strerror}). Run it as root.") from None
    return folder


def set_share(folder: Path, share: float) -> None:
    """From now on the group may use `share` of a core (1: all of it)."""
    quota = int(share * PERIOD_MICROSECONDS)
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{quota if share < 1.0 else 'max'} {PERIOD_MICROSECONDS}")
    else:
        (folder / "cpu.cfs_quota_us").write_text(str(quota if share < 1.0 else -1))


def remove_quotas(name: str) -> None:
    """Delete all groups of `name`; their processes must be ending."""
    for folder in (folder for root in CGROUPS for folder in root.glob(f"{name}-rank*")):
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:  # its last process is still ending
                time.sleep(0.05)
        else:
            raise RuntimeError(f"{folder} cannot be removed")
