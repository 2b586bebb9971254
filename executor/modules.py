"""The modules of a decoder as they lie on one rank: weights cut by the plan, activations by tokens.

Every module maps the residual chunk [own tokens, hidden] to the next one; only the embedding starts from token ids
and only the head ends in a loss.  Weight tensors come from `specs.tensors`, so memory models see the same table.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from executor.collectives import Block, all_gather
from executor.functions import (
    gated_activation,
    gather_linear,
    linear_scatter,
    recomputed_core,
    rms_norm,
    scatter,
    squared_relu,
    vocabulary_cross_entropy,
)
from executor.layout import ModuleLayout
from specs.layout import Interval
from specs.model import Head, Mlp, Norm
from specs.slices import slices
from specs.tensors import local_rows, parameter_name, tensors_of

Tensor = torch.Tensor

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": squared_relu,
}


def normalise_rms(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """RMSNorm; with a unit offset the weight is its difference from 1, which half precision would lose."""
    if norm.unit_offset:
        weight = 1 + weight.to(torch.promote_types(x.dtype, torch.float32))
    return rms_norm(x, weight, norm.epsilon)


def token_order(seq_len: int, context: int, device: torch.device) -> Tensor | None:
    """Position of each token of a sequence in the order of the token list; None: as they are."""
    if context == 1:
        return None
    runs = slices(Interval(0, seq_len), seq_len, context)
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


class BlockModule(nn.Module):
    """A module's weights on one rank.  `slices` gives each parameter's global name and row-major elements."""

    backward_uses_weights = True

    def __init__(self, layout: ModuleLayout, block: Block, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layout = layout
        self.block = block
        self.slices: dict[str, tuple[str, Interval]] = {}
        for tensor in tensors_of(layout.module):
            rows = local_rows(layout.module, tensor, layout.units)
            width = max(tensor.cols, 1)
            value = torch.empty(tensor.shape(rows.size), dtype=dtype, device=device)
            self.register_parameter(tensor.name, nn.Parameter(value))
            name = parameter_name(layout.name, layout.module, tensor)
            self.slices[tensor.name] = (name, Interval(rows.start * width, rows.stop * width))

    def optional(self, name: str) -> Tensor | None:
        """A tensor that only some models have."""
        return self._parameters.get(name)

    def normalise(self, x: Tensor, norm: Norm, name: str = "norm") -> Tensor:
        """The module's input norm (or the one of that name), on the rank's own tokens."""
        if norm.kind == "layernorm":
            return F.layer_norm(x, x.shape[-1:], getattr(self, name), getattr(self, f"{name}_bias"), norm.epsilon)
        return normalise_rms(x, getattr(self, name), norm)

    def finish(self, x: Tensor, y: Tensor, bias: str) -> Tensor:
        """The residual chunk and the module's summed output -> the next residual chunk."""
        offset = self.optional(bias)
        if offset is not None:
            y = y + offset
        if self.layout.module.post_norm:
            y = self.normalise(y, self.layout.module.norm, "post_norm")
        return x + y


class EmbeddingModule(BlockModule):
    """Token ids of the micro-batch -> residual chunk."""

    backward_uses_weights = False

    def __init__(
        self,
        layout: ModuleLayout,
        block: Block,
        dtype: torch.dtype,
        device: torch.device,
        *,
        chunk: Interval,
        seq_len: int,
    ) -> None:
        super().__init__(layout, block, dtype, device)
        places = torch.arange(chunk.start, chunk.stop, device=device) % seq_len
        order = token_order(seq_len, layout.context, device)
        self._positions = places if order is None else order[places]

    def forward(self, ids: Tensor) -> Tensor:
        own = ids[self.layout.block_tokens.start : self.layout.block_tokens.stop]
        return self.embed(own, self._positions)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The block's token ids, and the positions of the rank's own -> [own tokens, hidden]."""
        if self.block.size == 1:
            x = F.embedding(ids, self.weight)
        else:
            local = ids - self.layout.units.start
            mine = (local >= 0) & (local < self.layout.units.size)
            rows = F.embedding(local.clamp(0, self.layout.units.size - 1), self.weight)
            x = scatter(self.block, rows * mine.unsqueeze(-1).to(rows.dtype))
        scale = self.layout.module.scale
        if scale is not None:
            x = x * x.new_tensor(scale)  # in the weights' precision, as the published models were trained
        table = self.optional("positions")
        return x if table is None else x + F.embedding(positions, table)


class MlpModule(BlockModule):
    """Feed-forward part with the rank's own columns."""

    def __init__(self, layout: ModuleLayout, block: Block, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layout, block, dtype, device)
        assert isinstance(layout.module, Mlp)
        self.spec = layout.module
        self._activation = ACTIVATIONS[self.spec.activation]

    def core(self, *columns: Tensor) -> Tensor:
        """gate and up (or up alone) [block tokens, own columns] -> activated [block tokens, own columns]."""
        if self.spec.gated:
            return gated_activation(self._activation, *columns)
        return self._activation(*columns)

    def forward(self, x: Tensor) -> Tensor:
        names = ("gate", "up") if self.spec.gated else ("up",)
        weights = [getattr(self, name) for name in names]
        biases = [self.optional(f"{name}_bias") for name in names]
        keep = self.layout.placement.recompute == "keep"
        columns = gather_linear(self.block, self.normalise(x, self.spec.norm), weights, biases, keep=keep)
        if self.layout.placement.recompute == "selective":
            y = recomputed_core(self.block, self.core, self.down, *columns)
        else:
            y = linear_scatter(self.block, self.core(*columns), self.down)
        return self.finish(x, y, "down_bias")


class HeadModule(BlockModule):
    """Final norm, vocabulary projection and loss; without targets, logits."""

    backward_uses_weights = False  # forward makes the gradients too

    def __init__(self, layout: ModuleLayout, block: Block, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layout, block, dtype, device)
        assert isinstance(layout.module, Head)
        self.spec = layout.module

    def forward(self, x: Tensor, targets: Tensor | None, scale: float) -> Tensor:
        if targets is None:
            return self.logits(x)
        own = targets[self.layout.block_tokens.start : self.layout.block_tokens.stop]
        x = self.normalise(x, self.spec.norm)
        return vocabulary_cross_entropy(
            self.block, self.layout.units.start, x, self.weight, own, scale, self.spec.logit_cap
        )

    def logits(self, x: Tensor) -> Tensor:
        """Chunk -> whole logits [block tokens, vocabulary] on every member.  Training never makes them."""
        own = self.block.all_gather(self.normalise(x, self.spec.norm)) @ self.weight.t()
        if self.spec.logit_cap is not None:
            own = self.spec.logit_cap * (own / self.spec.logit_cap).tanh()
        if self.block.size == 1:
            return own
        counts = [stop - start for start, stop in pairwise(self.layout.unit_cuts)]
        return all_gather(own.t().contiguous(), counts, self.block.group).t()
