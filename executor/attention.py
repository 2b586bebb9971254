"""Causal self-attention as it lies on one rank: own heads, whole sequences or a part of one.

Blocks that share a sequence (context parallelism) gather its keys and values over their ranks of the same heads; each
attends with the queries of its own slices.  What a window or the order of slices leaves out is not computed:
attention goes by pieces of queries, each with the keys that it may need.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from executor.collectives import Block
from executor.functions import gather, gather_linear, linear_scatter, recomputed_core, rotate
from executor.layout import ModuleLayout
from executor.modules import BlockModule, normalise_rms
from specs.layout import Interval, kv_groups_of
from specs.model import Attention, RopeScaling
from specs.slices import attention_pieces, mask_shape, slices, view_of

Tensor = torch.Tensor


@lru_cache(maxsize=16)
def rope_table(
    theta: float,
    factor: float,
    scaling: RopeScaling | None,
    head_dim: int,
    slices: tuple[Interval, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions of the slices, head_dim / 2] of position / factor x frequency.

    Frequencies are scaled as Llama 3.1 does.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is not None:
        turns = scaling.original_positions * frequencies / (2 * math.pi)
        smooth = (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
        smooth = smooth.clamp(0, 1)
        frequencies = frequencies * (smooth + (1 - smooth) / scaling.factor)
    positions = torch.cat([torch.arange(part.start, part.stop, dtype=torch.float64) for part in slices])
    angles = torch.outer(positions, frequencies / factor)
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)


@lru_cache(maxsize=8)
def mask_table(rows: int, columns: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to scores [rows, columns]: 0 where a query may look, else minus infinity.

    The last query is at the last key, so that the lower right corner of r x c is the mask of r queries and c keys.
    """
    queries = torch.arange(columns - rows, columns, device=device).unsqueeze(1)
    distance = queries - torch.arange(columns, device=device)
    allowed = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return torch.zeros((rows, columns), dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))


def forget_tables() -> None:
    """Drop what is kept between calls; tensors of one mode (fake ones) must not reach another."""
    rope_table.cache_clear()
    mask_table.cache_clear()


def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, cap: float) -> Tensor:
    """softmax(cap tanh(q k^T scale / cap) + mask) v on [sequences, heads, tokens, width], with whole scores in memory.

    Fewer KV heads than query heads serve equal groups of them.  `scale` None: 1 / sqrt(width).
    """
    groups = k.shape[1]
    q = q.unflatten(1, (groups, -1))  # [sequences, groups, heads of one, tokens, width]
    scores = q @ k.unsqueeze(2).transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (scores / cap).tanh() * cap
    wide = torch.promote_types(q.dtype, torch.float32)
    probabilities = (scores + mask).softmax(-1, dtype=wide).to(q.dtype)
    return (probabilities @ v.unsqueeze(2)).flatten(1, 2)


class _Shared:
    """The gradient of a tensor of which pieces take overlapping parts: the last piece hands it on."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.left = 0


class _Part(torch.autograd.Function):
    """x[:, :, start:stop].  Autograd's own slice would fill a whole gradient with zeros for each."""

    @staticmethod
    def forward(ctx, x: Tensor, part: Interval, shared: _Shared):  # type: ignore[no-untyped-def]
        ctx.part, ctx.shared, ctx.shape = part, shared, x.shape
        shared.left += 1
        return x[:, :, part.start : part.stop]

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        shared, (count, heads, length, width) = ctx.shared, ctx.shape
        if shared.total is None:  # tokens outside heads, as the projections have them
            shared.total = grad.new_zeros((count, length, heads, width)).transpose(1, 2)
        shared.total[:, :, ctx.part.start : ctx.part.stop] += grad
        shared.left -= 1
        if shared.left:
            return None, None, None
        total, shared.total = shared.total, None  # nothing here outlives it
        return total, None, None


