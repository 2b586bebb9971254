"""What a plan delivers over days of failures, under every policy, and what would help most.

For each policy: G and X in closed form, and the played-out clock of `monte_carlo` with its band.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.case import DAY_SECONDS, Case, outages_of, price_policy
from cost_models.degraded import Estimate, hardware_failures_per_second, spares_needed
from cost_models.goodput import Rejoin, Times
from cost_models.monte_carlo import Job, Outcome, simulate
from cost_models.policies import Policy, level_shares, slowdowns
from cost_models.renewal import daly_interval, exact_interval, young_interval
from cost_models.stragglers import Stragglers, best_culling, stragglers
from cost_models.two_tier import TwoTier, TwoTierOptimum, best_two_tier
from cost_models.what_if import IMPROVEMENTS, SENSITIVITY, Change, changes, interval_edits, spare_edits
from specs.errors import BadInputError


@dataclass(frozen=True)
class PolicyResult:
    """One policy: closed form and Monte Carlo.

    `spares_needed` for the target X, None: more than were tried.  `share_with_one_lost`: the part of its work that a
    replica still does when one group lacks one device.
    """

    policy: Policy
    rejoin: Rejoin
    renewal: float
    degraded: Estimate
    outcome: Outcome
    spares_needed: int | None
    share_with_one_lost: float

    @property
    def share(self) -> float:
        """G x X in closed form."""
        return self.renewal * self.degraded.mean


@dataclass(frozen=True)
class Delivery:
    """Everything `plait simulate` prints."""

    case: Case
    days: float
    trials: int
    seed: int
    target: float
    times: Times
    young_seconds: float
    daly_seconds: float
    exact_seconds: float
    results: tuple[PolicyResult, ...]
    chosen: PolicyResult
    spares: int
    sensitivity: tuple[Change, ...]
    improvements: tuple[Change, ...]
    two_tiers: TwoTierOptimum | None
    stragglers: Stragglers
    cull_nodes: int
    cull_gain: float


def deliver(
    case: Case,
    *,
    policies: Sequence[Policy],
    chosen: str,
    days: float,
    trials: int,
    seed: int,
    target: float = 0.99,
) -> Delivery:
    """Price and play the policies; `chosen` names the one that headline and what-ifs speak of.

    `target`: the X for which each policy's need of spare domains is told.

    Raises `BadInputError` when repairs cannot keep up, so that there is no steady state.
    """
    spares = policies[0].spare_domains
    times = case.times(spares=spares > 0)
    _check_repairs(case)
    priced = [(policy, *price_policy(case, times, policy)) for policy in policies]
    jobs = [
        Job(
            policy,
            case.geometry,
            level_shares(policy, case.geometry, case.works),
            slowdowns(policy, case.geometry, case.works),
            rejoin,
        )
        for policy, _, _, rejoin in priced
    ]
    outcomes = simulate(jobs, case.model, times, seconds=days * DAY_SECONDS, trials=trials, seed=seed)
    results = tuple(
        PolicyResult(
            policy, rejoin, renewal, degraded, outcome, _spares_for(case, times, policy, rejoin, target), job.shares[-2]
        )
        for (policy, renewal, degraded, rejoin), outcome, job in zip(priced, outcomes, jobs, strict=True)
    )
    best = next(result for result in results if result.policy.name == chosen)
    improvements = changes(case, best.policy, IMPROVEMENTS | spare_edits(case))
    rate = times.rate_per_second
    culled, gain = best_culling(case.model.slow, num_nodes=case.num_nodes) if case.num_nodes > 1 else (0, 0.0)
    return Delivery(
        case=case,
        days=days,
        trials=trials,
        seed=seed,
        target=target,
        times=times,
        young_seconds=young_interval(rate, times.stall),
        daly_seconds=daly_interval(rate, times.stall),
        exact_seconds=exact_interval(rate, times.stall),
        results=results,
        chosen=best,
        spares=spares,
        sensitivity=changes(case, best.policy, SENSITIVITY | interval_edits(case)),
        improvements=tuple(sorted(improvements, key=lambda change: -change.gain)),
        two_tiers=two_tiers(case, times),
        stragglers=stragglers(
            case.model.slow,
            num_ranks=case.geometry.num_ranks,
            num_nodes=case.num_nodes,
            between_hosts_share=case.between_hosts_share,
        ),
        cull_nodes=culled,
        cull_gain=gain,
    )


def two_tiers(case: Case, times: Times) -> TwoTierOptimum | None:
    """What copies in the memory of other hosts would give; None without failures.

    A copy costs the same stall and is complete when the network has carried it; storage saves are made from it, so
    they stall nothing more.
    """
    rate = times.rate_per_second
    if rate == 0.0:
        return None
    classes = case.model.classes
    survives = sum(r * item.memory_copy_survives for r, item in zip(times.rates_per_second, classes, strict=True))
    copying = case.state_bytes_per_rank / case.model.checkpointing.memory_copy_bytes_per_second
    tiers = TwoTier(
        rate_per_second=rate,
        memory_survives=survives / rate,
        memory_stall=times.stall,
        memory_lag=copying,
        storage_stall=0.0,
        storage_lag=times.lag,
        restart_memory=times.mean_downtime - times.load + copying,
        restart_storage=times.mean_downtime,
    )
    return best_two_tier(tiers, shortest_seconds=case.step_seconds, most_segments=64)


def _spares_for(case: Case, times: Times, policy: Policy, rejoin: Rejoin, target: float) -> int | None:
    geometry = case.geometry
    shares = level_shares(policy, geometry, case.works)
    slow = slowdowns(policy, geometry, case.works)
    out = outages_of(case, times, rejoin)
    return spares_needed(policy, geometry, shares, slow, out, target=target, most=max(geometry.num_domains, 1))


def _check_repairs(case: Case) -> None:
    slots = case.model.repair_slots
    if slots is None:
        return
    hours = sum(item.failures_per_device_day * item.repair_hours for item in case.model.classes)
    load = hours * case.geometry.num_ranks / 24.0
    if load >= slots:
        per_day = hardware_failures_per_second(case.model, case.geometry.num_ranks) * DAY_SECONDS
        raise BadInputError(
            f"{per_day:.3g} hardware failures per day keep {load:.1f} repairs under way, repair_slots is {slots}: the "
            f"queue would grow without end. Use repair_slots > {int(load)} or shorter repairs."
        )
