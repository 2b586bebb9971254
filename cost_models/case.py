"""A running plan reduced to what its goodput depends on, and the closed form for it."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.degraded import Estimate, Outages, factor, outages
from cost_models.goodput import Rejoin, Times, best_rejoin, checkpoint_bytes_per_rank, times_of
from cost_models.policies import Geometry, Policy, level_shares, slowdowns
from cost_models.reduced import StageWork, stage_work
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


def goodput_share(case: Case, policy: Policy) -> float:
    """G x X of a case under a policy, closed form (drawn for policies that have none)."""
    renewal, degraded, _ = price_policy(case, case.times(spares=policy.spare_domains > 0), policy)
    return renewal * degraded.mean


def price_policy(case: Case, times: Times, policy: Policy) -> tuple[float, Estimate, Rejoin]:
    """(G, X, how repaired devices come back) of a policy."""
    geometry = case.geometry
    shares = level_shares(policy, geometry, case.works)
    slow = slowdowns(policy, geometry, case.works)
    renewal, degraded, rejoin = best_rejoin(
        case.model, times, geometry, lambda out: factor(policy, geometry, shares, slow, out).mean
    )
    if times.rate_per_second == 0.0:
        return renewal, Estimate(1.0), rejoin
    estimate = factor(policy, geometry, shares, slow, outages_of(case, times, rejoin))
    return renewal, Estimate(degraded, estimate.standard_error), rejoin


def outages_of(case: Case, times: Times, rejoin: Rejoin) -> Outages:
    """Chance that a device or host is missing, its wait for the next restart included."""
    waits = 0.0 if rejoin == "at-once" or times.rate_per_second == 0.0 else 1.0 / times.rate_per_second
    geometry = case.geometry
    return outages(case.model, host_size=geometry.host_size, num_devices=geometry.num_ranks, wait_seconds=waits)
