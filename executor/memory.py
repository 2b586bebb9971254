"""Peak memory of a rank: from the allocator on a GPU, from live tensors on a CPU (where RSS says little)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.attention import AttentionModule
from executor.engine import Engine


@dataclass
class MemoryReading:
    """Bytes.  `static` lives through the step (weights, gradients, optimizer); `peak` is everything at its most."""

    method: str
    static_bytes: int
    peak_bytes: int
    activation_bytes: int  # tensors kept for backward, at their most


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages made by operations while the mode is on and still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: set[int] = set()
        self._resized: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        if self._resized:
            self._reach(sum(storage.nbytes() for storage in self._resized))
        return result

    def ignore(self, storage: torch.UntypedStorage) -> None:
        """Leave out what was there before.  What is empty now is counted whenever it has memory (gathered weights)."""
        self._seen.add(storage._cdata)
        if storage.nbytes() == 0:
            self._resized.append(storage)

    def _reach(self, more_bytes: int = 0) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + more_bytes)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live_bytes += size
        self._reach()
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= size


class _SavedTensors:
    """Bytes of distinct storages that autograd keeps for backward."""

    def __init__(self, ignored: set[int]) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._ignored = ignored
        self._holders: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> _Kept:
        return _Kept(self, tensor)

    @staticmethod
    def unpack(kept: _Kept) -> torch.Tensor:
        return kept.tensor

    def add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._ignored:
            return
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def remove(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._ignored:
            return
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self.live_bytes -= storage.nbytes()


class _Kept:
    """A saved tensor; tells its owner when autograd lets go of it."""

    def __init__(self, owner: _SavedTensors, tensor: torch.Tensor) -> None:
        self._owner = owner
        self.tensor = tensor
        owner.add(tensor.untyped_storage())

    def __del__(self) -> None:
        self._owner.remove(self.tensor.untyped_storage())


def static_tensors(engine: Engine) -> list[torch.Tensor]:
    """Weights, gradients, masters and moments of a rank."""
    tensors: list[torch.Tensor] = [p for module in engine.chain for p in module.parameters()]
    for bucket in engine.sync.buckets:
        tensors += [bucket.weights, bucket.shard, bucket.gradients, bucket.master]
        tensors += [value for key, value in engine.optimizer.adam.state[bucket.master].items() if key != "step"]
    return tensors


def attention_masks(engine: Engine) -> list[torch.Tensor]:
    """The distinct masks that a rank's attention modules use, if any."""
    masks = [module.mask for module in engine.chain if isinstance(module, AttentionModule)]
    return list({id(mask): mask for mask in masks if mask is not None}.values())


def static_bytes(engine: Engine) -> int:
    """Bytes of the distinct storages of `static_tensors`."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in static_tensors(engine)}
    return sum(sizes.values())


@contextlib.contextmanager
def saved_tensor_bytes(ignored: list[torch.Tensor]) -> Iterator[_SavedTensors]:
    """Measure what autograd keeps inside; `ignored` (weights) does not count."""
    saved = _SavedTensors({tensor.untyped_storage()._cdata for tensor in ignored})
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        yield saved


@contextlib.contextmanager
def measure_step(engine: Engine) -> Iterator[list[MemoryReading]]:
    """Measure the step made inside; the list holds the reading afterwards.  It slows a CPU step down."""
    readings: list[MemoryReading] = []
    static = static_tensors(engine)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with saved_tensor_bytes(static + attention_masks(engine)) as saved:
            yield readings
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        readings.append(MemoryReading("cuda allocator", static_bytes(engine), peak, saved.peak_bytes))
        return
    live, masks = LiveStorages(), attention_masks(engine)
    for tensor in static + masks:
        live.ignore(tensor.untyped_storage())
    with saved_tensor_bytes(static + masks) as saved, live:
        yield readings
    size = static_bytes(engine)
    peak = size + sum(mask.untyped_storage().nbytes() for mask in masks) + live.peak_bytes
    readings.append(MemoryReading("live tensors", size, peak, saved.peak_bytes))
