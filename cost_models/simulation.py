"""From a plan file to what it delivers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cost_models.break_even import BreakEven, break_even, candidate_of
from cost_models.case import case_of
from cost_models.delivery import Delivery, deliver
from cost_models.failures import load_failure_model
from cost_models.policies import standard_policies
from cost_models.sources import device_costs
from cost_models.step import price
from cost_models.stragglers import with_profile
from specs.base import load_document
from specs.failures import FailureModel
from specs.plan import Plan, Prediction
from specs.profile import Profile


@dataclass(frozen=True)
class Rivalry:
    """Two plans: kept tokens per second of each, and their break-even (None: one is always ahead)."""

    first: str
    second: str
    first_goodput: float
    second_goodput: float
    crossing: BreakEven | None

    def sentence(self) -> str:
        """Who wins, and when."""
        ratio = self.second_goodput / self.first_goodput - 1.0
        now = f"{self.second} delivers {100 * ratio:+.2f} % against {self.first}"
        if self.crossing is None:
            return f"{now}; no failure rate within a factor of 1,000 changes who is ahead."
        return f"{now}; {self.crossing.sentence(self.first, self.second)}."


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
    model = load_failure_model(failures)
    if profile is not None:
        measured = load_document(Profile, profile, "profile")
        model = model.model_copy(update={"slow": with_profile(model.slow, measured)})
    plan, predicted = priced_plan(path, model)
    node = max(group.devices_per_node for group in plan.cluster.nodes)
    unused = (plan.cluster.num_usable - plan.world_size) // node
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


def priced_plan(path: Path, model: FailureModel) -> tuple[Plan, Prediction]:
    """A plan file with its own prediction, or one from device data when it has none."""
    plan = load_document(Plan, path, "plan")
    if plan.predicted is not None:
        return plan, plan.predicted
    return plan, price(plan, device_costs(plan.cluster, plan.training), failures=model)


def compare_plans(first: Path, second: Path, *, failures: Path | None = None) -> Rivalry:
    """Goodput of both plans under one failure model, and the failure rate at which they change places."""
    model = load_failure_model(failures)
    ours, theirs = (candidate_of(*priced_plan(path, model)) for path in (first, second))
    return Rivalry(
        first=str(first),
        second=str(second),
        first_goodput=ours.goodput(model),
        second_goodput=theirs.goodput(model),
        crossing=break_even(ours, theirs, model),
    )
