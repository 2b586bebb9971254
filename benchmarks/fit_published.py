"""Fit the parameter sets of devices and frameworks to some published sources; the others are left for the report.

    python benchmarks/fit_published.py [--write]

Least squares of the logarithm of predicted over measured step time (soft L1), each parameter held weakly to its
starting value and inside physical bounds.  One set per device and per framework; no parameter belongs to a row or
to a source.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from cost_models.device import Efficiency
from cost_models.frameworks import Framework, frameworks
from cost_models.published import Row, Run, load_rows
from cost_models.run_memory import run_memory_bytes
from cost_models.run_time import RunModel, run_efficiencies

HERE = Path(__file__).parent
DATA = HERE.parent / "cost_models" / "data"


# BLOOM's chronicle runs from 17 to 28 February 2022; what follows the first topology sweep is left for the report.
LATER_BLOOM = ("bloom-02-21", "bloom-02-23", "bloom-02-24", "bloom-02-26", "bloom-02-27", "bloom-02-28", "bloom-final")


def is_fitted(row: Row) -> bool:
    """Whether a row belongs to the sources that parameters are fitted on; every other row only reports."""
    group, name = row.source_group, row.id
    return (
        group == "seqsel-2205.05198"
        or name.startswith("zb-t4-")  # of four tables
        or (group == "dgxc-benchmarking" and "v24.11.1" in name)  # of three releases
        or (group == "torchtitan" and name.startswith("titan-8b"))
        or group == "jax-toolbox"
        or (group == "bigscience-bloom" and not name.startswith(LATER_BLOOM))
    )


def is_dense_h100(run: Run) -> bool:
    return run.gpu == "H100" and run.experts is None


# (table, entry, key, low, high); the matrix efficiencies are keyed by precision.
Parameter = tuple[str, str, str, float, float]
STAGES: list[tuple[str, Callable[[Row], bool], list[Parameter]]] = [
    (
        "A100 and Megatron-LM 2022",
        lambda row: row.run is not None and row.run.stack == "megatron-2022" and row.run.gpu == "A100-80G",
        [
            ("device", "A100-80G", "bf16", 0.7, 0.95),
            ("device", "A100-80G", "matrix_depth_overhead", 60, 400),
            ("stack", "megatron-2022", "norm_passes", 6, 40),
            ("stack", "megatron-2022", "backward_passes", 0.5, 2.0),
            ("stack", "megatron-2022", "softmax_passes", 3, 14),
            ("stack", "megatron-2022", "logit_passes", 2, 12),
            ("stack", "megatron-2022", "transfer_sync_seconds", 2e-5, 2e-3),
            ("stack", "megatron-2022", "step_overhead_seconds", 1e-3, 0.2),
            ("stack", "megatron-2022", "optimizer_bytes_per_element", 24, 60),
        ],
    ),
    (
        "Megatron-DeepSpeed",
        lambda row: row.run is not None and row.run.stack == "megatron-deepspeed",
        [
            ("stack", "megatron-deepspeed", "norm_passes", 6, 60),
            ("stack", "megatron-deepspeed", "softmax_passes", 3, 20),
            ("stack", "megatron-deepspeed", "odd_head_factor", 1, 12),
            ("stack", "megatron-deepspeed", "host_fraction", 0.001, 0.6),
            ("stack", "megatron-deepspeed", "layer_host_seconds", 1e-6, 2e-2),
            ("stack", "megatron-deepspeed", "backward_passes", 0.5, 3),
            ("stack", "megatron-deepspeed", "transfer_sync_seconds", 2e-5, 3e-2),
            ("stack", "megatron-deepspeed", "step_overhead_seconds", 1e-3, 5.0),
        ],
    ),
    (
        "H100 and Megatron-Core",
        lambda row: row.run is not None and row.run.stack == "megatron-core" and is_dense_h100(row.run),
        [
            ("device", "H100", "bf16", 0.5, 0.83),
            ("device", "H100", "fp8", 0.35, 0.75),
            ("device", "H100", "attention_forward_efficiency", 0.3, 0.7),
            ("stack", "megatron-core", "norm_passes", 4, 20),
            ("stack", "megatron-core", "tensor_overlap", 0.05, 0.95),
            ("stack", "megatron-core", "transfer_overlap", 0.05, 0.99),
            ("stack", "megatron-core", "gradient_overlap", 0.3, 0.99),
            ("stack", "megatron-core", "step_overhead_seconds", 1e-3, 0.2),
            ("stack", "megatron-core", "host_fraction", 0.001, 0.1),
        ],
    ),
    (
        "experts of Megatron-Core",
        lambda row: row.run is not None and row.run.stack == "megatron-core" and row.run.experts is not None,
        [("stack", "megatron-core", "grouped_efficiency", 0.5, 1.0)],
    ),
    (
        "JAX",
        lambda row: row.run is not None and row.run.stack == "jax" and row.run.gpu == "H100",
        [
            ("stack", "jax", "norm_passes", 4, 30),
            ("stack", "jax", "usual_recompute_share", 0.2, 1.0),
            ("stack", "jax", "gradient_overlap", 0.3, 0.99),
            ("stack", "jax", "contention", 0.01, 1.0),
            ("stack", "jax", "host_fraction", 0.001, 0.3),
        ],
    ),
    (
        "H100 at 500 W and torchtitan",
        lambda row: row.run is not None and row.run.stack == "torchtitan",
        [
            ("device", "H100-500W", "bf16", 0.35, 0.8),
            ("device", "H100-500W", "fp8", 0.25, 0.7),
            ("device", "H100-500W", "attention_forward_efficiency", 0.25, 0.6),
            ("stack", "torchtitan", "norm_passes", 6, 40),
            ("stack", "torchtitan", "gradient_overlap", 0.3, 0.99),
            ("stack", "torchtitan", "contention", 0.01, 1.0),
        ],
    ),
]


MEMORY_STAGES: list[tuple[str, list[Parameter]]] = [
    (
        "megatron-2022",
        [
            ("stack", "megatron-2022", "slack", 1e-3, 0.3),
            ("stack", "megatron-2022", "reserved_bytes", 1e7, 5e9),
        ],
    ),
    (
        "megatron-deepspeed",
        [
            ("stack", "megatron-deepspeed", "slack", 1e-3, 0.5),
            ("stack", "megatron-deepspeed", "reserved_bytes", 1e9, 2e10),
            ("stack", "megatron-deepspeed", "logit_bytes", 6, 16),
        ],
    ),
    (
        "megatron-core",
        [
            ("stack", "megatron-core", "slack", 1e-3, 0.3),
        ],
    ),
    (
        "torchtitan",
        [
            ("stack", "torchtitan", "selective_kept", 0.2, 1.0),
            ("stack", "torchtitan", "logit_bytes", 8, 20),
            ("stack", "torchtitan", "slack", 1e-3, 0.3),
        ],
    ),
]


FITTED_RATES = (
    *("matrix_efficiency", "matrix_depth_overhead"),
    *("attention_forward_efficiency", "attention_backward_efficiency"),
)


class Tables:
    """The parameter sets being fitted."""

    def __init__(self) -> None:
        self.devices: dict[str, Efficiency] = dict(run_efficiencies())
        self.stacks: dict[str, Framework] = dict(frameworks())

    def get(self, parameter: Parameter) -> float:
        table, entry, key, *_ = parameter
        source: Any = self.devices[entry] if table == "device" else self.stacks[entry]
        return float(source.matrix_efficiency[key] if key in ("bf16", "fp8") else getattr(source, key))

    def set(self, parameter: Parameter, value: float) -> None:
        table, entry, key, *_ = parameter
        if table == "stack":
            self.stacks[entry] = dataclasses.replace(self.stacks[entry], **{key: value})
            return
        device = self.devices[entry]
        changes: dict[str, Any] = {key: value}
        if key in ("bf16", "fp8"):
            changes = {"matrix_efficiency": {**device.matrix_efficiency, key: value}}
        elif key == "attention_forward_efficiency":
            changes["attention_backward_efficiency"] = 0.8 * value
        self.devices[entry] = dataclasses.replace(device, **changes)

    def log_memory_ratio(self, row: Row) -> float:
        assert row.run is not None
        assert row.memory_bytes is not None
        return math.log(run_memory_bytes(row.run, self.stacks[row.run.stack]) / row.memory_bytes)

    def log_ratio(self, row: Row) -> float:
        assert row.run is not None
        assert row.step_seconds is not None
        model = RunModel(row.run, self.devices[row.run.gpu], self.stacks[row.run.stack])
        return math.log(model.step_seconds() / row.step_seconds)


def fit(tables: Tables, rows: list[Row], parameters: list[Parameter], log_ratio: Callable[[Row], float]) -> np.ndarray:
    """Fit in place; returns the log ratios left over.  Rows of a sweep share a weight of its square root."""
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.source_group] = sizes.get(row.source_group, 0) + 1
    weights = np.array([1 / math.sqrt(sizes[row.source_group]) for row in rows]) * math.sqrt(len(rows))
    start = np.array([max(tables.get(parameter), parameter[3]) for parameter in parameters])
    low = np.log([parameter[3] for parameter in parameters])
    high = np.log([parameter[4] for parameter in parameters])

    def residuals(x: np.ndarray) -> np.ndarray:
        for parameter, value in zip(parameters, np.exp(x), strict=True):
            tables.set(parameter, float(value))
        errors = np.array([log_ratio(row) for row in rows]) * weights
        held = 0.1 * (x - np.log(start))
        return np.concatenate([errors, held])

    begin = np.clip(np.log(start), low + 1e-6, high - 1e-6)
    result = least_squares(residuals, begin, bounds=(low, high), loss="soft_l1", f_scale=0.05, diff_step=1e-3)
    residuals(result.x)
    return np.array([log_ratio(row) for row in rows])


def report(
    title: str, tables: Tables, rows: list[Row], parameters: list[Parameter], log_ratio: Callable[[Row], float]
) -> None:
    """Fit on the rows that are for fitting, and print the errors of both kinds with the parameters."""
    fitted = [row for row in rows if is_fitted(row)] or rows
    others = [row for row in rows if row not in fitted]
    left = np.abs(np.expm1(fit(tables, fitted, parameters, log_ratio)))
    print(f"{title}: fitted on {len(fitted)} rows, median {np.median(left):.1%}, mean {left.mean():.1%}")
    if others:
        errors = np.abs(np.expm1([log_ratio(row) for row in others]))
        print(f"   held out {len(others)} rows, median {np.median(errors):.1%}, mean {errors.mean():.1%}")
    for parameter in parameters:
        print(f"   {parameter[1]}.{parameter[2]} = {tables.get(parameter):.4g}   [{parameter[3]}, {parameter[4]}]")


def write(tables: Tables) -> None:
    """The fitted numbers into the shipped data; an A100 of 40 GB and an H200 take those of their siblings."""
    path = DATA / "device_efficiency.json"
    table = json.loads(path.read_text())
    for name, like in (("A100-80G", "A100-80G"), ("A100-40G", "A100-80G"), ("H100", "H100"), ("H200", "H100")):
        fitted = dataclasses.asdict(tables.devices[like])
        fitted["matrix_efficiency"] = {k: fitted["matrix_efficiency"][k] for k in table[name]["matrix_efficiency"]}
        table[name] |= {key: _rounded(fitted[key]) for key in FITTED_RATES}
    path.write_text(json.dumps(table, indent=1) + "\n")
    path = DATA / "device_variants.json"
    variants = json.loads(path.read_text())
    for name, entry in variants.items():
        entry["rates"] = {key: _rounded(dataclasses.asdict(tables.devices[name])[key]) for key in FITTED_RATES}
    path.write_text(json.dumps(variants, indent=1) + "\n")
    stacks = {name: {k: _rounded(v) for k, v in dataclasses.asdict(s).items()} for name, s in tables.stacks.items()}
    (DATA / "frameworks.json").write_text(json.dumps(stacks, indent=1) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the fitted sets to cost_models/data")
    options = parser.parse_args()
    table = [row for row in load_rows(HERE / "data" / "published_runs.csv") if row.run]
    tables = Tables()
    for name, belongs, parameters in STAGES:
        chosen = [row for row in table if row.step_seconds and belongs(row)]
        report(f"{name}, step time", tables, chosen, parameters, tables.log_ratio)
    for name, parameters in MEMORY_STAGES:
        chosen = [row for row in table if row.memory_bytes and row.run and row.run.stack == name]
        report(f"{name}, memory", tables, chosen, parameters, tables.log_memory_ratio)
    if options.write:
        write(tables)


if __name__ == "__main__":
    main()
