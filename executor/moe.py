"""Mixture of experts, token choice: each rank computes its interval of experts on the tokens routed to them.

Routing is done by every rank for its own tokens; the block then gathers tokens, chosen experts and their weights, and
the reduce-scatter adds up what the experts (and the rank's columns of the shared ones) made of them.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from executor.collectives import Block
from executor.functions import gated_activation, gather, scatter
from executor.layout import ModuleLayout
from executor.modules import ACTIVATIONS, BlockModule
from specs.model import Moe

Tensor = torch.Tensor


class MoeModule(BlockModule):
    """Gated experts, the best `experts_per_token` for each token, weighted by softmax over those."""

    def __init__(self, layout: ModuleLayout, block: Block, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layout, block, dtype, device)
        assert isinstance(layout.module, Moe)
        self.spec = layout.module
        self._activation = ACTIVATIONS[self.spec.activation]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised own tokens -> weights and numbers of their experts, both [own tokens, experts per token]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        probabilities = (x @ self.router.t()).softmax(-1, dtype=wide)
        weights, experts = probabilities.topk(self.spec.experts_per_token, dim=-1)
        # Softmax over all, then divided by the sum of the chosen ones: the same as softmax over those.
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts

    def _tokens_of(self, expert: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens that an expert gets, and at which place of theirs it stands."""
        if chosen.is_meta:  # shapes without values: what a balanced router would send
            share = chosen.new_empty(chosen.numel() // self.spec.num_experts)
            return share, share
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        return tokens, places

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """This rank's summand [block tokens, hidden] for the block's tokens and their routing."""
        width = self.spec.expert_ffn
        routed, outs = [], []
        for index in range(self.layout.units.size):
            tokens, places = self._tokens_of(self.layout.units.start + index, chosen)
            rows = slice(index * width, (index + 1) * width)
            own = x[tokens]
            y = gated_activation(self._activation, own @ self.gate[rows].t(), own @ self.up[rows].t())
            routed.append(tokens)
            outs.append(y @ self.down[rows] * weights[tokens, places].unsqueeze(-1))
        total = torch.zeros_like(x).index_add(0, torch.cat(routed), torch.cat(outs))
        if self.spec.shared_ffn:
            y = gated_activation(self._activation, x @ self.shared_gate.t(), x @ self.shared_up.t())
            total = total + y @ self.shared_down
        return total

    def forward(self, x: Tensor) -> Tensor:
        normed = self.normalise(x, self.spec.norm)
        weights, chosen = self.route(normed)
        routing = (gather(self.block, normed), gather(self.block, weights), self.block.all_gather(chosen))
        if self.layout.placement.recompute == "selective" and torch.is_grad_enabled():
            y = checkpoint(self.experts, *routing, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self.experts(*routing)
        return x + scatter(self.block, y)
