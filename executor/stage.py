"""A virtual stage's modules in a row on one rank."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from executor.attention import AttentionModule
from executor.collectives import Block
from executor.layout import ModuleLayout
from executor.modules import BlockModule, EmbeddingModule, HeadModule, MlpModule
from executor.moe import MoeModule
from specs.errors import BadInputError
from specs.layout import Interval
from specs.model import Attention, Embedding, Head, LatentAttention, Mamba2, Mlp, Moe

Tensor = torch.Tensor


def build_module(
    layout: ModuleLayout,
    block: Block,
    *,
    context: Block | None = None,
    chunk: Interval,
    seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> BlockModule:
    """The module of a layout, with uninitialised weights.  Raises `BadInputError` for a kind not run yet.

    `context`: the ranks that share a sequence with this one; None where blocks hold whole sequences.
    """
    match layout.module:
        case Embedding():
            return EmbeddingModule(layout, block, dtype, device, chunk=chunk, seq_len=seq_len)
        case Attention():
            return AttentionModule(layout, block, dtype, device, seq_len=seq_len, context=context)
        case Mlp():
            return MlpModule(layout, block, dtype, device)
        case Head():
            return HeadModule(layout, block, dtype, device)
        case Moe():
            return MoeModule(layout, block, dtype, device)
        case LatentAttention() | Mamba2():
            raise BadInputError(
                f"{layout.name} is of kind {layout.module.kind}, which the executor does not train yet; it runs "
                "embedding, attention, mlp, moe and head. Plans and estimates for this model work."
            )


class StageModule(nn.Module):
    """A virtual stage's run of modules on one rank: ids or chunk in, chunk, loss or (without targets) logits out."""

    def __init__(self, modules: list[BlockModule]) -> None:
        super().__init__()
        self.chain = nn.ModuleList(modules)

    def modules_in_order(self) -> list[BlockModule]:
        """The run's modules."""
        return [module for module in self.chain if isinstance(module, BlockModule)]

    def forward(self, x: Tensor, targets: Tensor | None, scale: float) -> Tensor:
        """x: token ids [micro-batch tokens] on the first stage, else the chunk [own tokens, hidden]."""
        for module in self.chain:
            arguments = (x, targets, scale) if isinstance(module, HeadModule) else (x,)
            if module.layout.placement.recompute == "full" and torch.is_grad_enabled():
                x = checkpoint(module, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = module(*arguments)
        return x
