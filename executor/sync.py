"""Interval gradient sync: unlike cuts of one weight, summed over whoever holds each element.

All cuts of a tensor are refined into atomic intervals of its row-major elements; each has one set of owners; atoms
with the same owners are laid end to end in flat buckets (`executor.buckets`); buckets are summed in one global order.
Equal cuts give plain data parallelism, unequal ones nonuniform tensor parallelism (arXiv 2504.06095), with nothing
special-cased.  Every holder's gradient is a summand: of its tokens (blocks, replicas, norms), or of its heads (shared
KV heads).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from executor.buckets import Bucket, BucketLayout
from executor.clock import Clock
from executor.collectives import Finish, start_all_gather, start_reduce_scatter
from executor.gathered import GatheredWeights, prefetch
from executor.groups import Groups
from executor.modules import BlockModule
from executor.waiting import wait
from specs.layout import Interval

# Buckets that are scattered at a time beside the one that fills: each has a buffer of its own.
MAX_SCATTERING = 2


@dataclass
class LocalTensor:
    """A parameter on this rank and the elements of the global tensor that it is.

    `num_passes`: backward passes of a micro-batch that give it a gradient (tied weights on two virtual stages: 2).
    """

    parameter: torch.nn.Parameter
    elements: Interval
    num_passes: int = 1


class _Slot(NamedTuple):
    """A part of a parameter in a bucket: which, its slot there, elements of the flat parameter, the weights there."""

    bucket: int
    slot: int
    source: slice
    weights: torch.Tensor


class GradientSync:
    """Accumulates gradients into buckets during backward and sums them over their owners.

    A bucket of level 0 or 1 is summed once its gradients of the whole step are there; one of level 2 or 3 after each
    micro-batch, `num_rounds` times, which is the most micro-batches of any replica: others add nothing in the last.
    """

    def __init__(
        self,
        layouts: Iterable[BucketLayout],
        local: Mapping[str, list[LocalTensor]],
        modules: Iterable[BlockModule],
        *,
        process: int,
        groups: Groups,
        clock: Clock,
        num_micro_batches: int,
        num_rounds: int,
        overlap: bool,
    ) -> None:
        first = next(iter(local.values()))[0].parameter
        self._groups, self._clock = groups, clock
        self._overlap = overlap
        self._num_micro_batches = num_micro_batches
        self.buckets: list[Bucket] = []
        self._slots: defaultdict[int, list[_Slot]] = defaultdict(list)  # by parameter
        self._calls_per_pass: list[int] = []  # by bucket: slots that a micro-batch adds to
        for layout in layouts:
            if process in layout.owners:
                self._add_bucket(Bucket(layout, process, first.dtype, first.device), local)
        for tensors in local.values():
            for tensor in tensors:
                self._attach(tensor.parameter)
        self._gathered = [self._gather(module) for module in modules if self._buckets_of(module, zero=3)]
        if overlap:
            prefetch(self._gathered)
        # One global order: a bucket waits for its turn, so that no two ranks disagree.
        scattered = [n for n, bucket in enumerate(self.buckets) if bucket.layout.zero >= 2]
        summed = [n for n, bucket in enumerate(self.buckets) if bucket.layout.zero < 2]
        last = sorted(scattered + summed) if overlap else scattered + summed
        self._turns = [(i, n) for i in range(num_rounds - 1) for n in scattered]
        self._turns += [(num_rounds - 1, n) for n in last]
        self._turn = 0
        self._calls = [0] * len(self.buckets)
        self._summing: list[dist.Work] = []
        self._scattering: deque[tuple[Bucket, Finish]] = deque()

    def _add_bucket(self, bucket: Bucket, local: Mapping[str, list[LocalTensor]]) -> None:
        """Reserve a slot for every part of a parameter that lies in the bucket."""
        calls = 0
        for piece in bucket.layout.pieces:
            for tensor in local[piece.tensor]:
                common = piece.elements.overlap(tensor.elements)
                if common.size <= 0:
                    continue
                where = slice(*common.shifted(piece.offset - piece.elements.start))
                source = slice(*common.shifted(-tensor.elements.start))
                slot = bucket.add_slot(where, is_alone=len(local[piece.tensor]) == 1)
                weights = bucket.weights[where]
                self._slots[id(tensor.parameter)].append(_Slot(len(self.buckets), slot, source, weights))
                calls += tensor.num_passes
        if bucket.layout.zero == 3:
            bucket.close()
        self.buckets.append(bucket)
        self._calls_per_pass.append(calls)

    def _attach(self, parameter: torch.nn.Parameter) -> None:
        """Make a parameter that is one run of one bucket a view of it; register the others as copies."""
        slots = self._slots[id(parameter)]
        if len(slots) == 1:
            parameter.data = slots[0].weights.view(parameter.shape)
        else:
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
            flat = parameter.data.view(-1)
            for number, _, source, weights in slots:
                self.buckets[number].add_copy(flat[source], weights)
        parameter.register_post_accumulate_grad_hook(self._accumulate)

    def _buckets_of(self, module: BlockModule, *, zero: int = 0) -> list[Bucket]:
        """Buckets of at least that level which hold parts of a module's parameters."""
        numbers = {slot.bucket for parameter in module.parameters() for slot in self._slots[id(parameter)]}
        return [self.buckets[number] for number in sorted(numbers) if self.buckets[number].layout.zero >= zero]

    def _gather(self, module: BlockModule) -> GatheredWeights:
        copies = [
            parameter
            for parameter in module.parameters()
            if len(self._slots[id(parameter)]) > 1
            and any(self.buckets[slot.bucket].layout.zero == 3 for slot in self._slots[id(parameter)])
        ]
        return GatheredWeights(module, self._buckets_of(module), copies, self._groups, self._clock)

    def _accumulate(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # put off by a split backward pass
            return
        flat = parameter.grad.reshape(-1)
        for number, slot, source, _ in self._slots[id(parameter)]:
            self.buckets[number].add(slot, flat[source])
            self._calls[number] += 1
        parameter.grad = None
        self._start_ready()

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self._turn = 0
        self._calls = [0] * len(self.buckets)
        for bucket in self.buckets:
            bucket.begin_step()

    def _start_ready(self) -> None:
        while self._turn < len(self._turns):
            number, bucket = self._turns[self._turn][1], self.buckets[self._turns[self._turn][1]]
            passes = self._turns[self._turn][0] + 1
            if bucket.layout.zero < 2:
                if not self._overlap:
                    return
                passes = self._num_micro_batches
            if passes > self._num_micro_batches or self._calls[number] < passes * self._calls_per_pass[number]:
                return
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        """Begin to sum a bucket whose turn it is."""
        self._turn += 1
        layout, group = bucket.layout, self._groups.of(bucket.layout.owners)
        summands = bucket.take()
        if group is None:
            return
        if not layout.zero:
            self._summing.append(dist.all_reduce(summands, group=group, async_op=True))
            return
        position = layout.owners.index(bucket.process)
        self._scattering.append((bucket, start_reduce_scatter(summands, layout.counts, position, group)))
        # Without overlap all buckets are ready at once: what they receive must not pile up.
        while (layout.zero >= 2 or not self._overlap) and len(self._scattering) > MAX_SCATTERING:
            self._finish_scatter()

    def _finish_scatter(self) -> None:
        with self._clock.term("gradient_sync"):
            bucket, finish = self._scattering.popleft()
            bucket.put(finish)

    def finish(self) -> None:
        """Sum what is left; every bucket's own gradients are then the sums over all owners."""
        with self._clock.term("gradient_sync"):
            while self._turn < len(self._turns):
                self._start(self.buckets[self._turns[self._turn][1]])
            while self._scattering:
                self._finish_scatter()
            for work in self._summing:
                wait(work)
            self._summing.clear()

    def gather_weights(self) -> None:
        """After the update: collect the other owners' segments where weights are whole; refresh copies."""
        with self._clock.term("gradient_sync"):
            for bucket in self.buckets:
                group = self._groups.of(bucket.layout.owners)
                if bucket.layout.zero in (1, 2) and group is not None:
                    start_all_gather(bucket.shard, bucket.layout.counts, group, bucket.weights)()
        for module in self._gathered:
            module.close()
        for bucket in self.buckets:
            bucket.publish()
