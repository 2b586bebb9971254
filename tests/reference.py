"""The oracle of the executor: the same decoder in one process, whole weights, plain torch, nothing of ours inside."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from specs.model import Attention, Embedding, Head, Mlp, ModelSpec, Moe, Norm
from specs.tensors import parameter_name, tensors_of

Weights = dict[str, torch.Tensor]
ACTIVATION = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}


def _norm(x: torch.Tensor, w: Weights, prefix: str, norm: Norm) -> torch.Tensor:
    if norm.kind == "layernorm":
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(variance + norm.epsilon) * w[f"{prefix}.norm"] + w[f"{prefix}.norm_bias"]
    return _rms(x, w[f"{prefix}.norm"], norm)


def _rms(x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> torch.Tensor:
    factor = weight + 1 if norm.unit_offset else weight
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.epsilon) * factor


def _cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _rope(x: torch.Tensor, theta: float, factor: float) -> torch.Tensor:
    """x [batch, heads, length, width] as complex rotation."""
    length, width = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64) / factor, frequencies)
    turn = torch.polar(torch.ones_like(angles), angles)
    z = torch.complex(x[..., : width // 2].double(), x[..., width // 2 :].double()) * turn
    return torch.cat((z.real, z.imag), dim=-1).to(x.dtype)


def _attention(x: torch.Tensor, w: Weights, name: str, spec: Attention) -> torch.Tensor:
    batch, length, _ = x.shape
    normed = _norm(x, w, name, spec.norm)
    outs = []
    for kind in ("query", "key", "value"):
        y = normed @ w[f"{name}.{kind}"].t()
        if spec.qkv_bias:
            y = y + w[f"{name}.{kind}_bias"]
        outs.append(y.view(batch, length, -1, spec.head_dim).transpose(1, 2))
    q, k, v = outs
    if spec.qk_norm:
        q = _rms(q, w[f"{name}.query_norm"], spec.norm)
        k = _rms(k, w[f"{name}.key_norm"], spec.norm)
    if spec.rope_theta is not None:
        q, k = (_rope(part, spec.rope_theta, spec.rope_factor) for part in (q, k))
    per_group = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(per_group, dim=1), v.repeat_interleave(per_group, dim=1)
    scale = 1 / math.sqrt(spec.head_dim) if spec.score_scale is None else spec.score_scale
    scores = _cap(q @ k.transpose(-1, -2) * scale, spec.score_cap)
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    allowed = distance >= 0 if spec.window is None else (distance >= 0) & (distance < spec.window)
    probabilities = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    y = (probabilities @ v).transpose(1, 2).reshape(batch, length, -1) @ w[f"{name}.output"]
    y = y + w[f"{name}.output_bias"] if spec.output_bias else y
    return _rms(y, w[f"{name}.post_norm"], spec.norm) if spec.post_norm else y


def _mlp(x: torch.Tensor, w: Weights, name: str, spec: Mlp) -> torch.Tensor:
    normed = _norm(x, w, name, spec.norm)
    bias = (lambda kind: w[f"{name}.{kind}_bias"]) if spec.bias else (lambda _: 0.0)
    up = normed @ w[f"{name}.up"].t() + bias("up")
    if spec.gated:
        up = ACTIVATION[spec.activation](normed @ w[f"{name}.gate"].t() + bias("gate")) * up
    else:
        up = ACTIVATION[spec.activation](up)
    y = up @ w[f"{name}.down"] + bias("down")
    return _rms(y, w[f"{name}.post_norm"], spec.norm) if spec.post_norm else y


def _moe(x: torch.Tensor, w: Weights, name: str, spec: Moe) -> torch.Tensor:
    """Every expert on every token; those not chosen have weight 0."""
    normed, act = _norm(x, w, name, spec.norm), ACTIVATION[spec.activation]
    scores = normed @ w[f"{name}.router"].t()
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(spec.experts_per_token).indices, True)
    weights = scores.masked_fill(~chosen, -math.inf).softmax(-1)
    shape = (spec.num_experts, spec.expert_ffn, -1)
    gate, up, down = (w[f"{name}.{kind}"].view(shape) for kind in ("gate", "up", "down"))
    hidden = act(torch.einsum("bld,efd->blef", normed, gate)) * torch.einsum("bld,efd->blef", normed, up)
    y = torch.einsum("blef,efd,ble->bld", hidden, down, weights)
    if spec.shared_ffn:
        shared = act(normed @ w[f"{name}.shared_gate"].t()) * (normed @ w[f"{name}.shared_up"].t())
        y = y + shared @ w[f"{name}.shared_down"]
    return y


def logits(model: ModelSpec, w: Weights, ids: torch.Tensor) -> torch.Tensor:
    """ids [batch, length] -> [batch, length, vocab]."""
    x = torch.empty(0)
    for name, spec in model.modules():
        match spec:
            case Embedding():
                x = w["embedding.weight"][ids] * (1.0 if spec.scale is None else spec.scale)
                if spec.num_positions:
                    x = x + w["embedding.positions"][: ids.shape[1]]
            case Attention():
                x = x + _attention(x, w, name, spec)
            case Mlp():
                x = x + _mlp(x, w, name, spec)
            case Moe():
                x = x + _moe(x, w, name, spec)
            case Head():
                weight = w["embedding.weight"] if spec.tied else w["head.weight"]
                x = _cap(_norm(x, w, "head", spec.norm) @ weight.t(), spec.logit_cap)
    return x


def mean_loss(model: ModelSpec, w: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """tokens [batch, length + 1] -> mean cross-entropy."""
    z = logits(model, w, tokens[:, :-1])
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), tokens[:, 1:].reshape(-1))


def decaying(model: ModelSpec) -> set[str]:
    """Names of tensors with weight decay."""
    return {parameter_name(n, m, t) for n, m in model.modules() for t in tensors_of(m) if t.decay}
