"""ZeRO-3: the weights of a module are whole on a rank only while the module computes.

    forward   gather weights, compute, free      backward  gather them again, compute gradients, free

A bucket's flat weights keep their storage object while its memory comes and goes, so the parameters (views of it) and
what autograd saved of them find the values in place.  Autograd tells when: a module's backward begins when its output's
gradient is there and ends when its input's is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from executor.buckets import Bucket
from executor.clock import Clock
from executor.collectives import Finish, start_all_gather
from executor.groups import Groups
from executor.modules import BlockModule

Tensor = torch.Tensor


def release(module: BlockModule) -> BlockModule:
    """Free the matrices of a module that is built to be gathered: they get their memory with their values."""
    if module.layout.placement.zero == 3:
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.untyped_storage().resize_(0)
    return module


class _OnBackward(torch.autograd.Function):
    """Nothing, but `call` is made when the gradient passes."""

    @staticmethod
    def forward(ctx, x: Tensor, call: Callable[[], None]):  # type: ignore[no-untyped-def]
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        ctx.call()
        return grad, None


class GatheredWeights:
    """One module's weights: gathered by hooks before each use, freed after it.

    `buckets` are all that hold parts of the module's parameters; those of level 3 are gathered.  `copies` are the
    parameters that are no views of one of them.
    """

    def __init__(
        self, module: BlockModule, buckets: Sequence[Bucket], copies: Sequence[Tensor], groups: Groups, clock: Clock
    ) -> None:
        self._buckets = buckets
        self.sharded = [bucket for bucket in buckets if bucket.layout.zero == 3]
        self._copies = [(copy.untyped_storage(), copy.numel() * copy.element_size()) for copy in copies]
        for storage, _ in self._copies:
            storage.resize_(0)
        self._groups, self._clock = groups, clock
        self._backward_uses_weights = module.backward_uses_weights
        self._gathers: list[Finish] | None = None  # None: closed
        self._in_backward = False
        self._next: GatheredWeights | None = None
        self._previous: GatheredWeights | None = None
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)
        if not self._backward_uses_weights:
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _: self.close())

    def _start(self) -> None:
        if self._gathers is not None:
            return
        self._gathers = []
        for storage, size in self._copies:
            storage.resize_(size)
        for bucket in self.sharded:
            bucket.open()
            group = self._groups.of(bucket.layout.owners)
            self._gathers.append(start_all_gather(bucket.shard, bucket.layout.counts, group, bucket.weights))

    def _open(self, following: GatheredWeights | None) -> None:
        with self._clock.term("gradient_sync"):
            self._start()
            assert self._gathers is not None
            if self._gathers:
                for finish in self._gathers:
                    finish()
                self._gathers.clear()
                for bucket in self._buckets:
                    bucket.publish()
            if following is not None:
                following._start()

    def close(self) -> None:
        """Free the weights; also those that were gathered and not used."""
        if self._gathers is None:
            return
        for finish in self._gathers:
            finish()
        self._gathers = None
        for bucket in self.sharded:
            bucket.close()
        for storage, _ in self._copies:
            storage.resize_(0)

    def _before_forward(self, module: BlockModule, arguments: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ARG002
        self._open(self._next)
        x, *rest = arguments
        if self._backward_uses_weights and x.requires_grad:
            x = _OnBackward.apply(x, self._end_backward)
        return (x, *rest)

    def _after_forward(self, module: BlockModule, arguments: tuple[Any, ...], out: Tensor) -> Tensor:  # noqa: ARG002
        if not self._in_backward:  # else this is recomputation, and the gradients come next
            self.close()
        if self._backward_uses_weights and out.requires_grad:
            return _OnBackward.apply(out, self._begin_backward)
        return out

    def _begin_backward(self) -> None:
        self._in_backward = True
        self._open(self._previous)

    def _end_backward(self) -> None:
        self._in_backward = False
        self.close()


def prefetch(chain: Iterable[GatheredWeights]) -> None:
    """Let each module of a chain gather its neighbour's weights while it computes."""
    modules = list(chain)
    for here, there in pairwise(modules):
        if not set(map(id, here.sharded)) & set(map(id, there.sharded)):  # tied weights
            here._next, there._previous = there, here
