"""Mixture of experts in a published run: who computes which tokens, and what is sent for it, as Megatron-Core does.

A rank's own tokens go to the experts of its group by all-to-all; where experts are cut by tensor parallelism too, the
cut's ranks gather what each of them received, and scatter the sums.      [Megatron-Core, transformer/moe]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cost_models.kernels import Matrix
from cost_models.published import Experts, Run
from specs.cluster import CollectiveOp

# Tokens are read and written to sort them by rank, and again to bring them back with their weights; what a rank has
# received for several experts or gathered from several ranks is sorted by expert likewise.
PERMUTE_PASSES = 4.0


class ExpertWork(NamedTuple):
    """One rank's part of one layer and micro-batch, forward."""

    products: tuple[Matrix, ...]
    activation_elements: float  # gate and up (or up), and their product
    permuted_elements: float


def routed_tokens(run: Run, experts: Experts) -> float:
    """Token copies that a rank's experts get from a balanced router.

    # T k u / t      T tokens of a micro-batch on a tensor-parallel group of t, k experts a token, u ranks that cut an
    #                expert: each rank sends T / t tokens, and shares what u of them received
    """
    tokens = run.micro_batch * run.seq_len / run.cp
    return tokens * experts.per_token * experts.tensor_parallel / run.tp


def expert_work(run: Run, experts: Experts) -> ExpertWork:
    """Grouped products of a rank's experts, the router's, and element-wise traffic."""
    local = experts.number / experts.parallel
    routed = routed_tokens(run, experts)
    columns = run.ffn / experts.tensor_parallel
    first = columns * (2 if run.gated else 1)
    own = run.micro_batch * run.seq_len / run.cp / run.tp
    each = routed / local
    one = (Matrix(each, first, run.hidden), Matrix(each, run.hidden, columns))
    sorted_again = routed if local > 1 or experts.tensor_parallel > 1 else 0.0
    router = Matrix(own, experts.number, run.hidden)
    return ExpertWork(
        products=(*(one * max(1, round(local))), router),
        activation_elements=routed * (first + columns),
        permuted_elements=PERMUTE_PASSES * (own * experts.per_token + sorted_again) * run.hidden,
    )


def dispatch_seconds(run: Run, experts: Experts, collective: Callable[[CollectiveOp, int, float, int], float]) -> float:
    """Sending tokens to their experts and back, once; `collective(op, ranks, payload bytes, ranks in a node)`."""
    cut = experts.tensor_parallel
    sent = 2.0 * run.micro_batch * run.seq_len / run.cp / run.tp * experts.per_token * run.hidden
    in_node = max(1, min(experts.parallel, run.gpus_per_node // cut))
    exchanged = 2.0 * collective("all_to_all", experts.parallel, sent, in_node)
    shared = sum(
        collective(op, cut, sent * cut, min(cut, run.gpus_per_node)) for op in ("all_gather", "reduce_scatter")
    )
    return exchanged + shared
