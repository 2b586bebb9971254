"""Experiment 1: every plan of a small model, predicted against measured, over numbers of ranks and rates of the link.

For each case the hosts are profiled by `plait profile`, a plan is chosen by the planner from that profile alone, and
the chosen plan runs in turns with all the others.  Reported: the median error of step times, the rank correlation,
and the regret of the choice: its measured time over the best measured time of any plan.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from pydantic import TypeAdapter
from scipy.stats import spearmanr

from benchmarks.testbed.hosts import Bed
from benchmarks.testbed.measure import NUM_TURNS, Measured, chosen_plan, profile_of, step_seconds, take_turns
from benchmarks.testbed.plans import BATCH, MODEL, SEQ_LEN, plan_of, shapes
from benchmarks.testbed.progress import Progress
from cost_models.sources import measured_costs
from cost_models.step import price
from specs.base import write_whole
from specs.plan import Plan, TrainingSpec

CHOSEN = "chosen"
# Rivals.  Galvatron 2.4 searches degrees that are powers of two, stages of like length and sharding; its price of
# redistribution leaves one degree for all layers.  Here that space is searched with this profile's costs.
GALVATRON = "Galvatron's space"
# The same layouts by torch's own pieces: kind and shape.  Four ranks: 2 layers make no 4 stages, 2 KV heads no TP 4.
TORCH = {2: ("DP", "TP", "PP"), 4: ("DP",)}


@dataclass(frozen=True)
class Case:
    """Two hosts of `ranks` / 2 ranks each, joined by cables of `gigabits_per_second` (None: no limit)."""

    ranks: int
    gigabits_per_second: float | None

    @property
    def name(self) -> str:
        """`2 ranks, 1 Gbit/s`."""
        rate = self.gigabits_per_second
        return f"{self.ranks} ranks, " + ("no limit" if rate is None else f"{rate:g} Gbit/s")

    @property
    def bed(self) -> Bed:
        """Its hosts."""
        rate = self.gigabits_per_second
        return Bed(2, self.ranks // 2, None if rate is None else rate * 1e9)


@dataclass(frozen=True)
class Agreement:
    """All plans of one case, on the day when they were measured."""

    case: Case
    measured_on: str  # ISO date
    predicted: dict[str, float]  # seconds
    measured: dict[str, Measured]
    activation_errors: dict[str, float]  # predicted over measured, minus 1, of the fullest rank, where hooks see it

    @property
    def errors(self) -> dict[str, float]:
        """Predicted over measured, minus 1."""
        return {name: self.predicted[name] / self.measured[name].seconds - 1 for name in self.predicted}

    @property
    def median_error(self) -> float:
        """Of absolute errors."""
        return statistics.median(map(abs, self.errors.values()))

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of predicted and measured step times."""
        names = list(self.predicted)
        pairs = [self.predicted[name] for name in names], [self.measured[name].seconds for name in names]
        return float(spearmanr(*pairs).statistic)

    @property
    def best(self) -> str:
        """The plan that was measured fastest."""
        return self.fastest(list(self.predicted))

    def fastest(self, names: Sequence[str]) -> str:
        """Of these."""
        return min(names, key=lambda name: self.measured[name].seconds)

    @property
    def rivals(self) -> dict[str, str]:
        """Peers' layouts by whose they are: of micro-batches and sharded optimizers the one that was measured fastest.

        # Megatron-LM (Narayanan et al. 2021, takeaways 1 and 2): no more model parallelism than memory asks for; tensor
        #   parallel inside a server, then pipeline across.
        """
        ranks, inside = self.case.ranks, self.case.ranks // 2
        starts = {
            "Megatron's rule, the model fits": f"pp1 dp{ranks} tp1 of 1 ",
            "Megatron's rule, TP in the host, PP across": f"pp2 dp1 tp{inside} of {inside} ",
        }
        found = {}
        for peer, start in starts.items():
            alike = [name for name in self.predicted if name.startswith(start) and "full" not in name]
            found[peer] = self.fastest(alike)
        return {**found, GALVATRON: GALVATRON, **{_torch_name(kind): _torch_name(kind) for kind in TORCH[ranks]}}

    @property
    def regret(self) -> float:
        """Measured time of the chosen plan over the best measured time, minus 1."""
        return self.measured[CHOSEN].seconds / self.measured[self.best].seconds - 1


def run_case(case: Case, folder: Path, progress: Progress, *, num_turns: int = NUM_TURNS) -> Agreement:
    """Profile, choose, run all in turns; what was measured before in `folder` is not measured again.

    A finished case stands as it was then, predictions included, whatever the code has become.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / "agreement.json"
    if finished.exists():
        return _FINISHED.validate_json(finished.read_bytes())
    training = TrainingSpec(global_batch=BATCH, seq_len=SEQ_LEN, precision="fp32")
    model_file = folder / "model.json"
    MODEL.save(model_file)
    with case.bed.up() as hosts:
        progress.say(f"{case.name}: profile")
        profile = profile_of(hosts, folder, model=str(model_file), seq_len=SEQ_LEN)
        costs = measured_costs(profile, training, profile.cluster)
        plans: dict[str, Plan] = {}
        for shape in shapes(case.ranks, BATCH):
            plan = plan_of(shape, MODEL, profile.cluster, training)
            plans[shape.name] = plan.with_results(predicted=price(plan, costs))
        plans[CHOSEN] = chosen_plan(folder, str(model_file), batch=BATCH, seq_len=SEQ_LEN)
        plans[GALVATRON] = chosen_plan(folder, str(model_file), batch=BATCH, seq_len=SEQ_LEN, freedom="uniform")
        predicted = {name: step_seconds(plan) for name, plan in plans.items()}
        # These have only the sizes and the model of their plan.
        torch = {_torch_name(kind): kind for kind in TORCH[case.ranks]}
        plans.update(dict.fromkeys(torch, plans[CHOSEN]))
        with progress.count(f"{case.name}: {len(plans)} plans", num_turns * len(plans)) as advance:
            measured = take_turns(hosts, folder, plans, advance=advance, num_turns=num_turns, torch=torch)
    activation_errors = {}
    for name in predicted:
        foreseen = plans[name].predicted
        assert foreseen is not None
        if not _hooks_see_all(plans[name]):
            continue
        kept = measured[name].activation_bytes[foreseen.peak_memory_rank]
        activation_errors[name] = foreseen.peak_memory_terms.activations / kept - 1
    found = Agreement(case, date.today().isoformat(), predicted, measured, activation_errors)
    write_whole(finished, _FINISHED.dump_json(found, indent=1).decode())
    return found


_FINISHED = TypeAdapter(Agreement)


def _hooks_see_all(plan: Plan) -> bool:
    """Whether what saved-tensor hooks see is what is kept: not weight gradients' operands that zb-h1 keeps for later,
    and with full recompute also some of what backward brings back.
    """
    pipeline = plan.pipelines[0]
    full = any(placement.recompute == "full" for stage in pipeline.stages for placement in stage.modules)
    return pipeline.schedule != "zb-h1" and not full


def _torch_name(kind: str) -> str:
    return f"torch's own {kind}"
