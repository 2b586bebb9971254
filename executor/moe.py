"""Mixture of experts, token choice: each rank computes its interval of experts on the tokens routed to them.

    route own tokens -> all-to-all to the experts' ranks -> compute -> all-to-all back -> add up

A token goes once to every rank that has any of its experts, whatever their number there, and comes back as one sum, so
that never more is sent than by gathering all tokens.  Shared experts lie whole on every rank and see its own tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from cost_models.dispatch import dispatched_tokens
from cost_models.flops import routed_tokens
from executor.collectives import Block
from executor.functions import add_rows, exchange, gated_activation
from executor.layout import ModuleLayout
from executor.modules import ACTIVATIONS, BlockModule
from specs.layout import interval_of
from specs.model import Moe

Tensor = torch.Tensor


class _Dispatch(NamedTuple):
    """Which of the rank's tokens go where: `tokens` sorted by destination, and how many to and from each member."""

    tokens: Tensor
    sent: list[int]
    received: list[int]


def _has_values(tensor: Tensor) -> bool:
    """Whether it is more than a shape: not on the meta device and not fake."""
    return not tensor.is_meta and type(tensor) is Tensor


class MoeModule(BlockModule):
    """Gated experts, the best `experts_per_token` for each token, weighted by softmax over those.

    `load` [experts] counts the choices of this rank's tokens since it was last set to zero.
    """

    def __init__(self, layout: ModuleLayout, block: Block, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layout, block, dtype, device)
        assert isinstance(layout.module, Moe)
        self.spec = layout.module
        self._activation = ACTIVATIONS[self.spec.activation]
        self._units = [interval_of(layout.unit_cuts, rank) for rank in range(len(layout.unit_cuts) - 1)]
        ranks = [rank for rank, units in enumerate(self._units) for _ in range(units.size)]
        self._rank_of = torch.tensor(ranks, device=device)  # the block's member that has an expert
        self.load = torch.zeros(self.spec.num_experts, dtype=torch.int64, device=device)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised own tokens -> weights and numbers of their experts, both [own tokens, experts per token]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        probabilities = (x @ self.router.t()).softmax(-1, dtype=wide)
        weights, experts = probabilities.topk(self.spec.experts_per_token, dim=-1)
        if _has_values(experts):
            chosen = experts.flatten()
            self.load.scatter_add_(0, chosen, torch.ones_like(chosen))
        # Softmax over all, then divided by the sum of the chosen ones: the same as softmax over those.
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts

    def _dispatch(self, chosen: Tensor) -> _Dispatch:
        if not _has_values(chosen):  # what a balanced router would send
            counts, own = self.layout.token_counts, self._units[self.layout.position]
            sent = [round(dispatched_tokens(self.spec, chosen.shape[0], units)) for units in self._units]
            received = [round(dispatched_tokens(self.spec, count, own)) for count in counts]
            return _Dispatch(chosen.new_empty(sum(sent)), sent, received)
        needed = torch.zeros((chosen.shape[0], self.block.size), dtype=torch.bool, device=chosen.device)
        needed.scatter_(1, self._rank_of[chosen], True)
        sent = needed.sum(0).tolist()
        return _Dispatch(needed.t().nonzero()[:, 1], sent, self.block.exchange_counts(sent, chosen.device))

    def _by_expert(self, chosen: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Choices of the own experts, sorted by expert: rows of `chosen`, places in them, and how many of each."""
        own = self.layout.units
        if not _has_values(chosen):
            counts = [round(routed_tokens(self.spec, self.block.num_tokens, own) / own.size)] * own.size
            rows = chosen.new_empty(sum(counts))
            return rows, rows, counts
        rows, places = ((chosen >= own.start) & (chosen < own.stop)).nonzero(as_tuple=True)
        local = chosen[rows, places] - own.start
        order = local.argsort(stable=True)
        return rows[order], places[order], torch.bincount(local, minlength=own.size).tolist()

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """What the own experts make of tokens [tokens, hidden] and their routing, summed for each token."""
        rows, places, counts = self._by_expert(chosen)
        outs = []
        shape = (self.layout.units.size, self.spec.expert_ffn, -1)
        stacks = [stack.view(shape).unbind() for stack in (self.gate, self.up, self.down)]
        for own, gate, up, down in zip(x[rows].split(counts), *stacks, strict=True):
            outs.append(gated_activation(self._activation, own @ gate.t(), own @ up.t()) @ down)
        routed = torch.cat(outs) * weights[rows, places].unsqueeze(-1)
        return add_rows(routed, rows, x.shape[0])

    def shared(self, x: Tensor) -> Tensor:
        """The shared experts on own tokens."""
        y = gated_activation(self._activation, x @ self.shared_gate.t(), x @ self.shared_up.t())
        return y @ self.shared_down

    def _routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        if self.block.size == 1:
            return self._compute(x, weights, chosen)
        tokens, sent, received = self._dispatch(chosen)
        arrived = exchange(self.block, x[tokens], sent, received)
        their_weights = exchange(self.block, weights[tokens], sent, received)
        y = self._compute(arrived, their_weights, self.block.all_to_all(chosen[tokens], sent, received))
        return add_rows(exchange(self.block, y, received, sent), tokens, x.shape[0])

    def _compute(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        if self.layout.placement.recompute == "selective" and torch.is_grad_enabled():
            y = checkpoint(self.experts, x, weights, chosen, use_reentrant=False, preserve_rng_state=False)
            assert isinstance(y, Tensor)
            return y
        return self.experts(x, weights, chosen)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.normalise(x, self.spec.norm)
        y = self._routed(normed, *self.route(normed))
        if self.spec.shared_ffn:
            y = y + self.shared(normed)
        return x + y

    def on_whole(self, x: Tensor) -> Tensor:
        """The same where every member of the block holds all tokens: nothing is sent but the sum."""
        normed = self.normalise(x, self.spec.norm)
        y = self.block.reduce_scatter(self.experts(normed, *self.route(normed)))
        if self.spec.shared_ffn:
            y = y + self.shared(normed)
        return x + y
