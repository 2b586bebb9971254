"""Tokens that ranks with experts exchange, when the router is balanced."""

from __future__ import annotations

from math import comb

from specs.layout import Interval
from specs.model import Moe

EXPERT_NUMBER_BYTES = 8


def dispatched_tokens(module: Moe, num_tokens: float, experts: Interval) -> float:
    """Of `num_tokens`, those that have any of these experts among theirs: each goes to their rank once.

    # T (1 - C(E - u, e) / C(E, e))     E experts of which a token takes e, u on the rank
    """
    chosen = module.experts_per_token
    return num_tokens * (1.0 - comb(module.num_experts - experts.size, chosen) / comb(module.num_experts, chosen))


def exchange_bytes(
    module: Moe, degree: int, block_tokens: int, activation_bytes: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """All-to-alls of one rank in (forward, backward), each as what it has for all members, itself included.

    # forward   S a h, S a e, S 8 e, S a h     tokens, weights, numbers of their experts; sums back
    # backward  S a h, S a e, S a h            gradients of the sums; of the weights and the tokens back
    #   S rows of an even chunk to even parts of the experts, h hidden, a bytes of an activation, e experts of a token
    #   Leaves out the counts (8 bytes for each member).
    """
    part = Interval(0, -(-module.num_experts // degree))
    rows = degree * dispatched_tokens(module, block_tokens / degree, part)
    vectors = round(rows * activation_bytes * module.hidden)
    weights = round(rows * activation_bytes * module.experts_per_token)
    numbers = round(rows * EXPERT_NUMBER_BYTES * module.experts_per_token)
    return (vectors, weights, numbers, vectors), (vectors, weights, vectors)
