"""Experiment 2: the best uniform plan against the plan that chooses each module's degree, measured in turns.

Beside them runs the best plan that has one degree everywhere and all other freedoms (uneven stages, recompute and
sharding per module), since what those gain is no merit of degrees.  Each case is a model whose modules differ in what
a wider degree costs them, under a memory cap.  The cap is a share of what the fastest plan without a cap needs, so
that it binds: one uniform degree is too big for it, the next too slow.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.hosts import Bed
from benchmarks.testbed.measure import NUM_TURNS, Measured, chosen_plan, profile_of, step_seconds, take_turns
from benchmarks.testbed.plans import BATCH, MODEL, SEQ_LEN, model_of
from benchmarks.testbed.progress import Progress
from planner.constraints import Constraints
from planner.search import Freedom
from specs.errors import NoPlanFitsError
from specs.model import ModelSpec
from specs.plan import Plan

UNIFORM, ONE_DEGREE, CHOSEN = "uniform", "one degree", "chosen"


@dataclass(frozen=True)
class Case:
    """A model on some ranks with memory for `cap_share` of what its fastest plan takes (None: all it wants)."""

    name: str
    model: ModelSpec
    bed: Bed
    cap_share: float | None


@dataclass(frozen=True)
class Outcome:
    """The plans of a case that fit, and what was measured of those that are not the chosen one again."""

    case: Case
    memory_cap_bytes: int | None
    plans: dict[str, Plan]
    measured: dict[str, Measured]

    def predicted_saving(self, rival: str) -> float | None:
        """Share of the rival's step time that the chosen plan saves, by the cost models; None where nothing fits."""
        if rival not in self.plans:
            return None
        return 1 - step_seconds(self.plans[CHOSEN]) / step_seconds(self.plans[rival])

    def measured_saving(self, rival: str) -> float | None:
        """On the hosts; None where nothing fits or both plans are the same."""
        if rival not in self.measured:
            return None
        return 1 - self.measured[CHOSEN].seconds / self.measured[rival].seconds


def cases() -> list[Case]:
    """Where degrees per module may pay, and where they should not."""
    one_host, two_hosts = Bed(1, 2), Bed(2, 2, 1e9)
    return [
        Case("unlike layers", MODEL, one_host, 0.75),
        Case(
            "large vocabulary", model_of("vocabulary", heads=8, kv_heads=2, ffns=(576,) * 2, vocab=8192), one_host, 0.75
        ),
        Case("like layers", model_of("like", heads=8, kv_heads=2, ffns=(1024,) * 4), one_host, 0.75),
        Case("like layers, no cap", model_of("like", heads=8, kv_heads=2, ffns=(1024,) * 4), one_host, None),
        Case("unlike layers, two hosts", MODEL, two_hosts, 0.6),
        Case("six heads over four ranks", model_of("heads", heads=6, kv_heads=3, ffns=(2048,) * 2), two_hosts, 0.6),
        Case("one KV group", model_of("groups", heads=8, kv_heads=1, ffns=(2048,) * 2), two_hosts, 0.6),
    ]


def run_case(case: Case, folder: Path, progress: Progress, *, num_turns: int = NUM_TURNS) -> Outcome:
    """Profile, plan three times, run what differs in turns."""
    # Cases of one model on the same hosts have one profile.
    place = folder.parent / f"profile-{case.model.name}-{case.bed.num_hosts}x{case.bed.ranks_per_host}"
    for made in (folder, place):
        made.mkdir(parents=True, exist_ok=True)
    model_file = place / "model.json"
    case.model.save(model_file)
    with case.bed.up() as hosts:
        progress.say(f"{case.name}: profile")
        profile_of(hosts, place, model=str(model_file), seq_len=SEQ_LEN)
        free = _plan(place, model_file, None, "cuts")
        assert free.predicted is not None
        cap = None if case.cap_share is None else round(case.cap_share * free.predicted.peak_memory_bytes)
        plans = {CHOSEN: _plan(place, model_file, cap, "cuts")}
        with suppress(NoPlanFitsError):
            plans[UNIFORM] = _plan(place, model_file, cap, "uniform")
        with suppress(NoPlanFitsError):
            plans[ONE_DEGREE] = _plan(place, model_file, cap, "cuts", Constraints(max_degrees=1))
        different = _different(plans)
        if len(different) == 1:
            return Outcome(case, cap, plans, {})
        with progress.count(case.name, num_turns * len(different)) as advance:
            measured = take_turns(hosts, folder, different, advance=advance, num_turns=num_turns)
    return Outcome(case, cap, plans, measured)


def _different(plans: dict[str, Plan]) -> dict[str, Plan]:
    """Without those that are the chosen plan again, or an earlier rival."""
    found: dict[str, Plan] = {}
    for name in (CHOSEN, UNIFORM, ONE_DEGREE):
        plan = plans.get(name)
        if plan and all((plan.pipelines, plan.replicas) != (p.pipelines, p.replicas) for p in found.values()):
            found[name] = plan
    return found


def _plan(
    place: Path, model_file: Path, cap: int | None, freedom: Freedom, constraints: Constraints | None = None
) -> Plan:
    return chosen_plan(
        place,
        str(model_file),
        batch=BATCH,
        seq_len=SEQ_LEN,
        memory_cap_bytes=cap,
        freedom=freedom,
        constraints=constraints,
    )
