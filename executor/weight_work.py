"""Weight gradients that a split backward pass leaves for later (I, then W)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Deferred:
    """Parameters, and what computes their gradients from tensors that are kept until then."""

    parameters: tuple[Tensor, ...]
    compute: Callable[[], Sequence[Tensor]]

    def run(self) -> None:
        """Compute the gradients and accumulate them, as backward would have done."""
        with torch.no_grad():
            gradients = self.compute()
        torch.autograd.backward(self.parameters, gradients)


@dataclass
class WeightWork:
    """Where the linear functions of a rank ask whether their weight gradients come now or later."""

    _kept: list[Deferred] | None = field(default=None, init=False)

    def gradients(
        self, parameters: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]
    ) -> Sequence[Tensor | None]:
        """The gradients for autograd: those that `compute` makes, or None for each while they are kept for later."""
        if self._kept is None:
            return compute()
        self._kept.append(Deferred(tuple(parameters), compute))
        return [None] * len(parameters)

    @contextmanager
    def later(self) -> Iterator[list[Deferred]]:
        """Keep what backward passes inside this context would compute."""
        self._kept = kept = []
        try:
            yield kept
        finally:
            self._kept = None
