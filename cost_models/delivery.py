"""What a plan delivers over days of failures, under every policy, and what would help most.

A `Case` is a plan reduced to what matters here.  For each policy: G and X in closed form, and the played-out clock of
`monte_carlo` with its band.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cost_models.degraded import Estimate, Outages, factor, hardware_failures_per_second, outages, spares_needed
from cost_models.goodput import Rejoin, Times, best_rejoin, checkpoint_bytes_per_rank, times_of
from cost_models.monte_carlo import Job, Outcome, simulate
from cost_models.policies import Geometry, Policy, level_shares, slowdowns
from cost_models.reduced import StageWork, stage_work
from cost_models.renewal import daly_interval, exact_interval, young_interval
from cost_models.stragglers import Stragglers, best_culling, stragglers
from cost_models.two_tier import TwoTier, TwoTierOptimum, best_two_tier
from specs.errors import BadInputError
from specs.failures import FailureModel
from specs.plan import Plan, Prediction

DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class Case:
    """A running plan: its shape, its speed, what a save holds, and the work of its distinct stages."""

    geometry: Geometry
    works: tuple[StageWork, ...]
    tokens_per_step: int
    step_seconds: float
    state_bytes_per_rank: int
    between_hosts_share: float
    num_nodes: int
    model: FailureModel
    notes: tuple[str, ...] = ()

    @property
    def ideal_tokens_per_day(self) -> float:
        return self.tokens_per_step / self.step_seconds * DAY_SECONDS

    def times(self, *, spares: bool) -> Times:
        """Rates and seconds, with the best interval."""
        return times_of(
            self.model,
            num_ranks=self.geometry.num_ranks,
            state_bytes_per_rank=self.state_bytes_per_rank,
            step_seconds=self.step_seconds,
            spares=spares,
        )


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
class Change:
    """A what-if and the goodput it gives, as a fraction gained over the present (closed form)."""

    name: str
    gain: float


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


def case_of(plan: Plan, predicted: Prediction, model: FailureModel) -> Case:
    """A plan with its prediction as a case.  Replicas and stages that differ are taken as the first pipeline's."""
    pipeline = plan.pipelines[plan.replicas[0].pipeline]
    group = max(stage.num_ranks for stage in pipeline.stages)
    notes = []
    if len({replica.pipeline for replica in plan.replicas}) > 1:
        notes.append("replicas differ; all are taken to be like the first")
    if len({stage.num_ranks for stage in pipeline.stages}) > 1:
        notes.append(f"stages differ in ranks; all are taken to have {group}")
    node = max(item.devices_per_node for item in plan.cluster.nodes)
    terms = predicted.step_terms
    passes = terms.forward + terms.backward + terms.tp_communication
    share = terms.tp_communication / passes if passes else 0.0
    priced = plan.with_results(predicted=predicted)
    works = {
        stage_work(priced, stage, communication_share=share, micro_batch=pipeline.micro_batch): None
        for stage in pipeline.stages
    }
    geometry = Geometry(
        num_replicas=len(plan.replicas),
        num_stages=len(pipeline.stages),
        group_size=group,
        domain_size=min(node, len(plan.replicas) * len(pipeline.stages) * group),
        micro_batches=plan.replicas[0].sequences // pipeline.micro_batch,
        layers_per_stage=max(plan.model.num_layers // len(pipeline.stages), 1),
        devices_per_host=model.devices_per_host,
    )
    return Case(
        geometry=geometry,
        works=tuple(works),
        tokens_per_step=plan.training.tokens_per_step,
        step_seconds=predicted.step_time_seconds,
        state_bytes_per_rank=checkpoint_bytes_per_rank(plan),
        between_hosts_share=terms.gradient_sync / predicted.step_time_seconds if plan.cluster.num_nodes > 1 else 0.0,
        num_nodes=plan.cluster.num_nodes,
        model=model,
        notes=tuple(notes),
    )


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
    priced = [(policy, *_price(case, times, policy)) for policy in policies]
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
        sensitivity=_changes(case, best, SENSITIVITY),
        improvements=tuple(
            sorted(_changes(case, best, IMPROVEMENTS | _spare_edits(case)), key=lambda change: -change.gain)
        ),
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


def goodput_share(case: Case, policy: Policy) -> float:
    """G x X of a case under a policy, closed form (drawn for policies that have none)."""
    renewal, degraded, _ = _price(case, case.times(spares=policy.spare_domains > 0), policy)
    return renewal * degraded.mean


def _price(case: Case, times: Times, policy: Policy) -> tuple[float, Estimate, Rejoin]:
    geometry = case.geometry
    shares = level_shares(policy, geometry, case.works)
    slow = slowdowns(policy, geometry, case.works)
    renewal, degraded, rejoin = best_rejoin(
        case.model, times, geometry, lambda out: factor(policy, geometry, shares, slow, out).mean
    )
    if times.rate_per_second == 0.0:
        return renewal, Estimate(1.0), rejoin
    estimate = factor(policy, geometry, shares, slow, _outages(case, times, rejoin))
    return renewal, Estimate(degraded, estimate.standard_error), rejoin


def _outages(case: Case, times: Times, rejoin: Rejoin) -> Outages:
    waits = 0.0 if rejoin == "at-once" or times.rate_per_second == 0.0 else 1.0 / times.rate_per_second
    geometry = case.geometry
    return outages(case.model, host_size=geometry.host_size, num_devices=geometry.num_ranks, wait_seconds=waits)


def _spares_for(case: Case, times: Times, policy: Policy, rejoin: Rejoin, target: float) -> int | None:
    geometry = case.geometry
    shares = level_shares(policy, geometry, case.works)
    slow = slowdowns(policy, geometry, case.works)
    out = _outages(case, times, rejoin)
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


Edit = Callable[[Case, Policy], tuple[Case, Policy]]


def _classes(**factors: float) -> Edit:
    def edit(case: Case, policy: Policy) -> tuple[Case, Policy]:
        classes = tuple(
            item.model_copy(update={name: getattr(item, name) * scale for name, scale in factors.items()})
            for item in case.model.classes
        )
        return replace(case, model=case.model.model_copy(update={"classes": classes})), policy

    return edit


def _part(part: str, **factors: float) -> Edit:
    def edit(case: Case, policy: Policy) -> tuple[Case, Policy]:
        old = getattr(case.model, part)
        new = old.model_copy(update={name: getattr(old, name) * scale for name, scale in factors.items()})
        return replace(case, model=case.model.model_copy(update={part: new})), policy

    return edit


def _spares(number: int) -> Edit:
    return lambda case, policy: (case, policy.with_spares(policy.spare_domains + number))


STORAGE = (
    "write_bytes_per_second",
    "storage_write_bytes_per_second",
    "read_bytes_per_second",
    "storage_read_bytes_per_second",
)
SENSITIVITY: dict[str, Edit] = {
    "failures x 1/2": _classes(failures_per_device_day=0.5),
    "failures x 2": _classes(failures_per_device_day=2.0),
    "failures x 4": _classes(failures_per_device_day=4.0),
    "repairs x 1/2": _classes(repair_hours=0.5),
    "repairs x 2": _classes(repair_hours=2.0),
    "storage x 1/2": _part("checkpointing", **dict.fromkeys(STORAGE, 0.5)),
    "storage x 2": _part("checkpointing", **dict.fromkeys(STORAGE, 2.0)),
}
IMPROVEMENTS: dict[str, Edit] = {
    "restart in half the time": _part("restarting", fixed_seconds=0.5, per_rank_seconds=0.5),
    "storage twice as fast": _part("checkpointing", **dict.fromkeys(STORAGE, 2.0)),
    "half the stall of a save": _part("checkpointing", stall_bytes_per_second=2.0, stall_fixed_seconds=0.5),
    "detect in half the time": _classes(detect_seconds=0.5),
    "repair in half the time": _classes(repair_hours=0.5),
    "half as many failures": _classes(failures_per_device_day=0.5),
}


def _changes(case: Case, present: PolicyResult, edits: dict[str, Edit]) -> tuple[Change, ...]:
    before = present.share
    return tuple(
        Change(name, goodput_share(*edit(case, present.policy)) / before - 1.0) for name, edit in edits.items()
    )


def _spare_edits(case: Case) -> dict[str, Edit]:
    """One spare domain more, and about one percent of the cluster."""
    domains = case.geometry.num_domains
    numbers = sorted({1, max(round(domains / 100), 1)})
    return {
        f"{number} spare domain{'s' * (number > 1)} more (+{number / domains:.1%})": _spares(number)
        for number in numbers
    }
