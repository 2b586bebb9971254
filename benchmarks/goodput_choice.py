"""A cluster on which the plan that delivers most is not the fastest: Llama-3-70B on 128 H100.

    python -m benchmarks.goodput_choice

Uniform plans with equal stages, each with the lightest recomputation that fits, are priced from device data; the two
best are then played out over 90 days of the same failures.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.break_even import BreakEven, break_even, candidate_of
from cost_models.case import case_of
from cost_models.delivery import deliver
from cost_models.failures import default_failure_model
from cost_models.policies import standard_policies
from cost_models.sources import device_costs
from cost_models.step import price
from specs.layout import balanced_cuts
from specs.plan import ModulePlacement, Pipeline, Plan, Prediction, Provenance, Recompute, Replica, Stage, TrainingSpec
from specs.presets import cluster_preset, model_preset

MODEL, CLUSTER, GLOBAL_BATCH, SEQ_LEN = "llama-3-70b", "h100x128", 512, 8192
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
SHAPES = ((2, 8, 8, 4), (2, 16, 4, 4), (4, 4, 8, 4), (4, 8, 4, 4), (8, 2, 8, 8), (8, 4, 4, 4))


@dataclass(frozen=True)
class Choice:
    """A plan that fits, with its prediction."""

    name: str
    plan: Plan
    predicted: Prediction


def build(replicas: int, stages: int, ranks: int, degree: int, recompute: Recompute) -> Plan:
    """Equal stages, one degree, as many sequences in a micro-batch as a stage has blocks."""
    model, cluster = model_preset(MODEL), cluster_preset(CLUSTER)
    names = [name for name, _ in model.modules()]
    cuts = balanced_cuts(len(names), stages)
    blocks = (degree,) * (ranks // degree)
    placed = [ModulePlacement(module=name, blocks=blocks, recompute=recompute, zero=1) for name in names]
    pipeline = Pipeline(
        micro_batch=len(blocks),
        stages=tuple(Stage(num_ranks=ranks, modules=tuple(placed[cuts[i] : cuts[i + 1]])) for i in range(stages)),
    )
    size = stages * ranks
    return Plan(
        made=Provenance(created_by="benchmarks.goodput_choice", created_at="2026-11-30T00:00:00Z"),
        model=model,
        cluster=cluster,
        training=TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN),
        pipelines=(pipeline,),
        replicas=tuple(
            Replica(pipeline=0, ranks=tuple(range(i * size, (i + 1) * size)), sequences=GLOBAL_BATCH // replicas)
            for i in range(replicas)
        ),
    )


def choices() -> list[Choice]:
    """The plans that fit, fastest first."""
    found = []
    for replicas, stages, ranks, degree in SHAPES:
        for recompute in RECOMPUTE:
            plan = build(replicas, stages, ranks, degree, recompute)
            predicted = price(plan, device_costs(plan.cluster, plan.training))
            if predicted.peak_memory_bytes <= plan.cluster.device_of(0).memory_bytes:
                name = f"{replicas} x {stages} stages x {ranks}, degree {degree}"
                found.append(Choice(name, plan, predicted))
                break
    return sorted(found, key=lambda choice: choice.predicted.step_time_seconds)


def fastest_and_best(found: list[Choice]) -> tuple[Choice, Choice, BreakEven | None]:
    """The fastest, the one with the most goodput, and where they change places."""
    best = max(found, key=lambda choice: choice.predicted.goodput_tokens_per_second)
    return found[0], best, break_even(*(candidate_of(choice.plan, choice.predicted) for choice in (found[0], best)))


def played(choice: Choice, days: float, trials: int) -> float:
    """Tokens per second over drawn failures."""
    policies = tuple(policy for policy in standard_policies() if policy.name == "drop")
    case = case_of(choice.plan, choice.predicted, default_failure_model())
    delivery = deliver(case, policies=policies, chosen="drop", days=days, trials=trials, seed=0)
    return delivery.chosen.outcome.mean * choice.predicted.tokens_per_second


def main() -> None:
    found = choices()
    print(f"{MODEL} on {CLUSTER}, batch {GLOBAL_BATCH} x {SEQ_LEN}; replicas x stages x ranks")
    print(f"{'':32s}{'step s':>8s}{'tokens/s':>10s}{'G':>8s}{'X':>8s}{'goodput':>10s}")
    for choice in found:
        p = choice.predicted
        print(
            f"{choice.name:32s}{p.step_time_seconds:8.2f}{p.tokens_per_second:10,.0f}{p.renewal_factor:8.4f}"
            f"{p.degraded_factor:8.4f}{p.goodput_tokens_per_second:10,.0f}"
        )
    fastest, best, crossing = fastest_and_best(found)
    if fastest is best:
        print("\nThe fastest plan also delivers most.")
        return
    gain = best.predicted.goodput_tokens_per_second / fastest.predicted.goodput_tokens_per_second - 1.0
    print(f"\nfastest {fastest.name}; most goodput {best.name}: {100 * gain:+.2f} %")
    if crossing is not None:
        print(crossing.sentence(fastest.name, best.name))
    print("played out, 90 days x 400 histories, tokens/s kept:")
    for choice in (fastest, best):
        print(f"{choice.name:32s}{played(choice, 90.0, 400):10,.0f}")


if __name__ == "__main__":
    main()
