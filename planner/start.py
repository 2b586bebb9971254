"""From the command line's words to a problem, its costs and a plan."""

from __future__ import annotations

import platform
import re
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from cost_models.interface import CostModel
from cost_models.sources import device_costs, measured_costs, survivors_costs
from cost_models.speeds import with_speeds
from cost_models.step import price
from planner.constraints import Constraints
from planner.contingency import contingencies
from planner.explain import Explanation, explain
from planner.make import make_plan
from planner.problem import CostMaker, Problem
from planner.search import Engine, Freedom
from planner.shadow_prices import shadow_prices
from specs.base import load_document
from specs.cluster import ClusterSpec, Precision
from specs.errors import BadInputError
from specs.plan import Contingency, Objective, Plan, Prediction, Provenance, TrainingSpec
from specs.presets import load_cluster, load_model
from specs.profile import Profile

# Part of the time of planning that losses may take to be solved ahead; the first is solved whatever it takes.
AHEAD_SHARE = 0.1

_UNITS = {"": 1, "B": 1} | {f"{sign}{end}": base**power for power, sign in enumerate("KMGT", start=1)
                            for base, end in ((1024, "iB"), (1000, "B"))}  # fmt: skip


def parse_bytes(text: str) -> int:
    """`80GiB`, `512 MiB`, `1.5GB` or plain bytes.  Raises `BadInputError`."""
    form = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", text)
    if form is None or form[2] not in _UNITS:
        raise BadInputError(f"{text!r} is not a size in bytes. Write it as 80GiB, 512MiB or 1.5GB.")
    size = int(float(form[1]) * _UNITS[form[2]])
    if size < 1:
        raise BadInputError(f"a size of {text!r} leaves no memory at all. Write it as 80GiB, 512MiB or 1.5GB.")
    return size


def read_profile(path: Path | None) -> Profile | None:
    return None if path is None else load_document(Profile, path, "profile")


def costs_from(profile: Profile | None) -> CostMaker:
    """Measured costs with a profile, shipped device data without."""

    def make(cluster: ClusterSpec, training: TrainingSpec) -> CostModel:
        if profile is None:
            return device_costs(cluster, training)
        return measured_costs(profile, training, cluster)

    return make


def start_plan(
    *,
    model: str,
    cluster: str | None,
    profile_path: Path | None,
    global_batch: int,
    seq_len: int,
    precision: Precision | None,
    memory_cap: str | None,
    objective: Objective,
    freedom: Freedom,
    time_limit_seconds: float,
    top_k: int,
    command: str,
    engine: Engine = "dp",
    constraints: Constraints | None = None,
    slowdown: float = 0.05,
) -> Plan:
    """Read the inputs and plan.  Raises `BadInputError`, `NoPlanFitsError` and `TimeLimitError`."""
    spec = load_model(model)
    profile = read_profile(profile_path)
    if cluster is not None:
        machine = load_cluster(cluster)
    elif profile is not None:
        machine = profile.cluster
    else:
        raise BadInputError("no cluster is given. Name one with --cluster (e.g. h100x64), or pass a --profile.")
    if spec.max_positions is not None and seq_len > spec.max_positions:
        raise BadInputError(
            f"--seq-len {seq_len} is longer than the {spec.max_positions} positions of {spec.name}. "
            f"Use at most {spec.max_positions}."
        )
    training = TrainingSpec(
        global_batch=global_batch, seq_len=seq_len, precision=precision or _usual_precision(machine)
    )
    inputs = {"model": spec.sha256(), "cluster": machine.sha256()}
    if profile is None:
        machine = with_speeds(machine, spec, training)
    else:
        inputs["profile"] = profile.sha256()
    problem = Problem(
        model=spec,
        cluster=machine,
        training=training,
        provenance=_provenance(command, inputs),
        memory_cap_bytes=None if memory_cap is None else parse_bytes(memory_cap),
        constraints=constraints or Constraints(),
    )
    make_costs = costs_from(profile)
    costs = survivors_costs(profile, training, machine)

    def losses(plan: Plan, seconds: float) -> tuple[Contingency, ...]:
        return contingencies(plan, costs, time_limit_seconds=AHEAD_SHARE * seconds)

    return make_plan(
        problem,
        make_costs,
        objective=objective,
        freedom=freedom,
        engine=engine,
        slowdown=slowdown,
        time_limit_seconds=time_limit_seconds,
        top_k=top_k,
        losses=losses,
    )


def estimate_plan(path: Path, profile_path: Path | None) -> tuple[Plan, Prediction]:
    """Price the layout of a plan file anew."""
    plan = load_document(Plan, path, "plan")
    costs = costs_from(read_profile(profile_path))(plan.cluster, plan.training)
    return plan, price(plan, costs)


def explain_plan(path: Path, profile_path: Path | None, module: str | None, seconds_each: float = 10.0) -> Explanation:
    """Reasons for the layout of a plan file; shadow prices too, unless one module is asked about."""
    plan = load_document(Plan, path, "plan")
    costs = costs_from(read_profile(profile_path))(plan.cluster, plan.training)
    found = explain(plan, costs, module)
    if module is not None or seconds_each <= 0.0:
        return found
    return replace(found, prices=shadow_prices(plan, costs, seconds_each=seconds_each))


def _usual_precision(cluster: ClusterSpec) -> Precision:
    """What the executor trains in: fp32 on CPUs, bf16 on GPUs."""
    kinds = {cluster.devices[group.device].kind for group in cluster.nodes}
    return "fp32" if "cpu" in kinds else "bf16"


def _provenance(command: str, inputs: dict[str, str]) -> Provenance:
    return Provenance(
        created_by=f"plait plan {version('plait')}",
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        inputs=inputs,
        versions={"plait": version("plait"), "python": platform.python_version()},
    )
