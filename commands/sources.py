"""What reports and traces are made of: a plan or a run folder, the passes of a predicted step, weeks of failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cost_models.buckets import holdings
from cost_models.interface import CostModel
from cost_models.passes import ReplicaPass, replica_pass
from cost_models.sharding import micro_batch_seconds
from cost_models.simulation import simulate_plan
from cost_models.step import price
from cost_models.topology import Topology
from planner.start import costs_from, read_profile
from reports.page import Inputs
from reports.timeline import draw
from reports.trace import PredictedStep, trace
from specs.base import load_document
from specs.errors import BadInputError
from specs.plan import Plan
from specs.profile import Profile
from specs.runlog import ActionsRecord, Record, read_log


def read_source(source: Path) -> tuple[Plan, Path, list[Record]]:
    """A plan file, or the plan and log of a run folder: (plan, its path, records)."""
    if not source.is_dir():
        return load_document(Plan, source, "plan"), source, []
    path = source / "plan.json"
    return load_document(Plan, path, "plan"), path, read_log(source / "log.jsonl")


def first_pass(plan: Plan, costs: CostModel) -> ReplicaPass:
    """One predicted step of the first kind of replica.  Raises `BadInputError` for costs that are not known."""
    topology = Topology(plan)
    sharding = micro_batch_seconds(plan, costs, topology, holdings(plan).buckets)
    return replica_pass(plan, costs, topology, dict(plan.model.modules()), topology.classes[0], sharding)


def plot_step(plan: Plan, profile: Path | None, path: Path) -> None:
    """Draw one predicted step of a plan."""
    costs = costs_from(read_profile(profile))(plan.cluster, plan.training)
    predicted = plan.predicted if plan.predicted is not None else price(plan, costs)
    title = f"{plan.model.name} on {plan.cluster.name}"
    draw(first_pass(plan, costs).spans(), path, title=title, step_seconds=predicted.step_time_seconds)


def _other_costs(plan: Plan, profile: Profile | None) -> Iterator[str]:
    """A sentence when the passes are priced from something else than the plan was."""
    own = plan.made.inputs.get("profile")
    used = None if profile is None else profile.sha256()
    if used == own:
        return
    made = "shipped device data" if own is None else "a profile" if used is None else "another profile"
    now = "shipped device data" if used is None else "the profile given here"
    what = "Pass that profile with --profile" if own is not None else "Leave --profile away"
    yield f"The plan was made with {made}; passes are drawn from {now}. {what} to see those of the plan."


def gather(source: Path, *, profile: Path | None, days: float, trials: int) -> Inputs:
    """Everything that a page shows.  What cannot be had is left out, with the reason."""
    plan, path, records = read_source(source)
    measured = read_profile(profile)
    missing = []
    spans = delivery = None
    try:
        costs = costs_from(measured)(plan.cluster, plan.training)
        spans = first_pass(plan, costs).spans()
        missing += _other_costs(plan, measured)
    except BadInputError as error:
        missing.append(f"The pipeline's passes: {error}")
    try:
        delivery = simulate_plan(path, policy="all", days=days, trials=trials, profile=profile)
    except BadInputError as error:
        missing.append(f"Weeks of failures: {error}")
    return Inputs(plan, spans, delivery, records, tuple(missing))


def trace_of(source: Path, profile: Path | None) -> tuple[dict[str, object], list[str]]:
    """One step, predicted and measured, and what is left out of it.  Raises `BadInputError` when nothing is left."""
    plan, _, records = read_source(source)
    given = read_profile(profile)
    notes = []
    measured = next((record for record in reversed(records) if isinstance(record, ActionsRecord)), None)
    if records and measured is None:
        notes.append("the run's log has no record of a step's actions: it broke off before its last step.")
    expected = None
    try:
        costs = costs_from(given)(plan.cluster, plan.training)
        expected = PredictedStep(first_pass(plan, costs), price(plan, costs), costs.overhead.other_seconds_per_step)
        notes += _other_costs(plan, given)
    except BadInputError as error:
        if measured is None:
            raise
        notes.append(f"no predicted lanes: {error}")
    return trace(plan, expected, measured), notes
