"""A pool of worker processes that run functions as gloo ranks; torch is imported once per worker."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp


def _serve(rank: int, tasks: Any, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (task := tasks.get()) is not None:
        function, world_size, store, arguments = task
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
            )
            try:
                dist.barrier()  # none may leave while another still connects to it
                results.put((rank, True, function(*arguments)))
            finally:
                time.sleep(0.01)  # for gloo's threads to let go of tensors: destroying joins them, interpreter held
                dist.destroy_process_group()
        except BaseException:
            results.put((rank, False, traceback.format_exc()))


class GlooPool:
    """`run(function, world_size, *arguments)` calls a module-level function on every rank."""

    def __init__(self, num_workers: int, *, timeout_seconds: float = 120.0) -> None:
        self._timeout_seconds = timeout_seconds
        # No OpenMP team per worker: several ranks share few cores.
        os.environ["OMP_NUM_THREADS"] = "1"
        context = mp.get_context("spawn")
        self._results = context.Queue()
        self._tasks = [context.Queue() for _ in range(num_workers)]
        self._workers = [
            context.Process(target=_serve, args=(rank, self._tasks[rank], self._results), daemon=True)
            for rank in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()
        self._folder = tempfile.TemporaryDirectory()
        self._num_runs = 0

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """Results by rank; the first failure is raised with its traceback."""
        self._num_runs += 1
        store = Path(self._folder.name) / f"store-{self._num_runs}"
        for tasks in self._tasks[:world_size]:
            tasks.put((function, world_size, str(store), arguments))
        results: dict[int, Any] = {}
        failures = []
        for _ in range(world_size):
            rank, ok, value = self._results.get(timeout=self._timeout_seconds)
            if ok:
                results[rank] = value
            else:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            raise AssertionError("\n".join(failures))
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End the workers."""
        for tasks in self._tasks:
            tasks.put(None)
        for worker in self._workers:
            worker.join(timeout=10)
        self._folder.cleanup()
