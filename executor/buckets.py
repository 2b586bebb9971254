"""Buckets: flat runs of elements that the same ranks hold, in which gradients are summed and weights are sharded.

ZeRO levels (arXiv 1910.02054) of a bucket over its n owners, and what each owner keeps of N elements:

    0  weights N, gradients N, optimizer state N        summed once a step
    1  weights N, gradients N, optimizer state N / n    scattered once a step, weights gathered after the update
    2  weights N, gradients and state N / n             scattered after every micro-batch, weights gathered as before
    3  weights, gradients and state N / n               weights gathered around each use (executor.gathered)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from executor.collectives import Finish
from executor.layout import TensorHoldings
from specs.layout import Interval, refine
from specs.tensors import sharding_level

# Buckets of about this many elements: large enough for bandwidth, small enough to overlap with backward.
BUCKET_ELEMENTS = 8 * 2**20

# Gives row-major elements of a global tensor, flat, of any type.
Read = Callable[[str, Interval], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """An atomic interval of a tensor, and where it starts in its bucket."""

    tensor: str
    elements: Interval
    offset: int


@dataclass
class BucketLayout:
    """Pieces with the same owners, sharding and decay.  Padded so that `zero` can cut it evenly.

    `module`: the one that it belongs to, where weights are gathered module by module (zero 3), else empty.
    """

    owners: tuple[int, ...]
    zero: int
    decay: bool
    module: str = ""
    pieces: list[Piece] = field(default_factory=list)
    num_elements: int = 0

    @property
    def padded(self) -> int:
        """Length of the flat buffers."""
        return -(-self.num_elements // len(self.owners)) * len(self.owners) if self.zero else self.num_elements

    @property
    def counts(self) -> list[int]:
        """Lengths of the owners' segments, of a sharded bucket."""
        return [self.padded // len(self.owners)] * len(self.owners)

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
    open_buckets: dict[tuple[tuple[int, ...], int, bool, str], BucketLayout] = {}
    for name in reversed(list(holdings)):
        entry = holdings[name]
        by_interval: defaultdict[Interval, set[int]] = defaultdict(set)
        for holding in entry.holdings:
            by_interval[holding.elements].add(holding.process)
        for atom in refine(by_interval):
            owners = {p for i, ps in by_interval.items() if i.start <= atom.start and atom.stop <= i.stop for p in ps}
            zero = sharding_level(entry.tensor, entry.zero) if len(owners) > 1 else 0
            key = (tuple(sorted(owners)), zero, entry.tensor.decay, entry.module if zero == 3 else "")
            bucket = open_buckets.setdefault(key, BucketLayout(*key))
            bucket.pieces.append(Piece(name, atom, bucket.num_elements))
            bucket.num_elements += atom.size
            # In the order of their last pieces: what backward reaches last must not keep others waiting.
            open_buckets[key] = open_buckets.pop(key)
            if bucket.num_elements >= bucket_elements:
                finished.append(open_buckets.pop(key))
    return [*finished, *open_buckets.values()]


class Bucket:
    """One bucket on one of its owners.

    `weights` is flat and whole; at level 3 it has memory only until the first `close` and between `open` and `close`.
    `master` is the fp32 (or wider) segment that the optimizer updates; where the weights have that type already, it is
    a view of them (at level 3, of the shard that is kept).  `gradients` are sums of the step so far: of everything,
    from level 2 on of the own segment; what a micro-batch adds then collects in a buffer that `take` gives away.
    """

    def __init__(self, layout: BucketLayout, process: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.process = process
        self.segment = layout.segment(process)
        accumulate = torch.promote_types(dtype, torch.float32)
        self._sums_whole = layout.zero < 2
        size = layout.padded if self._sums_whole else self.segment.size
        self.gradients = torch.zeros(size, dtype=accumulate, device=device)
        self.weights = torch.zeros(layout.padded, dtype=dtype, device=device)
        self._num_bytes = self.weights.untyped_storage().nbytes()
        self.shard = self.weights[self.segment.start : self.segment.stop]
        if layout.zero == 3:
            self.shard = torch.zeros(self.segment.size, dtype=dtype, device=device)
        self.master = self.shard if dtype == accumulate else self.shard.to(accumulate)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # parts of parameters that are no views, and theirs
        self._buffer: torch.Tensor | None = self.gradients if self._sums_whole else None
        self._slots: list[tuple[slice, bool]] = []  # where a parameter's gradients go, and whether no other's do
        self._written: set[int] = set()
        self.num_scattered = 0  # sums of this step so far

    def own_gradients(self) -> torch.Tensor:
        """The summed gradients of the segment that is optimised here."""
        return self.gradients[self.segment.start : self.segment.stop] if self._sums_whole else self.gradients

    def writer_gradients(self) -> torch.Tensor:
        """Those that this process counts in the norm."""
        part = self.layout.writer_segment(self.process)
        return self.gradients[part.start : part.stop] if self._sums_whole else self.gradients

    def add_slot(self, where: slice, *, is_alone: bool) -> int:
        """A parameter will give gradients to this part; `is_alone`: no other on this rank does."""
        self._slots.append((where, is_alone))
        return len(self._slots) - 1

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self.num_scattered = 0
        if self._sums_whole:
            self._begin(self.gradients)

    def _begin(self, buffer: torch.Tensor) -> None:
        # Who is alone overwrites first, so that nothing needs to be set to zero for it.
        self._written = {slot for slot, (_, is_alone) in enumerate(self._slots) if not is_alone}
        for slot in self._written:
            buffer[self._slots[slot][0]].zero_()

    def _summands(self) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(self.layout.padded, dtype=self.gradients.dtype, device=self.gradients.device)
            self._buffer[self.layout.num_elements :].zero_()
            self._begin(self._buffer)
        return self._buffer

    def add(self, slot: int, values: torch.Tensor) -> None:
        """Add a parameter's gradient [elements of its slot]."""
        target = self._summands()[self._slots[slot][0]]
        if slot in self._written:
            target.add_(values)
        else:
            target.copy_(values)
            self._written.add(slot)

    def take(self) -> torch.Tensor:
        """This rank's summands of the whole bucket, to be summed; from level 2 on the buffer is no longer kept."""
        buffer = self._summands()
        for slot, (where, _) in enumerate(self._slots):
            if slot not in self._written:
                buffer[where].zero_()
        if not self._sums_whole:
            self._buffer = None
        return buffer

    def put(self, finish: Finish) -> None:
        """A scattered sum of the own segment: the step's only one at level 1, else one of several."""
        if self.num_scattered == 0:
            finish(self.own_gradients())
        else:
            self.own_gradients().add_(finish())
        self.num_scattered += 1

    def add_copy(self, values: torch.Tensor, weights: torch.Tensor) -> None:
        """Keep `values` (a flat view of a parameter) equal to `weights` (a view of this bucket's)."""
        self._copies.append((values, weights))

    def publish(self) -> None:
        """Copy the flat weights to the parameters that are not views of them and have memory just now."""
        for values, weights in self._copies:
            if values.untyped_storage().nbytes():
                values.copy_(weights)

    def open(self) -> None:
        """Give the weights memory; their values are not set yet."""
        self.weights.untyped_storage().resize_(self._num_bytes)

    def close(self) -> None:
        """Free the weights; whoever holds views of them finds the next values there."""
        self.weights.untyped_storage().resize_(0)

    def reset_weights(self) -> None:
        """After the master changed: the weights of the segment follow."""
        if self.master.data_ptr() != self.shard.data_ptr():
            self.shard.copy_(self.master)

    def fill(self, read: Read) -> None:
        """Set weights and master, reading no more than BUCKET_ELEMENTS at once; `publish` copies afterwards."""
        for piece in self.layout.pieces:
            held = Interval(piece.offset, piece.offset + piece.elements.size)
            if self.layout.zero == 3:
                held = held.overlap(self.segment)
            for start in range(held.start, held.stop, BUCKET_ELEMENTS):
                part = Interval(start, min(start + BUCKET_ELEMENTS, held.stop))
                values = read(piece.tensor, part.shifted(piece.elements.start - piece.offset)).to(self.weights.device)
                if self.layout.zero < 3:
                    self.weights[slice(*part)] = values
                mine = part.overlap(self.segment)
                if mine.size > 0:
                    own = slice(*mine.shifted(-self.segment.start))
                    self.master[own] = values[slice(*mine.shifted(-part.start))]
                    self.shard[own] = self.master[own]
