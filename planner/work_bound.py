"""What any plan of so many ranks takes at least: all of its work, spread over them evenly.

# t >= B W / n + o(E / n) + h    W = sum over modules of min over t, T of t s(t, T) L / T
#   B sequences a step, n ranks, s(t, T) computing seconds of a block of t ranks with T tokens, L tokens of a sequence;
#   o seconds of updating E / n elements, h host seconds of a step
#   Every rank of a block waits for its slowest, so that a module keeps t ranks for s seconds; of all stages and
#   replicas one is busy for the mean at least.  T goes up to the whole batch in powers of two: a block's seconds per
#   token do not grow with its tokens.  Leaves out communication, recomputation and waiting for other stages.
"""

from __future__ import annotations

from collections import Counter

from cost_models.interface import CostModel
from specs.errors import BadInputError
from specs.model import ModelSpec, Module, num_units
from specs.plan import TrainingSpec
from specs.tensors import num_parameters


def work_bound(
    model: ModelSpec, training: TrainingSpec, costs: CostModel, *, num_ranks: int, most_degree: int
) -> float:
    """Step seconds that no plan with blocks of up to `most_degree` of `num_ranks` ranks beats, however unlike its
    stages, replicas and shares of the batch are.
    """
    modules = Counter(module for _, module in model.modules())
    sequence = sum(n * rank_seconds(module, training, costs, most_degree) for module, n in modules.items())
    elements = num_parameters(model.modules())
    sizes = {max(1, elements >> shift) for shift in range(12)} | {max(1, elements // num_ranks)}
    update = min(costs.optimizer(size) / size for size in sizes) * elements / num_ranks
    return training.global_batch * sequence / num_ranks + update + costs.overhead.other_seconds_per_step


def rank_seconds(module: Module, training: TrainingSpec, costs: CostModel, most_degree: int) -> float:
    """Seconds of one rank for one sequence, forward and backward, at best; 0 where nothing was measured."""
    found = []
    for degree in range(1, min(most_degree, num_units(module)) + 1):
        for power in range((training.global_batch - 1).bit_length() + 1):
            try:
                cost = costs.module(
                    module,
                    degree=degree,
                    block_tokens=training.seq_len << power,
                    seq_len=training.seq_len,
                    recompute="none",
                    level="scale_up",
                )
            except BadInputError:
                continue
            found.append(degree * (cost.forward_seconds + cost.backward_seconds) / (1 << power))
    return min(found, default=0.0)
