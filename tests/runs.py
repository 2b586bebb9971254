"""Synthetic run folders for tests: a plan with known predictions and a log with known times."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from specs.plan import (
    MemoryTerms,
    ModulePlacement,
    Pipeline,
    Plan,
    Prediction,
    Provenance,
    Replica,
    Stage,
    StepTerms,
    TrainingSpec,
)
from specs.presets import cluster_preset, model_preset
from specs.runlog import EndRecord, MemoryRecord, Record, StartRecord, StepRecord

PREDICTED = StepTerms(forward=0.30, backward=0.60, tp_communication=0.08, optimizer=0.02)


def plan() -> Plan:
    """The tiny model on two ranks, predicted to take a second per step of 512 tokens."""
    model = model_preset("tiny")
    stage = Stage(num_ranks=2, modules=tuple(ModulePlacement(module=name, blocks=(2,)) for name, _ in model.modules()))
    return Plan(
        made=Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z"),
        model=model,
        cluster=cluster_preset("h100x2"),
        training=TrainingSpec(global_batch=8, seq_len=64),
        pipelines=(Pipeline(micro_batch=2, stages=(stage,)),),
        replicas=(Replica(pipeline=0, ranks=(0, 1), sequences=8),),
        predicted=Prediction(
            step_time_seconds=PREDICTED.total(),
            step_terms=PREDICTED,
            tokens_per_second=512.0,
            peak_memory_bytes=1000,
            peak_memory_rank=0,
            peak_memory_terms=MemoryTerms(weights=200, gradients=200, optimizer=400, activations=200),
            stage_memory_bytes=(1000,),
            goodput_tokens_per_second=480.0,
            renewal_factor=0.95,
            degraded_factor=0.99,
            checkpoint_interval_seconds=600.0,
            estimated=False,
        ),
    )


def start(time: float, *, step: int = 0, spent: float = 5.0) -> StartRecord:
    return StartRecord(
        time=time,
        step=step,
        plan_sha256=plan().sha256(),
        world_size=2,
        backend="gloo",
        device="cpu",
        versions={"torch": "2.13"},
        seconds={"program_startup": spent},
    )


def steps(
    time: float, numbers: Iterable[int], *, slower: float = 1.0, warm_up: int = 0, **terms: float
) -> list[StepRecord]:
    """Steps whose terms are the predicted ones times `slower`, with `terms` in place of some."""
    records = []
    for position, number in enumerate(numbers):
        scaled = {name: value * slower for name, value in PREDICTED.model_dump().items()}
        measured = StepTerms.model_validate({**scaled, **terms})
        time += measured.total()
        records.append(
            StepRecord(
                time=time,
                step=number,
                loss=5.0,
                gradient_norm=1.0,
                learning_rate=1e-3,
                tokens=512,
                seconds=measured.total(),
                terms=measured,
                warm_up=position < warm_up,
            )
        )
    return records


def memory(peak: int = 1100) -> MemoryRecord:
    return MemoryRecord(
        method="live tensors",
        peak_bytes={0: peak - 100, 1: peak},
        activation_bytes={0: 200, 1: 250},
        static_bytes={0: 800, 1: 800},
    )


def end(time: float, *, step: int, startup: float, in_steps: float) -> EndRecord:
    return EndRecord(
        time=time,
        step=step,
        reason="finished",
        wall_seconds=startup + in_steps,
        seconds={"program_startup": startup, "step": in_steps},
    )


def whole_run(*, num_steps: int = 6, slower: float = 1.0, **terms: float) -> list[Record]:
    """One attempt: 5 s of start-up, the first step warm-up, then an end."""
    done = steps(1005.0, range(1, num_steps + 1), slower=slower, warm_up=1, **terms)
    in_steps = sum(record.seconds for record in done)
    return [
        start(1005.0),
        *done,
        memory(),
        end(done[-1].time, step=num_steps, startup=5.0, in_steps=in_steps),
    ]


def write(folder: Path, records: Iterable[Record], *, of: Plan | None = None, tail: str = "") -> Path:
    """A run folder; `tail` is put after the last line, as a killed writer would leave it."""
    folder.mkdir(parents=True, exist_ok=True)
    (of if of is not None else plan()).save(folder / "plan.json")
    lines = "".join(record.model_dump_json() + "\n" for record in records)
    (folder / "log.jsonl").write_text(lines + tail)
    return folder
