"""Which device this process computes on, and the process group it joins."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from executor.connections import leave_groups
from specs.errors import BadInputError


def device_name(device: torch.device) -> str:
    """The name by which profiles and plans know this device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} core"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()} core"


def versions() -> dict[str, str]:
    """What a measurement depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform()}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def choose_backend(backend: str | None) -> str:
    """`nccl` where a GPU is, else `gloo`; an explicit choice is checked."""
    if backend == "nccl" and not torch.cuda.is_available():
        raise BadInputError("backend nccl needs a CUDA GPU, torch sees none here. Use --backend gloo.")
    if backend not in (None, "nccl", "gloo"):
        raise BadInputError(f"backend {backend!r} is unknown. Use gloo or nccl.")
    return backend or ("nccl" if torch.cuda.is_available() else "gloo")


def open_device(backend: str) -> torch.device:
    """This process's device, by LOCAL_RANK.  Raises `BadInputError` when the node has no GPU of that number."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if backend == "nccl":
        if local_rank >= torch.cuda.device_count():
            raise BadInputError(
                f"local rank {local_rank} has no GPU of its own, this node has {torch.cuda.device_count()}. "
                "Start one process per GPU."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return device


@contextmanager
def process_group(backend: str, timeout_seconds: float) -> Iterator[torch.device]:
    """Join the group named by torchrun's environment variables; gives this process's device.

    After an error the group is left as it is: closing it could wait for peers, and would make them fail first.
    """
    device = open_device(backend)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    yield device
    dist.barrier()  # rank 0 holds the store: it must not leave while others still talk to it
    leave_groups()


def leave() -> NoReturn:
    """End a worker that is done.  Interpreter shutdown would race with gloo's threads (std::terminate, torch 2.13)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