class AttentionModule(BlockModule):
    """Causal self-attention of the block's sequences, or of its part of one, with the rank's own heads."""

    def __init__(
        self,
        layout: ModuleLayout,
        block: Block,
        dtype: torch.dtype,
        device: torch.device,
        *,
        seq_len: int,
        context: Block | None = None,
    ) -> None:
        """`context`: the ranks that have the same heads of the same sequence; None: this one alone."""
        super().__init__(layout, block, dtype, device)
        spec = layout.module
        assert isinstance(spec, Attention)
        self.spec = spec
        self._context = context
        view = view_of(layout.block_tokens, seq_len)
        self._slices = slices(view, seq_len, layout.context)
        self._pieces = attention_pieces(view, seq_len, layout.context, spec.window)
        shape = mask_shape(self._pieces, spec.window, spec.score_cap is not None)
        near = spec.window is not None and spec.window < seq_len
        spared = device.type == "cuda" and not near and spec.score_cap is None  # its kernels know the lower right
        self.mask = None if shape is None or spared else mask_table(*shape, spec.window, dtype, device)
        order = slices(Interval(0, seq_len), seq_len, layout.context)
        self._places = sorted(range(len(order)), key=order.__getitem__) if len(order) > 1 else []  # of slices, in order
        heads, per_group = layout.units, spec.num_heads // spec.num_kv_heads
        groups = kv_groups_of(heads, spec.num_heads, spec.num_kv_heads)
        # Whole groups, or one group only: torch repeats KV heads itself; else each query head names its group.
        aligned = heads.size % groups.size == 0 and (groups.size == 1 or heads.start % per_group == 0)
        aligned = aligned and (groups.size == 1 or heads.size // groups.size == per_group)
        index = [head // per_group - groups.start for head in range(heads.start, heads.stop)]
        self._kv_index = None if aligned else torch.tensor(index, device=device)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Chunk -> query, key and value of the block's tokens, each [block tokens, own heads x width]."""
        biases = [self.optional(f"{name}_bias") for name in ("query", "key", "value")]
        keep = self.layout.placement.recompute == "keep"
        weights = (self.query, self.key, self.value)
        return gather_linear(self.block, self.normalise(x, self.spec.norm), weights, biases, keep=keep)

    def heads(
        self, query: Tensor, key: Tensor, value: Tensor, *qk_norms: Tensor, positions: tuple[Interval, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split into heads [sequences, heads, tokens of `positions`, width], normalised, rotated."""
        width, length = self.spec.head_dim, sum(part.size for part in positions)
        q, k, v = (x.view(-1, length, x.shape[-1] // width, width).transpose(1, 2) for x in (query, key, value))
        if qk_norms:
            q, k = normalise_rms(q, qk_norms[0], self.spec.norm), normalise_rms(k, qk_norms[1], self.spec.norm)
        if self.spec.rope_theta is not None:
            kind = (self.spec.rope_theta, self.spec.rope_factor, self.spec.rope_scaling, width)
            table = rope_table(*kind, positions, query.dtype, query.device)
            q, k = rotate(q, *table), rotate(k, *table)
        return q, k, v

    def _whole(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the own slices -> of whole sequences, in the order of positions."""
        alone = self._context is None or self._context.size == 1
        if alone and not self._places:
            return k, v
        count, groups, length, width = k.shape
        both = torch.stack((k.transpose(1, 2), v.transpose(1, 2)), dim=2).view(count, length, -1)
        if self._context is not None and not alone:
            both = gather(self._context, both[0]).unsqueeze(0)
        by_slice = both.split(both.shape[1] // len(self._places), dim=1)
        both = torch.cat([by_slice[place] for place in self._places], dim=1)
        whole_k, whole_v = both.view(count, -1, 2, groups, width).unbind(2)
        return whole_k.transpose(1, 2), whole_v.transpose(1, 2)

    def _corner(self, q: Tensor, keys: int) -> Tensor:
        """The mask of queries that end where so many keys end."""
        count, table = q.shape[2], self.mask
        if table is None or table.shape[0] < count or table.shape[1] < keys:
            table = mask_table(count, keys, self.spec.window, q.dtype, q.device)
        return table[table.shape[0] - count :, table.shape[1] - keys :]

    def _scores(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of queries that end where the keys end -> [sequences, tokens, heads, width]."""
        spec, count, keys = self.spec, q.shape[2], k.shape[2]
        if spec.score_cap is not None:
            return capped_attention(q, k, v, self._corner(q, keys), spec.score_scale, spec.score_cap).transpose(1, 2)
        far = spec.window is not None and spec.window < keys
        causal, mask = count == keys and not far, None
        if not causal and (far or count > 1):  # a single query may look at all keys that are given
            mask = causal_lower_right(count, keys) if q.is_cuda and not far else self._corner(q, keys)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=spec.score_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return y.transpose(1, 2)

    def _grouped(self, x: Tensor) -> Tensor:
        return x if self._kv_index is None else x[:, self._kv_index]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Heads as `heads` gives them, of queries that end where the keys end -> [tokens, own heads x width]."""
        if self.spec.window is not None:
            reach = self.spec.window + q.shape[2] - 1
            k, v = k[:, :, -reach:], v[:, :, -reach:]
        return self._scores(q, self._grouped(k), self._grouped(v)).reshape(-1, q.shape[1] * q.shape[3])

    def core(self, query: Tensor, key: Tensor, value: Tensor, *qk_norms: Tensor) -> Tensor:
        """[block tokens, heads x width] x 3 -> attention output [block tokens, own heads x width]."""
        q, k, v = self.heads(query, key, value, *qk_norms, positions=self._slices)
        k, v = self._whole(k, v)
        if len(self._pieces) == 1:
            return self.attend(q, k, v)
        k, v = self._grouped(k), self._grouped(v)
        shared = (_Shared(), _Shared(), _Shared())
        outs = []
        for rows, keys in self._pieces:
            parts = zip((q, k, v), (rows, keys, keys), shared, strict=True)
            outs.append(self._scores(*(_Part.apply(x, part, total) for x, part, total in parts)))
        return torch.cat(outs, dim=1).view(-1, q.shape[1] * q.shape[3])

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
