"""Jobs whose plans say whether unlike degrees pay: the best uniform layout, the best with uneven stages and
recomputation per module, and the best with degrees per stage and per module, from one search and one cost model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.where_it_pays.shapes import four_kv_heads, gemma_shape, odd_heads, two_kv_heads
from cost_models.sources import device_costs
from planner.make import Problem, make_plan
from specs.errors import PlaitError
from specs.model import ModelSpec
from specs.plan import Provenance, TrainingSpec
from specs.presets import cluster_preset, model_preset

GIB = 2**30
MADE = Provenance(created_by="benchmarks/where_it_pays", created_at="-")


@dataclass(frozen=True)
class Case:
    """A job to plan; `cap_gib` None: the device's memory."""

    name: str
    model: Callable[[], ModelSpec]
    cluster: str
    global_batch: int
    seq_len: int
    cap_gib: float | None = None

    def problem(self) -> Problem:
        return Problem(
            model=self.model(),
            cluster=cluster_preset(self.cluster),
            training=TrainingSpec(global_batch=self.global_batch, seq_len=self.seq_len),
            provenance=MADE,
            memory_cap_bytes=None if self.cap_gib is None else round(self.cap_gib * GIB),
        )


def preset(name: str) -> Callable[[], ModelSpec]:
    return lambda: model_preset(name)


CASES = (
    Case("plain-8b", preset("llama-3-8b"), "h200x8", 128, 4096),
    Case("plain-70b", preset("llama-3-70b"), "h200x64", 256, 4096),
    Case("tight-8b", preset("llama-3-8b"), "h100x8", 128, 8192),
    Case("tight-70b", preset("llama-3-70b"), "h100x64", 256, 8192),
    Case("openelm-roomy", preset("openelm-3b"), "h100x8", 256, 2048),
    Case("openelm-tight", preset("openelm-3b"), "h100x8", 256, 2048, 14),
    Case("nemotron-super", preset("nemotron-super-49b"), "h100x64", 256, 4096),
    Case("nemotron-ultra", preset("nemotron-ultra-253b"), "h100x1024", 1024, 4096),
    Case("nemotron-nano-roomy", preset("nemotron-nano-9b-v2"), "h200x8", 256, 8192),
    Case("nemotron-nano", preset("nemotron-nano-9b-v2"), "h100x8", 256, 8192),
    Case("nemotron-nano-tight", preset("nemotron-nano-9b-v2"), "h100x8", 256, 8192, 36),
    Case("two-kv-heads", two_kv_heads, "a100-40gx8", 128, 4096, 24),
    Case("four-kv-heads", four_kv_heads, "a100-40gx8", 128, 4096),
    Case("odd-heads", odd_heads, "a100-40gx8", 256, 1024),
    Case("experts-mixtral", preset("mixtral-8x7b"), "h100x64", 512, 4096),
    Case("experts-qwen3", preset("qwen3-30b-a3b"), "h100x64", 512, 4096),
    Case("large-vocabulary", gemma_shape, "a100-40gx8", 128, 4096),
)


@dataclass(frozen=True)
class Ladder:
    """Step seconds under each freedom; None where nothing fits."""

    uniform: float | None
    layers: float | None
    modules: float | None
    layout: str
    gap: float

    @property
    def degrees_save(self) -> float | None:
        """What unlike degrees save beyond uneven stages and recomputation, as a part of the step."""
        if self.layers is None or self.modules is None:
            return None
        return 1.0 - self.modules / self.layers


def ladder_of(problem: Problem, time_limit_seconds: float) -> Ladder:
    plan = make_plan(
        problem, device_costs, objective="step-time", freedom="modules", time_limit_seconds=time_limit_seconds, top_k=0
    )
    seconds = [rung.step_time_seconds for rung in plan.ladder]
    assert plan.certificate is not None
    return Ladder(seconds[0], seconds[1], seconds[-1], plan.ladder[-1].layout, plan.certificate.gap)


def show_case(case: Case, time_limit_seconds: float) -> None:
    try:
        found = ladder_of(case.problem(), time_limit_seconds)
    except PlaitError as error:
        print(f"{case.name}: {error}\n", flush=True)
        return
    cap = "" if case.cap_gib is None else f", {case.cap_gib:g} GiB"
    print(f"{case.name}: {case.model().name} on {case.cluster}{cap}, batch {case.global_batch} x {case.seq_len}")

    def text(seconds: float | None) -> str:
        return "nothing fits" if seconds is None else f"{seconds:.3f} s"

    saved = found.degrees_save
    credit = "the first that fits" if saved is None else f"unlike degrees save {100 * saved:.2f} %"
    print(
        f"  uniform {text(found.uniform)}; uneven stages, recompute per module {text(found.layers)}; unlike degrees "
        f"{text(found.modules)}: {credit} (gap {100 * found.gap:.2f} %)\n  {found.layout}\n",
        flush=True,
    )


# memory caps between uniform degrees


def show_caps(time_limit_seconds: float) -> None:
    """What unlike degrees save as the memory that a rank may fill shrinks."""
    for name, cluster, batch, seq_len, caps in (
        ("llama-3-8b", "h100x8", 64, 8192, (24, 28, 32, 40, 48, 56, 64, 72)),
        ("openelm-3b", "h100x8", 256, 2048, (9, 10, 12, 14, 16, 20, 24, 32)),
        ("nemotron-nano-9b-v2", "h100x8", 256, 8192, (24, 28, 32, 36, 40, 48, 56, 64)),
    ):
        saved = []
        print(f"caps: {name} on {cluster}, batch {batch} x {seq_len}")
        for cap in caps:
            case = Case("", preset(name), cluster, batch, seq_len, cap)
            try:
                found = ladder_of(case.problem(), time_limit_seconds)
            except PlaitError:
                print(f"  {cap:3} GiB  nothing fits")
                continue
            if found.degrees_save is None:
                print(f"  {cap:3} GiB  only unlike degrees fit")
                continue
            saved.append(found.degrees_save)
            print(f"  {cap:3} GiB  {100 * saved[-1]:6.2f} %  (gap {100 * found.gap:.2f} %)  {found.layout}", flush=True)
        if saved:
            print(f"  mean {100 * sum(saved) / len(saved):.2f} %, most {100 * max(saved):.2f} %\n")
