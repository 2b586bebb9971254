"""From a plan file to what it delivers."""

from __future__ import annotations

from pathlib import Path

from cost_models.delivery import Delivery, case_of, deliver
from cost_models.failures import load_failure_model
from cost_models.policies import standard_policies
from cost_models.sources import device_costs
from cost_models.step import price
from cost_models.stragglers import with_profile
from specs.base import load_document
from specs.plan import Plan
from specs.profile import Profile


def simulate_plan(
    path: Path,
    *,
    failures: Path | None = None,
    policy: str = "drop",
    days: float = 30.0,
    spares: int | None = None,
    keep_batch: bool = False,
    trials: int = 40,
    seed: int = 0,
    target: float = 0.99,
    profile: Path | None = None,
) -> Delivery:
    """Play a plan.  One without a prediction is priced from device data; `policy` "all" compares all of them."""
    plan = load_document(Plan, path, "plan")
    model = load_failure_model(failures)
    if profile is not None:
        measured = load_document(Profile, profile, "profile")
        model = model.model_copy(update={"slow": with_profile(model.slow, measured)})
    predicted = plan.predicted
    if predicted is None:
        predicted = price(plan, device_costs(plan.cluster, plan.training), failures=model)
    node = max(group.devices_per_node for group in plan.cluster.nodes)
    unused = (len(plan.cluster.ranks()) - plan.world_size) // node
    policies = standard_policies(unused if spares is None else spares, keep_batch=keep_batch)
    chosen = "drop" if policy == "all" else policy
    if policy != "all":
        policies = tuple(item for item in policies if item.name == policy)
    return deliver(
        case_of(plan, predicted, model),
        policies=policies,
        chosen=chosen,
        days=days,
        trials=trials,
        seed=seed,
        target=target,
    )
