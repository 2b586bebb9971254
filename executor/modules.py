"""The modules of a decoder as they lie on one rank: weights cut by the plan, activations by tokens.

Every module maps the residual chunk [own tokens, hidden] to the next one; only the embedding starts from token ids
and only the head ends in a loss.  Weight tensors come from `specs.tensors`, so memory models see the same table.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from executor.collectives import Block, all_gather
from executor.functions import (
    capped_attention,
    gated_activation,
    gather_linear,
    linear_scatter,
    recomputed_core,
    rms_norm,
    rotate,
    scatter,
    vocabulary_cross_entropy,
)
from executor.layout import ModuleLayout
from specs.layout import Interval, kv_groups_of
from specs.model import Attention, Head, Mlp, Norm, RopeScaling
from specs.tensors import local_rows, parameter_name, tensors_of

Tensor = torch.Tensor

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def normalise_rms(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """RMSNorm; with a unit offset the weight is its difference from 1, which half precision would lose."""
    if norm.unit_offset:
        weight = 1 + weight.to(torch.promote_types(x.dtype, torch.float32))
    return rms_norm(x, weight, norm.epsilon)


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
        self._positions = torch.arange(chunk.start, chunk.stop, device=device) % seq_len

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


@lru_cache(maxsize=16)
def rope_table(
    theta: float,
    factor: float,
    scaling: RopeScaling | None,
    head_dim: int,
    seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """cos and sin [seq_len, head_dim / 2] of position / factor x frequency; frequencies scaled as Llama 3.1 does."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is not None:
        turns = scaling.original_positions * frequencies / (2 * math.pi)
        smooth = (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
        smooth = smooth.clamp(0, 1)
        frequencies = frequencies * (smooth + (1 - smooth) / scaling.factor)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies / factor)
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)


class AttentionModule(BlockModule):
    """Causal self-attention of the block's whole sequences with the rank's own heads."""

    def __init__(
        self, layout: ModuleLayout, block: Block, dtype: torch.dtype, device: torch.device, *, seq_len: int
    ) -> None:
        super().__init__(layout, block, dtype, device)
        spec = layout.module
        assert isinstance(spec, Attention)
        self.spec = spec
        self._seq_len = seq_len
        heads, per_group = layout.units, spec.num_heads // spec.num_kv_heads
        groups = kv_groups_of(heads, spec.num_heads, spec.num_kv_heads)
        # Whole groups, or one group only: torch repeats KV heads itself; else each query head names its group.
        aligned = heads.size % groups.size == 0 and (groups.size == 1 or heads.start % per_group == 0)
        aligned = aligned and (groups.size == 1 or heads.size // groups.size == per_group)
        index = [head // per_group - groups.start for head in range(heads.start, heads.stop)]
        self._kv_index = None if aligned else torch.tensor(index, device=device)
        whole = Interval(0, seq_len)
        self._mask = self.allowed(whole, whole) if spec.window is not None and spec.window < seq_len else None

    def allowed(self, queries: Interval, keys: Interval) -> Tensor:
        """Which positions of `keys` those of `queries` may look at: [queries, keys], true where they may."""
        device = self.norm.device
        distance = torch.arange(*queries, device=device).unsqueeze(1) - torch.arange(*keys, device=device)
        return (distance >= 0) if self.spec.window is None else (distance >= 0) & (distance < self.spec.window)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Chunk -> query, key and value of the block's tokens, each [block tokens, own heads x width]."""
        biases = [self.optional(f"{name}_bias") for name in ("query", "key", "value")]
        return gather_linear(self.block, self.normalise(x, self.spec.norm), (self.query, self.key, self.value), biases)

    def heads(
        self, query: Tensor, key: Tensor, value: Tensor, *qk_norms: Tensor, seq_len: int, first: int = 0, table_len: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split into heads [sequences, heads, seq_len, width], normalised, rotated for positions from `first` on."""
        width = self.spec.head_dim
        q, k, v = (x.view(-1, seq_len, x.shape[-1] // width, width).transpose(1, 2) for x in (query, key, value))
        if qk_norms:
            q, k = normalise_rms(q, qk_norms[0], self.spec.norm), normalise_rms(k, qk_norms[1], self.spec.norm)
        if self.spec.rope_theta is not None:
            kind = (self.spec.rope_theta, self.spec.rope_factor, self.spec.rope_scaling, width)
            table = rope_table(*kind, table_len, query.dtype, query.device)
            cos, sin = (part[first : first + seq_len] for part in table)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Heads as `heads` gives them -> [tokens, own heads x width].  `mask` None: causal."""
        if self._kv_index is not None:
            k, v = k[:, self._kv_index], v[:, self._kv_index]
        scale, grouped = self.spec.score_scale, q.shape[1] != k.shape[1]
        if self.spec.score_cap is not None:
            if mask is None:
                mask = self.allowed(Interval(0, q.shape[2]), Interval(0, k.shape[2]))
            y = capped_attention(q, k, v, mask, scale, self.spec.score_cap)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
        return y.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[3])

    def core(self, query: Tensor, key: Tensor, value: Tensor, *qk_norms: Tensor) -> Tensor:
        """[block tokens, heads x width] x 3 -> attention output [block tokens, own heads x width]."""
        length = self._seq_len
        return self.attend(*self.heads(query, key, value, *qk_norms, seq_len=length, table_len=length), self._mask)

    def qk_norms(self) -> tuple[Tensor, ...]:
        """Weights of the norms of queries and keys, of models that have them."""
        return (self.query_norm, self.key_norm) if self.spec.qk_norm else ()

    def forward(self, x: Tensor) -> Tensor:
        qkv, norms = self.project(x), self.qk_norms()
        if self.layout.placement.recompute == "selective":
            y = recomputed_core(self.block, self.core, self.output, *qkv, *norms)
        else:
            y = linear_scatter(self.block, self.core(*qkv, *norms), self.output)
        return self.finish(x, y, "output_bias")


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
        columns = gather_linear(self.block, self.normalise(x, self.spec.norm), weights, biases)
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
