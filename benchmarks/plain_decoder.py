"""A decoder in plain torch, as anyone would write it, from the executor's first weights."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from executor.weights import initial_values
from specs.layout import Interval
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec
from specs.tensors import tensors_of

HIDDEN, HEADS, KV_HEADS, WIDTH, FFN, LAYERS, VOCAB = 512, 8, 4, 64, 1408, 4, 256
MODEL = ModelSpec(
    name="four layers",
    embedding=Embedding(hidden=HIDDEN, vocab=VOCAB),
    layers=(
        Layer(
            attention=Attention(hidden=HIDDEN, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH),
            feed_forward=Mlp(hidden=HIDDEN, ffn=FFN),
            repeat=LAYERS,
        ),
    ),
    head=Head(hidden=HIDDEN, vocab=VOCAB),
)


class PlainLayer(nn.Module):
    """Pre-norm attention and gated MLP as anyone would write them."""

    def __init__(self, attention: Attention, mlp: Mlp) -> None:
        super().__init__()
        hidden, self.attention = attention.hidden, attention
        heads, kv_heads = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.query = nn.Linear(hidden, heads, bias=False)
        self.key, self.value = (nn.Linear(hidden, kv_heads, bias=False) for _ in range(2))
        self.output = nn.Linear(heads, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, mlp.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(mlp.ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        batch, length = x.shape[:2]
        parts = (self.query(normed), self.key(normed), self.value(normed))
        width = self.attention.head_dim
        q, k, v = (part.view(batch, length, -1, width).transpose(1, 2) for part in parts)
        cos, sin = _rotary_table(self.attention.rope_theta, width, length, x.dtype, x.device)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(y.transpose(1, 2).reshape(batch, length, -1))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


@cache
def _rotary_table(
    theta: float, width: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class PlainDecoder(nn.Module):
    """Some consecutive layers, with the embedding in front of the first and the head behind the last."""

    def __init__(self, first: int = 0, last: int | None = None, model: ModelSpec = MODEL) -> None:
        super().__init__()
        last = model.num_layers if last is None else last
        self.first, self.model = first, model
        self.embedding = nn.Embedding(model.vocab, model.hidden) if first == 0 else None
        modules = dict(model.modules())
        names = [(f"layer.{i}.attention", f"layer.{i}.mlp") for i in range(first, last)]
        self.layers = nn.ModuleList(PlainLayer(modules[one], modules[two]) for one, two in names)
        is_last = last == model.num_layers
        self.norm = nn.RMSNorm(model.hidden, eps=1e-5) if is_last else None
        self.head = nn.Linear(model.hidden, model.vocab, bias=False) if is_last else None
        self._load()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))

    def _load(self) -> None:
        """The same first weights as the executor's."""
        with torch.no_grad():
            if self.embedding is not None:
                self.embedding.weight.copy_(self._weight("embedding", "weight"))
            if self.head is not None:
                self.head.weight.copy_(self._weight("head", "weight"))
            for offset, layer in enumerate(self.layers):
                for part, names in (
                    ("attention", ("query", "key", "value", "output")),
                    ("mlp", ("gate", "up", "down")),
                ):
                    for name in names:
                        value = self._weight(f"layer.{self.first + offset}.{part}", name)
                        transposed = name in ("output", "down")
                        getattr(layer, name).weight.copy_(value.t() if transposed else value)

    def _weight(self, module_name: str, tensor_name: str) -> torch.Tensor:
        module = dict(self.model.modules())[module_name]
        tensor = next(t for t in tensors_of(module) if t.name == tensor_name)
        values = initial_values(
            f"{module_name}.{tensor_name}",
            Interval(0, tensor.num_elements),
            tensor.init,
            num_layers=self.model.num_layers,
            seed=0,
            dtype=torch.float32,
        )
        return values.view(tensor.shape(tensor.rows))
