"""Experiment 2: the best uniform plan against the plan that chooses each module's degree, measured in turns.

Each case is a model whose modules differ in what a wider degree costs them, under a memory cap.  The cap is a share
of what the fastest plan without a cap needs, so that it binds: one uniform degree is too big for it, the next too slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.hosts import Bed
from benchmarks.testbed.measure import NUM_TURNS, Measured, chosen_plan, profile_of, take_turns
from benchmarks.testbed.plans import BATCH, MODEL, SEQ_LEN, model_of
from benchmarks.testbed.progress import Progress
from planner.search import Freedom
from specs.errors import NoPlanFitsError
from specs.model import ModelSpec
from specs.plan import Plan

UNIFORM, CHOSEN = "uniform", "chosen"


@dataclass(frozen=True)
class Case:
    """A model on some ranks with memory for `cap_share` of what its fastest plan takes (None: all it wants)."""

    name: str
    model: ModelSpec
    bed: Bed
    cap_share: float | None


@dataclass(frozen=True)
class Outcome:
    """Both plans of a case; `measured` is empty where they are the same plan."""

    case: Case
    memory_cap_bytes: int | None
    plans: dict[str, Plan]
    measured: dict[str, Measured]

    def saved(self, seconds: dict[str, float]) -> float:
        """Share of the uniform plan's step time that the chosen one saves."""
        return 1 - seconds[CHOSEN] / seconds[UNIFORM]

    @property
    def predicted_saving(self) -> float:
        """By the cost models."""
        return self.saved({name: predicted_seconds(plan) for name, plan in self.plans.items()})

    @property
    def measured_saving(self) -> float | None:
        """On the hosts; None where both plans are the same."""
        if not self.measured:
            return None
        return self.saved({name: measured.seconds for name, measured in self.measured.items()})


def predicted_seconds(plan: Plan) -> float:
    """Of one step."""
    assert plan.predicted is not None
    return plan.predicted.step_time_seconds


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
    """Profile, plan twice, run both in turns."""
    folder.mkdir(parents=True, exist_ok=True)
    model_file = folder / "model.json"
    case.model.save(model_file)
    with case.bed.up() as hosts:
        progress.say(f"{case.name}: profile")
        profile_of(hosts, folder, model=str(model_file), seq_len=SEQ_LEN)
        free = _plan(folder, model_file, None, "cuts")
        assert free.predicted is not None
        cap = None if case.cap_share is None else round(case.cap_share * free.predicted.peak_memory_bytes)
        plans = {CHOSEN: _plan(folder, model_file, cap, "cuts")}
        try:
            plans[UNIFORM] = _plan(folder, model_file, cap, "uniform")
        except NoPlanFitsError:
            return Outcome(case, cap, plans, {})
        if plans[UNIFORM].pipelines == plans[CHOSEN].pipelines and plans[UNIFORM].replicas == plans[CHOSEN].replicas:
            return Outcome(case, cap, plans, {})
        with progress.count(case.name, num_turns * len(plans)) as advance:
            measured = take_turns(hosts, folder, plans, advance=advance, num_turns=num_turns)
    return Outcome(case, cap, plans, measured)


def _plan(folder: Path, model_file: Path, cap: int | None, freedom: Freedom) -> Plan:
    return chosen_plan(folder, str(model_file), batch=BATCH, seq_len=SEQ_LEN, memory_cap_bytes=cap, freedom=freedom)
