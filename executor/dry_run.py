"""One rank of a plan of any size, played without memory, peers or values: what does it hold, compute and send?

The executor's own code runs a step with fake tensors and process groups that only count; nothing here is a formula.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cost_models.rank_work import RankWork
from executor.attention import AttentionModule, forget_tables
from executor.clock import Clock
from executor.engine import Engine
from executor.memory import LiveStorages, attention_masks, static_tensors
from specs.cluster import CollectiveOp
from specs.options import OptimizerOptions
from specs.plan import Plan

BACKEND = "counting"
Tensor = torch.Tensor


class _Done(dist.Work):
    """A transfer that has happened."""

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True


class _CountingGroup(dist.ProcessGroup):
    """Leaves tensors as they are and counts what its rank would send."""

    sent: ClassVar[defaultdict[CollectiveOp, float]] = defaultdict(float)  # of all groups of the process

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)

    def _count(self, op: CollectiveOp, num_bytes: float) -> dist.Work:
        self.sent[op] += num_bytes
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> dist.Work:  # noqa: ARG002
        return self._count("all_reduce", 2 * (self.size() - 1) / self.size() * _bytes(tensors))

    def all_gather_single(self, whole: Tensor, own: Tensor, opts: object = None) -> dist.Work:  # noqa: ARG002
        return self._count("all_gather", (self.size() - 1) * _bytes([own]))

    def allgather(self, wholes: object, own: list[Tensor], opts: object = None) -> dist.Work:  # noqa: ARG002
        return self._count("all_gather", (self.size() - 1) * _bytes(own))

    def reduce_scatter_single(self, own: Tensor, whole: Tensor, opts: object = None) -> dist.Work:  # noqa: ARG002
        return self._count("reduce_scatter", _bytes([whole]) - _bytes([own]))

    def reduce_scatter(self, own: list[Tensor], parts: list[list[Tensor]], opts: object = None) -> dist.Work:  # noqa: ARG002
        return self._count("reduce_scatter", _bytes(parts[0]) - _bytes(own))

    # The names of these in torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self,
        received: Tensor,  # noqa: ARG002
        parts: Tensor,
        received_sizes: list[int],  # noqa: ARG002
        sizes: list[int],
        opts: object = None,  # noqa: ARG002
    ) -> dist.Work:
        share = sizes[self.rank()] / sum(sizes) if sizes else 1 / self.size()
        return self._count("all_to_all", _bytes([parts]) * (1 - share))

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work:  # noqa: ARG002
        return self._count("point_to_point", _bytes(tensors))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:  # noqa: ARG002
        return _Done()

    def getBackendName(self) -> str:
        return BACKEND


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _make_group(store: object, rank: int, size: int, timeout: object) -> dist.ProcessGroup:  # noqa: ARG001
    return _CountingGroup(rank, size)


@contextlib.contextmanager
def _counting_world(rank: int, size: int) -> Iterator[dict[CollectiveOp, float]]:
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu"])
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    _CountingGroup.sent.clear()
    try:
        yield _CountingGroup.sent
    finally:
        dist.destroy_process_group()


class _WithoutValues(Engine):
    """Weights have no values, so none are drawn."""

    def _initialise(self, seed: int, inits: dict[str, str]) -> None:
        pass

    def play(self) -> None:
        """A step without its update."""
        seq_len = self.plan.training.seq_len
        self.sync.begin_step()
        batch = self._micro_batches(lambda _, count: torch.empty((count, seq_len + 1), dtype=torch.int64))
        self.runner.run(batch, 1.0)
        self.sync.finish()
        self.sync.gather_weights()


class _NoModules(contextlib.nullcontext[None]):
    """For torch's counter of operations, which only counts: its own hooks (torch 2.13) keep every module's input, and a
    step of many micro-batches would seem to hold them all.
    """

    parents = frozenset({"Global"})


class _Watch(Clock):
    """Reads what is alive after every action of the schedule."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.live: LiveStorages | None = None
        self.peak_bytes = 0

    @contextlib.contextmanager
    def action(self, name: str) -> Iterator[None]:
        with super().action(name):
            yield
        if self.live is not None:
            self.peak_bytes = max(self.peak_bytes, self.live.live_bytes)


def dry_run(plan: Plan, process: int) -> RankWork:
    """Play one step of one process of a plan.  No other process group may exist."""
    forget_tables()
    uncounted = {
        torch.ops.aten.addmm_: _added_product_flop,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flop,
    }
    with _counting_world(process, plan.world_size) as sent, FakeTensorMode(allow_non_fake_inputs=True):
        watch = _Watch()
        device = torch.device("cpu")
        engine = _WithoutValues(plan, OptimizerOptions(num_steps=1), device=device, seed=0, clock=watch)
        sent.clear()
        live = LiveStorages()
        for tensor in static_tensors(engine) + attention_masks(engine):
            live.ignore(tensor.untyped_storage())
        watch.live = live
        flops = FlopCounterMode(display=False, custom_mapping=uncounted)
        flops.mod_tracker = _NoModules()  # type: ignore[assignment]
        with flops, live:  # the counter takes composite operations apart, which kernels do not
            engine.play()
        buckets = engine.sync.buckets
        states = [engine.optimizer.adam.state[bucket.master] for bucket in buckets]
        optimizer = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        weights = [p for module in engine.chain for p in module.parameters()] + [b.weights for b in buckets]
        states = (
            _distinct(weights),
            _distinct([bucket.gradients for bucket in buckets]),
            _distinct(optimizer + [b.master for b in buckets], but=weights),
        )
        work = RankWork(
            *states,
            activation_bytes=watch.peak_bytes,
            peak_bytes=sum(states) + _distinct(_masks(engine)) + live.peak_bytes,
            flop=float(flops.get_total_flops()),
            sent_bytes=dict(sent),
        )
    forget_tables()
    return work


def _masks(engine: Engine) -> list[Tensor]:
    """The masks that the plan's devices need: kernels of GPUs know which keys precede which queries."""
    on_gpu = all(device.kind == "gpu" for device in engine.plan.cluster.devices.values())
    if not on_gpu:
        return attention_masks(engine)
    specs = ((module.mask, module.layout.module) for module in engine.chain if isinstance(module, AttentionModule))
    return [mask for mask, spec in specs if mask is not None and (spec.window or spec.score_cap is not None)]


def _distinct(tensors: list[Tensor], but: list[Tensor] | None = None) -> int:
    """Bytes of the distinct storages."""
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    for tensor in but or []:
        sizes.pop(tensor.untyped_storage()._cdata, None)
    return sum(sizes.values())


def _added_product_flop(total: Any, left: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:  # noqa: ARG001
    """The in-place form of a product that torch counts itself."""
    return 2 * left[0] * left[1] * right[1]


def _attention_flop(query: Any, key: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:  # noqa: ARG001
    """Two products over all pairs; fewer KV heads serve groups of query heads."""
    sequences, heads, length, width = query
    return 4 * sequences * heads * length * key[2] * width


def _attention_backward_flop(grad: Any, query: Any, key: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:  # noqa: ARG001
    """Five products: the scores again, and the four gradients."""
    return _attention_flop(query, key) * 5 // 2
