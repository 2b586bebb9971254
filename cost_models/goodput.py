"""Goodput of a plan: tokens per second x renewal factor G x degraded factor X.

G is in `renewal`, X in `degraded`.  `factors_of` needs no plan and takes some tens of microseconds, for a search;
`factors` reads what it needs from a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.degraded import Outstanding, dropped_replicas_factor, outstanding_failures
from cost_models.failures import (
    class_rates,
    default_failure_model,
    lag_seconds,
    load_seconds,
    restart_seconds,
    stall_seconds,
)
from cost_models.renewal import renewal_factor, restart_laplace, whole_step_interval
from specs.failures import FailureModel
from specs.plan import Plan
from specs.tensors import num_parameters

# fp32 master weights and two AdamW moments; bf16 weights are made from the master weights on loading.
CHECKPOINT_BYTES_PER_PARAMETER = 12


@dataclass(frozen=True, slots=True)
class GoodputFactors:
    """What failures leave of a plan's speed, and from what that follows.  Times in seconds.

    `renewal_factor` G and `degraded_factor` X are in (0, 1].  `restart_seconds` is the mean over failure classes
    of detection + restart + load.  `outstanding` counts
    the failures that await repair at a random time.
    """

    renewal_factor: float
    degraded_factor: float
    checkpoint_interval_seconds: float
    failures_per_second: float
    stall_seconds: float
    lag_seconds: float
    load_seconds: float
    restart_seconds: float
    outstanding: Outstanding
    spare_nodes: int
    state_bytes_per_rank: int
    estimated: bool

    @property
    def factor(self) -> float:
        """G x X."""
        return self.renewal_factor * self.degraded_factor

    @property
    def mean_seconds_between_failures(self) -> float:
        return 1.0 / self.failures_per_second if self.failures_per_second else float("inf")


def factors(
    plan: Plan, *, step_seconds: float, state_bytes_per_rank: int, failures: FailureModel | None = None
) -> GoodputFactors:
    """Factors of a plan whose step takes `step_seconds`.

    `state_bytes_per_rank`: what one rank writes into a checkpoint, its share of the distinct state
    (`checkpoint_bytes_per_rank` gives it).  Devices of the cluster that the plan leaves unused are spares, by whole
    nodes.  `failures` None: the published defaults, and the result says estimated.
    """
    usable = len(plan.cluster.ranks())
    largest_node = max(group.devices_per_node for group in plan.cluster.nodes)
    return factors_of(
        num_ranks=plan.world_size,
        num_replicas=len(plan.replicas),
        devices_per_node=largest_node,
        step_seconds=step_seconds,
        state_bytes_per_rank=state_bytes_per_rank,
        spare_nodes=(usable - plan.world_size) // largest_node,
        failures=failures,
    )


def factors_of(
    *,
    num_ranks: int,
    num_replicas: int,
    devices_per_node: int,
    step_seconds: float,
    state_bytes_per_rank: int,
    spare_nodes: int = 0,
    failures: FailureModel | None = None,
) -> GoodputFactors:
    """Factors of a layout by its counts: `num_replicas` equal replicas on `num_ranks` ranks.

    A replica that loses a device is left out until the repair, and the others take its share of the batch.  That
    works for every layout; what cutting the replica down instead would give, `degraded` and `plait simulate` say.
    """
    model = failures if failures is not None else default_failure_model()
    rates = class_rates(model, num_ranks)
    rate = sum(rates)
    stall = stall_seconds(model, state_bytes_per_rank)
    lag = lag_seconds(model, state_bytes_per_rank, num_ranks)
    load = load_seconds(model, state_bytes_per_rank, num_ranks)
    restart = restart_seconds(model, num_ranks)
    downtimes = [item.detect_seconds + restart + load for item in model.classes]
    interval = whole_step_interval(
        rate_per_second=rate,
        stall_seconds=stall,
        lag_seconds=lag,
        step_seconds=float(step_seconds),
        longest_seconds=model.checkpointing.longest_interval_seconds,
    )
    failed = outstanding_failures(model, num_ranks)
    return GoodputFactors(
        renewal_factor=renewal_factor(
            rate_per_second=rate,
            work_seconds=interval,
            stall_seconds=stall,
            lag_seconds=lag,
            restart_laplace=restart_laplace(rates, downtimes),
        ),
        degraded_factor=dropped_replicas_factor(
            failed=failed,
            num_ranks=num_ranks,
            num_replicas=num_replicas,
            devices_per_node=devices_per_node,
            spare_nodes=spare_nodes,
        ),
        checkpoint_interval_seconds=interval,
        failures_per_second=rate,
        stall_seconds=stall,
        lag_seconds=lag,
        load_seconds=load,
        restart_seconds=sum(r * d for r, d in zip(rates, downtimes, strict=True)) / rate if rate else 0.0,
        outstanding=failed,
        spare_nodes=spare_nodes,
        state_bytes_per_rank=state_bytes_per_rank,
        estimated=model.estimated,
    )


def checkpoint_bytes_per_rank(plan: Plan) -> int:
    """A rank's share of the distinct state: master weights and moments of all parameters over all ranks."""
    return -(-num_parameters(plan.model.modules()) * CHECKPOINT_BYTES_PER_PARAMETER // plan.world_size)
