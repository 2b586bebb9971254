"""Goodput of a plan: tokens per second x renewal factor G x degraded factor X.

G is in `renewal`, X in `degraded`.  `factors_of` needs no plan and is cheap enough for a search; `factors` reads what
it needs from a plan.  The policy is the one that works for every layout: after a failure training restarts with as
many whole replicas as the survivors form, until the repair.  What cutting replicas down would give instead, and
spares, `plait simulate` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cost_models.degraded import Outages, exact_factor, hardware_failures_per_second, outages
from cost_models.failures import (
    class_rates,
    default_failure_model,
    lag_seconds,
    load_seconds,
    restart_seconds,
    stall_seconds,
)
from cost_models.policies import Geometry, Policy
from cost_models.renewal import renewal_factor_with_rejoins, restart_laplace, whole_step_interval
from specs.failures import FailureModel
from specs.plan import Plan
from specs.tensors import num_parameters

# fp32 master weights and two AdamW moments; bf16 weights are made from the master weights on loading.
CHECKPOINT_BYTES_PER_PARAMETER = 12

# Hopeless plans keep a positive goodput, so that they can be ranked; sums in Fourier space resolve no less.
LEAST_FACTOR = 1e-15

# When a repaired device comes back: at once by a planned restart, or with the restart after the next failure.
Rejoin = Literal["at-once", "next-restart"]


@dataclass(frozen=True, slots=True)
class GoodputFactors:
    """What failures leave of a plan's speed, and from what that follows.  Times in seconds.

    `renewal_factor` G and `degraded_factor` X are in (0, 1].  `restart_seconds` is the mean over failure classes of
    detection + restart + load.  `rejoin` is the better of the two ways to take repaired devices back.
    """

    renewal_factor: float
    degraded_factor: float
    checkpoint_interval_seconds: float
    failures_per_second: float
    stall_seconds: float
    lag_seconds: float
    load_seconds: float
    restart_seconds: float
    rejoin: Rejoin
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


@dataclass(frozen=True, slots=True)
class Times:
    """Rates and seconds of one job: what `renewal` needs."""

    rates_per_second: tuple[float, ...]
    stall: float
    lag: float
    load: float
    restart: float
    downtimes: tuple[float, ...]
    interval: float

    @property
    def rate_per_second(self) -> float:
        return sum(self.rates_per_second)

    @property
    def mean_downtime(self) -> float:
        rate = self.rate_per_second
        if rate == 0.0:
            return 0.0
        return sum(r * d for r, d in zip(self.rates_per_second, self.downtimes, strict=True)) / rate

    def renewal(self, *, rejoins_per_second: float = 0.0) -> float:
        """G with the best interval."""
        return renewal_factor_with_rejoins(
            rate_per_second=self.rate_per_second,
            rejoins_per_second=rejoins_per_second,
            work_seconds=self.interval,
            stall_seconds=self.stall,
            lag_seconds=self.lag,
            restart_laplace=restart_laplace(self.rates_per_second, self.downtimes),
            rejoin_seconds=self.restart + self.load,
        )


def times_of(
    model: FailureModel, *, num_ranks: int, state_bytes_per_rank: int, step_seconds: float, spares: bool = False
) -> Times:
    """Seconds of saving and restarting, and the best interval, for a job of that size.

    `spares`: a lost node is replaced from a pool, which takes `spare_swap_seconds` more.
    """
    rates = class_rates(model, num_ranks)
    stall = stall_seconds(model, state_bytes_per_rank)
    lag = lag_seconds(model, state_bytes_per_rank, num_ranks)
    load = load_seconds(model, state_bytes_per_rank, num_ranks)
    restart = restart_seconds(model, num_ranks)
    swap = model.restarting.spare_swap_seconds if spares else 0.0
    downtimes = tuple(
        item.detect_seconds + restart + load + (swap if item.blast_radius != "none" else 0.0) for item in model.classes
    )
    interval = whole_step_interval(
        rate_per_second=sum(rates),
        stall_seconds=stall,
        lag_seconds=lag,
        step_seconds=float(step_seconds),
        longest_seconds=model.checkpointing.longest_interval_seconds,
    )
    return Times(tuple(rates), stall, lag, load, restart, downtimes, interval)


def factors(
    plan: Plan, *, step_seconds: float, state_bytes_per_rank: int, failures: FailureModel | None = None
) -> GoodputFactors:
    """Factors of a plan whose step takes `step_seconds`.

    `state_bytes_per_rank`: what one rank writes into a checkpoint, its share of the distinct state
    (`checkpoint_bytes_per_rank` gives it).  Devices of the cluster that the plan leaves unused are spares, by whole
    nodes.  `failures` None: the published defaults, and the result says estimated.
    """
    usable = plan.cluster.num_usable
    largest_node = max(group.devices_per_node for group in plan.cluster.nodes)
    return factors_of(
        num_ranks=plan.world_size,
        num_replicas=len(plan.replicas),
        devices_per_node=largest_node,
        ranks_per_group=max(stage.num_ranks for pipeline in plan.pipelines for stage in pipeline.stages),
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
    ranks_per_group: int | None = None,
    spare_nodes: int = 0,
    failures: FailureModel | None = None,
) -> GoodputFactors:
    """Factors of a layout by its counts: `num_replicas` equal replicas on `num_ranks` ranks.

    `ranks_per_group`: ranks of one pipeline stage, which must be neighbours (None: a node, or the whole replica when
    that is smaller).  Survivors are dealt into whole replicas by groups.
    """
    model = failures if failures is not None else default_failure_model()
    times = times_of(
        model,
        num_ranks=num_ranks,
        state_bytes_per_rank=state_bytes_per_rank,
        step_seconds=step_seconds,
        spares=spare_nodes > 0,
    )
    per_replica = max(num_ranks // num_replicas, 1)
    group = min(ranks_per_group if ranks_per_group is not None else devices_per_node, per_replica)
    geometry = Geometry(
        num_replicas=num_replicas,
        num_stages=-(-per_replica // group),
        group_size=group,
        domain_size=min(devices_per_node, num_ranks),
        micro_batches=1,
        devices_per_host=model.devices_per_host,
    )
    policy, shares = DROP.with_spares(spare_nodes), whole_only(group)
    renewal, degraded, rejoin = best_rejoin(
        model, times, geometry, lambda out: exact_factor(policy, geometry, shares, out)
    )
    return GoodputFactors(
        renewal_factor=max(renewal, LEAST_FACTOR),
        degraded_factor=max(degraded, LEAST_FACTOR),
        checkpoint_interval_seconds=times.interval,
        failures_per_second=times.rate_per_second,
        stall_seconds=times.stall,
        lag_seconds=times.lag,
        load_seconds=times.load,
        restart_seconds=times.mean_downtime,
        rejoin=rejoin,
        spare_nodes=spare_nodes,
        state_bytes_per_rank=state_bytes_per_rank,
        estimated=model.estimated,
    )


DROP = Policy("drop", "drop")


def whole_only(group_size: int) -> tuple[float, ...]:
    """Shares of a policy that uses whole groups only."""
    return (0.0,) * group_size + (1.0,)


def best_rejoin(
    model: FailureModel, times: Times, geometry: Geometry, share_in: Callable[[Outages], float]
) -> tuple[float, float, Rejoin]:
    """(G, X, how) of the better way to take repaired devices back; `share_in` gives X for given outages.

    At once: each repair costs a planned restart.  With the next restart: it costs nothing, but the device waits 1 /
    lambda longer.  Both count every repair, though some need not lead to a restart.
    """
    size, number = geometry.host_size, geometry.num_ranks
    rate = times.rate_per_second
    if rate == 0.0:
        return times.renewal(), 1.0, "at-once"
    eager = times.renewal(rejoins_per_second=hardware_failures_per_second(model, number))
    eager_out = outages(model, host_size=size, num_devices=number)
    lazy = times.renewal()
    lazy_out = outages(model, host_size=size, num_devices=number, wait_seconds=1.0 / rate)
    eager_share = share_in(eager_out)
    lazy_share = share_in(lazy_out)
    if eager * eager_share >= lazy * lazy_share:
        return eager, eager_share, "at-once"
    return lazy, lazy_share, "next-restart"


def checkpoint_bytes_per_rank(plan: Plan) -> int:
    """A rank's share of the distinct state: master weights and moments of all parameters over all ranks."""
    return -(-num_parameters(plan.model.modules()) * CHECKPOINT_BYTES_PER_PARAMETER // plan.world_size)
