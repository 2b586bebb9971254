"""Interval gradient sync: unlike cuts of one weight, summed over whoever holds each element.

All cuts of a tensor are refined into atomic intervals of its row-major elements; each has one set of owners; atoms
with the same owners are laid end to end in flat buckets; buckets are summed in one global order.  Equal cuts give
plain data parallelism, unequal ones nonuniform tensor parallelism (arXiv 2504.06095), with nothing special-cased.
Every holder's gradient is a summand: of its tokens (blocks, replicas, norms), or of its heads (shared KV heads).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from executor.clock import Clock
from executor.collectives import all_gather, reduce_scatter
from executor.groups import Groups
from executor.layout import TensorHoldings
from specs.layout import Interval, refine

# Buckets of about this many elements: large enough for bandwidth, small enough to overlap with backward.
BUCKET_ELEMENTS = 8 * 2**20


@dataclass(frozen=True)
class Piece:
    """An atomic interval of a tensor, and where it starts in its bucket."""

    tensor: str
    elements: Interval
    offset: int


@dataclass
class BucketLayout:
    """Pieces with the same owners, sharding and decay.  Padded so that `zero` can cut it evenly."""

    owners: tuple[int, ...]
    zero: int
    decay: bool
    pieces: list[Piece] = field(default_factory=list)
    num_elements: int = 0

    @property
    def padded(self) -> int:
        """Length of the flat buffers."""
        return -(-self.num_elements // len(self.owners)) * len(self.owners) if self.zero else self.num_elements

    def segment(self, process: int) -> Interval:
        """The part whose optimizer state a process keeps."""
        if not self.zero:
            return Interval(0, self.num_elements)
        size = self.padded // len(self.owners)
        index = self.owners.index(process)
        return Interval(index * size, (index + 1) * size)

    def writer_segment(self, process: int) -> Interval:
        """The part a process counts in norms and writes to checkpoints: each element has one such process."""
        if self.zero:
            return self.segment(process)
        return Interval(0, self.num_elements if process == self.owners[0] else 0)


def bucket_layouts(
    holdings: Mapping[str, TensorHoldings], bucket_elements: int = BUCKET_ELEMENTS
) -> list[BucketLayout]:
    """All buckets of a plan in the global order: last module first, as backward finishes them."""
    finished: list[BucketLayout] = []
    open_buckets: dict[tuple[tuple[int, ...], int, bool], BucketLayout] = {}
    for name in reversed(list(holdings)):
        entry = holdings[name]
        by_interval: defaultdict[Interval, set[int]] = defaultdict(set)
        for holding in entry.holdings:
            by_interval[holding.elements].add(holding.process)
        for atom in refine(by_interval):
            owners = {p for i, ps in by_interval.items() if i.start <= atom.start and atom.stop <= i.stop for p in ps}
            key = (tuple(sorted(owners)), entry.zero if len(owners) > 1 else 0, entry.tensor.decay)
            bucket = open_buckets.setdefault(key, BucketLayout(*key))
            bucket.pieces.append(Piece(name, atom, bucket.num_elements))
            bucket.num_elements += atom.size
            if bucket.num_elements >= bucket_elements:
                finished.append(open_buckets.pop(key))
    return [*finished, *open_buckets.values()]


@dataclass
class LocalTensor:
    """A parameter on this rank and the elements of the global tensor that it is."""

    parameter: torch.nn.Parameter
    elements: Interval


class Bucket:
    """One bucket on one of its owners: flat gradients, flat weights, and the segment that is optimised here.

    `master` is the fp32 (or wider) segment that the optimizer updates; where the weights have that type already,
    it is a view of them.
    """

    def __init__(self, layout: BucketLayout, process: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.process = process
        self.segment = layout.segment(process)
        accumulate = torch.promote_types(dtype, torch.float32)
        self.gradients = torch.zeros(layout.padded, dtype=accumulate, device=device)
        self.weights = torch.zeros(layout.padded, dtype=dtype, device=device)
        own = self.weights[self.segment.start : self.segment.stop]
        self.master = own if dtype == accumulate else own.to(accumulate)
        self._copies: list[tuple[torch.Tensor, slice]] = []  # parameters that are not views of `weights`
        self.num_pending = 0

    def own_gradients(self) -> torch.Tensor:
        """The summed gradients of the segment that is optimised here."""
        return self.gradients[self.segment.start : self.segment.stop]

    def writer_gradients(self) -> torch.Tensor:
        """Those that this process counts in the norm."""
        part = self.layout.writer_segment(self.process)
        return self.gradients[part.start : part.stop]

    def add_copy(self, values: torch.Tensor, offset: int) -> None:
        """Keep `values` (a flat view of a parameter) equal to the bucket's weights from `offset` on."""
        self._copies.append((values, slice(offset, offset + values.numel())))

    def publish(self) -> None:
        """Copy the flat weights to the parameters that are not views of them."""
        for values, where in self._copies:
            values.copy_(self.weights[where])

    def reset_weights(self) -> None:
        """After the master changed: the flat weights of the segment follow."""
        own = self.weights[self.segment.start : self.segment.stop]
        if self.master.data_ptr() != own.data_ptr():
            own.copy_(self.master)


