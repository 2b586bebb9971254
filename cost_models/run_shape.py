"""Counts that both models of published runs need: layers per stage, parameters per rank."""

from __future__ import annotations

from cost_models.published import Run


def layers_of_stage(run: Run) -> list[int]:
    """Layers of each stage: even where they divide; with embedding and head counted as layers where that divides;
    else the rest goes to the stages in the middle.
    """
    layers, p = run.layers, run.pp
    if layers % p == 0:
        return [layers // p] * p
    if (layers + 2) % p == 0:
        each = (layers + 2) // p
        return [each - 1] + [each] * (p - 2) + [each - 1]
    base, rest = divmod(layers, p)
    first = (p - rest) // 2
    return [base + (first <= index < first + rest) for index in range(p)]


def layer_parameters(run: Run) -> float:
    """Weights of one layer outside routed experts, all ranks together."""
    width = run.hidden // run.heads
    attention = run.hidden * width * (2 * run.heads + 2 * run.kv_heads)
    if run.experts is not None:
        return attention + run.experts.number * run.hidden + 4 * run.hidden
    return attention + run.hidden * run.ffn * (3 if run.gated else 2) + 4 * run.hidden


def expert_parameters(run: Run, stage: int) -> float:
    """Weights of routed experts on one rank of a stage."""
    if run.experts is None:
        return 0.0
    each = run.hidden * run.ffn * (3 if run.gated else 2)
    dealt = run.experts.number / (run.experts.parallel * run.experts.tensor_parallel)
    return layers_of_stage(run)[stage] * dealt * each


def expert_parameters_of_rank(run: Run) -> float:
    """Weights of routed experts on the fullest rank."""
    return max(expert_parameters(run, stage) for stage in range(run.pp))


def expert_replicas(run: Run) -> int:
    """Ranks that hold the same experts."""
    assert run.experts is not None
    return run.dp * run.cp * run.tp // (run.experts.parallel * run.experts.tensor_parallel)


def parameters_of_stage(run: Run, stage: int, *, tied: bool) -> float:
    """Weights of a stage on one tensor-parallel rank, routed experts left out; a tied head is a copy of the embedding
    on the last stage.
    """
    counts = layers_of_stage(run)
    total = counts[stage] * layer_parameters(run)
    table = run.vocab * run.hidden
    total += table * ((stage == 0) + (stage == run.pp - 1))
    if tied and run.pp == 1:
        total -= table
    return total / run.tp


def parameters_of_rank(run: Run, *, tied: bool = False) -> float:
    """Weights of the fullest rank, routed experts left out."""
    return max(parameters_of_stage(run, stage, tied=tied) for stage in range(run.pp))
