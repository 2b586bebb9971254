"""A small made-up profile for tests: times that follow simple laws, so that every answer is known."""

from __future__ import annotations

from cost_models.stragglers import expected_maximum
from specs.cluster import ClusterSpec
from specs.model import ModelSpec, Module
from specs.plan import Provenance
from specs.profile import (
    CollectiveOp,
    CollectiveTiming,
    ModuleTiming,
    OptimizerTiming,
    Profile,
    StepOverhead,
    Timing,
)

NO_OVERHEAD = StepOverhead(
    data_seconds_per_sequence=0.0,
    other_seconds_per_step=0.0,
    other_seconds_per_action=0.0,
    split_backward_overhead=0.0,
)
OPS: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter", "all_reduce", "point_to_point")
BYTES_PER_SECOND = 1e9
WORLD_SIZE = 4


def timing(seconds: float, *, spread: float = 0.0) -> Timing:
    return Timing(
        mean_seconds=seconds,
        std_seconds=spread * seconds,
        min_seconds=seconds,
        max_seconds=seconds,
        rank_spread=0.0,
        skew_seconds=spread * seconds * expected_maximum(WORLD_SIZE),
        repetitions=3,
    )


def module_timing(
    module: Module, degree: int, tokens: int, seq_len: int, *, seconds_per_token: float = 1e-6, spread: float = 0.0
) -> ModuleTiming:
    """Forward t tokens / degree, backward twice that; a tenth of the computing on top for communication."""
    forward = seconds_per_token * tokens / degree
    communication = forward / 10 if degree > 1 else 0.0
    return ModuleTiming(
        module=module,
        degree=degree,
        block_tokens=tokens,
        seq_len=seq_len,
        precision="fp32",
        world_size=WORLD_SIZE,
        forward=timing(forward + communication, spread=spread),
        backward=timing(2 * forward + 2 * communication, spread=spread),
        forward_communication=communication,
        backward_communication=2 * communication,
        flop_counted=0,
        flop_formula=0,
        activation_bytes=0,
        weight_bytes=1,
    )


def profile(
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    degrees: tuple[int, ...] = (1, 2, 4),
    tokens: tuple[int, ...] = (32, 64, 128, 256),
    seq_len: int = 32,
    group_sizes: tuple[int, ...] = (2, 3, 4),
    spread: float = 0.0,
    overhead: StepOverhead = NO_OVERHEAD,
) -> Profile:
    """Collectives: payload / 1 GB/s.  Optimizer: 1 ns per element."""
    modules = {module.model_dump_json(): module for _, module in model.modules()}
    return Profile(
        made=Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z"),
        method="made up",
        cluster=cluster,
        backend="gloo",
        world_size=4,
        modules=tuple(
            module_timing(module, degree, count, seq_len, spread=spread)
            for module in modules.values()
            for degree in degrees
            for count in tokens
        ),
        collectives=tuple(
            CollectiveTiming(
                op=op, num_ranks=n, level="scale_up", payload_bytes=size, timing=timing(size / BYTES_PER_SECOND)
            )
            for op in OPS
            for n in ((2,) if op == "point_to_point" else group_sizes)
            for size in (256, 4096, 1048576)
        ),
        optimizer=tuple(OptimizerTiming(num_elements=n, timing=timing(1e-9 * n)) for n in (1000, 1000000)),
        overhead=overhead,
    )