class GradientSync:
    """Accumulates gradients into buckets during backward and sums them over their owners."""

    def __init__(
        self,
        layouts: Iterable[BucketLayout],
        local: Mapping[str, list[LocalTensor]],
        *,
        process: int,
        groups: Groups,
        clock: Clock,
        overlap: bool,
    ) -> None:
        first = next(iter(local.values()))[0].parameter
        self._groups = groups
        self._clock = clock
        self._overlap = overlap
        self._works: list[tuple[Bucket, dist.Work | None]] = []
        self._is_last_micro_batch = False
        self.buckets = [
            Bucket(layout, process, first.dtype, first.device) for layout in layouts if process in layout.owners
        ]
        targets: defaultdict[int, list[tuple[int, slice, slice]]] = defaultdict(list)
        parameters: dict[int, torch.nn.Parameter] = {}
        for number, bucket in enumerate(self.buckets):
            for piece in bucket.layout.pieces:
                for tensor in local[piece.tensor]:
                    common = piece.elements.overlap(tensor.elements)
                    if common.size <= 0:
                        continue
                    parameters[id(tensor.parameter)] = tensor.parameter
                    source = common.shifted(-tensor.elements.start)
                    offset = piece.offset + common.start - piece.elements.start
                    where = slice(offset, offset + common.size)
                    targets[id(tensor.parameter)].append((number, slice(*source), where))
        self._targets = dict(targets)
        # Parameters whose elements no other on this rank holds too: their first gradient of a step overwrites.
        self._alone = {id(tensors[0].parameter) for tensors in local.values() if len(tensors) == 1}
        self._untouched: set[int] = set()
        for key, parameter in parameters.items():
            self._attach(parameter, self._targets[key])
        self._num_targets = [0] * len(self.buckets)
        for entries in self._targets.values():
            for number, *_ in entries:
                self._num_targets[number] += 1

    def _attach(self, parameter: torch.nn.Parameter, targets: list[tuple[int, slice, slice]]) -> None:
        """Make a parameter that is one run of one bucket a view of it; register the others as copies."""
        if len(targets) == 1:
            number, _, where = targets[0]
            parameter.data = self.buckets[number].weights[where].view(parameter.shape)
        else:
            flat = parameter.data.view(-1)
            for number, source, where in targets:
                self.buckets[number].add_copy(flat[source], where.start)
        parameter.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # put off by a split backward pass
            return
        flat = parameter.grad.reshape(-1)
        is_first = id(parameter) in self._untouched
        self._untouched.discard(id(parameter))
        for number, source, where in self._targets[id(parameter)]:
            target = self.buckets[number].gradients[where]
            if is_first:
                target.copy_(flat[source])
            else:
                target.add_(flat[source])
            self.buckets[number].num_pending -= 1
        parameter.grad = None
        if self._is_last_micro_batch and self._overlap:
            self._start_ready()

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self._works.clear()
        self._is_last_micro_batch = False
        self._untouched = set(self._alone)
        self._clear(key for key in self._targets if key not in self._alone)

    def _clear(self, parameters: Iterable[int]) -> None:
        for key in parameters:
            for number, _, where in self._targets[key]:
                self.buckets[number].gradients[where].zero_()

    def begin_last_backward(self) -> None:
        """From now on a bucket whose gradients are all there may be summed."""
        self._is_last_micro_batch = True
        for number, bucket in enumerate(self.buckets):
            bucket.num_pending = self._num_targets[number]

    def _start_ready(self) -> None:
        # One global order: a bucket waits for those before it, so that no two ranks disagree.
        while len(self._works) < len(self.buckets) and self.buckets[len(self._works)].num_pending <= 0:
            bucket = self.buckets[len(self._works)]
            self._works.append((bucket, self._start(bucket)))

    def _start(self, bucket: Bucket) -> dist.Work | None:
        group = self._groups.of(bucket.layout.owners)
        if group is None:
            return None
        if not bucket.layout.zero:
            return dist.all_reduce(bucket.gradients, group=group, async_op=True)
        counts = [bucket.segment.size] * len(bucket.layout.owners)
        position = bucket.layout.owners.index(bucket.process)
        bucket.own_gradients().copy_(reduce_scatter(bucket.gradients, counts, position, group))
        return None

    def finish(self) -> None:
        """Sum what is left; every bucket's own gradients are then the sums over all owners."""
        with self._clock.term("gradient_sync"):
            self._clear(self._untouched)  # an expert that got no token, say
            while len(self._works) < len(self.buckets):
                bucket = self.buckets[len(self._works)]
                self._works.append((bucket, self._start(bucket)))
            for _, work in self._works:
                if work is not None:
                    work.wait()

    def gather_weights(self) -> None:
        """Sharded buckets: collect the other owners' segments; then refresh parameters that are copies."""
        with self._clock.term("gradient_sync"):
            for bucket in self.buckets:
                group = self._groups.of(bucket.layout.owners)
                if bucket.layout.zero and group is not None:
                    own = bucket.weights[bucket.segment.start : bucket.segment.stop]
                    bucket.weights.copy_(all_gather(own, [bucket.segment.size] * len(bucket.layout.owners), group))
        for bucket in self.buckets:
            bucket.publish()
