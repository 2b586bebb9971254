"""Rules of the house that a machine can check: directions of imports, sizes, docstrings, the frozen surface."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("specs", "cost_models", "planner", "executor", "recovery", "profiles", "reports", "exports", "commands")
# What each room may import, itself apart.
ARROWS: dict[str, set[str]] = {
    "specs": set(),
    "cost_models": {"specs"},
    "planner": {"specs", "cost_models"},
    "executor": {"specs", "cost_models"},
    "recovery": {"specs", "cost_models", "planner", "executor"},
    "profiles": {"specs", "cost_models", "executor"},
    "reports": {"specs", "cost_models"},
    "exports": {"specs", "cost_models"},
    "commands": {"specs", "cost_models", "planner", "executor", "recovery", "profiles", "reports", "exports"},
}
WITHOUT_TORCH = ("specs", "cost_models", "planner", "recovery", "reports", "exports")
MAX_LINES = 400


def sources(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


def imported_packages(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level package and line of every import, at module level or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            assert node.module is not None
            yield node.module.split(".")[0], node.lineno


def wrong_arrows(path: Path, room: str) -> list[str]:
    allowed = ARROWS[room] | {room}
    return [
        f"{path.relative_to(ROOT)}:{line} imports {package}"
        for package, line in imported_packages(path)
        if package in (*ROOMS, "cli", "tests", "benchmarks", "examples") and package not in allowed
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    assert sources(room)
    assert [problem for path in sources(room) for problem in wrong_arrows(path, room)] == []


def test_the_arrow_test_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "bad.py"
    path.write_text("def f():\n    from planner.search import x\n")
    assert wrong_arrows(path, "specs") == ["bad.py:2 imports planner"]


@pytest.mark.parametrize("path", sources(*WITHOUT_TORCH), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_executor_and_profiles_import_torch(path: Path) -> None:
    assert "torch" not in {package for package, _ in imported_packages(path)}


@pytest.mark.parametrize("path", [*sources(*ROOMS), ROOT / "cli.py"], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text)), "the module needs a docstring"


def public_names(module_name: str) -> set[str]:
    """Names that a module defines itself, without a leading underscore."""
    tree = ast.parse((ROOT / f"{module_name.replace('.', '/')}.py").read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


# The contracts are what others build on: a name that goes or comes is a decision, made here and in the changelog.
SURFACE: dict[str, set[str]] = {
    "specs.units": {"num_bytes", "percent", "rate", "seconds"},
    "specs.base": {
        "Document",
        "DocumentType",
        "SCHEMA_VERSION",
        "Spec",
        "first_problem",
        "load_document",
        "parse",
        "parse_document",
        "read_json",
        "write_whole",
    },
    "specs.cluster": {
        "ClusterSpec",
        "CollectiveCurve",
        "CollectiveOp",
        "Device",
        "Link",
        "LinkLevel",
        "MAX_DEVICES",
        "NodeGroup",
        "Precision",
    },
    "specs.contingency": {
        "find_contingency",
        "plan_after",
        "processes",
        "remade",
    },
    "specs.errors": {
        "BadInputError",
        "NoPlanFitsError",
        "PlaitError",
        "TimeLimitError",
    },
    "specs.evidence": {
        "Alternative",
        "Certificate",
        "LadderRung",
        "Objective",
        "RateChoice",
    },
    "specs.failures": {
        "BlastRadius",
        "Checkpointing",
        "FailureClass",
        "FailureDomain",
        "FailureModel",
        "Restarting",
        "SlowDevices",
    },
    "specs.faults": {
        "Fault",
        "FaultKind",
        "Moment",
        "parse_fault",
    },
    "specs.huggingface": {
        "MODEL_TYPES",
        "model_from_config",
    },
    "specs.huggingface_hybrid": {
        "nemotron_h",
    },
    "specs.huggingface_keys": {
        "ACTIVATIONS",
        "ConfigKeys",
    },
    "specs.huggingface_parts": {
        "attention_of",
        "decoder_of",
        "gated_mlp_of",
        "head_dim_of",
        "rope_of",
    },
    "specs.layout": {
        "Cuts",
        "Interval",
        "balanced_cuts",
        "block_of",
        "block_starts",
        "check_cuts",
        "interval_of",
        "kv_groups_of",
        "refine",
        "sequence_token_cuts",
        "sharing_blocks",
    },
    "specs.model": {
        "Activation",
        "Attention",
        "Embedding",
        "FeedForward",
        "Head",
        "LatentAttention",
        "Layer",
        "MAX_LAYERS",
        "Mamba2",
        "Mlp",
        "ModelSpec",
        "Module",
        "Moe",
        "NamedModule",
        "Norm",
        "NormKind",
        "RopeScaling",
        "SEQUENCE_KINDS",
        "UNIT_NAMES",
        "num_units",
    },
    "specs.options": {
        "Backend",
        "OnLoss",
        "OptimizerOptions",
        "TrainOptions",
    },
    "specs.plan": {
        "Contingency",
        "ContingencyPolicy",
        "MemoryTerms",
        "ModulePlacement",
        "Pipeline",
        "Plan",
        "Prediction",
        "Provenance",
        "Recompute",
        "Replica",
        "Stage",
        "StepTerms",
        "TrainingSpec",
        "Zero",
        "aligned_token_cuts",
    },
    "specs.plan_checks": {
        "check_pipeline",
        "check_replicas",
        "check_sharded_weights",
    },
    "specs.presets": {
        "ClusterName",
        "MACHINES",
        "MODEL_NAMES",
        "Machine",
        "PRESETS",
        "cluster_preset",
        "load_cluster",
        "load_model",
        "machines",
        "model_preset",
    },
    "specs.profile": {
        "CollectiveTiming",
        "ModuleTiming",
        "OptimizerTiming",
        "OverlapTiming",
        "Profile",
        "StepOverhead",
        "Timing",
    },
    "specs.runlog": {
        "ActionsRecord",
        "ExpertLoadRecord",
        "Bucket",
        "CheckpointRecord",
        "EndRecord",
        "EvaluationRecord",
        "INCIDENT_BUCKETS",
        "IncidentRecord",
        "MemoryRecord",
        "Record",
        "SlowRecord",
        "StartRecord",
        "StepRecord",
        "TimedAction",
        "read_log",
    },
    "specs.schedule": {
        "Action",
        "Actions",
        "Held",
        "Kind",
        "Repeats",
        "Schedule",
        "Step",
        "Traffic",
        "check_actions",
        "format_actions",
        "most_held",
        "parse_actions",
        "pipeline_actions",
        "repeats",
        "run_order",
        "stage_actions",
        "traffic",
    },
    "specs.slices": {
        "MAX_ROWS",
        "MIN_ROWS",
        "Piece",
        "attention_pieces",
        "mask_shape",
        "slices",
        "view_of",
    },
    "specs.tensors": {
        "AnyModule",
        "Init",
        "RowCut",
        "TensorSpec",
        "local_num_elements",
        "local_rows",
        "num_parameters",
        "parameter_name",
        "sharding_level",
        "tensors_of",
    },
}


@pytest.mark.parametrize("module_name", sorted(SURFACE))
def test_public_surface_of_specs(module_name: str) -> None:
    assert public_names(module_name) == SURFACE[module_name]


def test_every_module_of_specs_is_frozen() -> None:
    files = {path.stem for path in sources("specs")} - {"__init__"}
    assert files == {name.removeprefix("specs.") for name in SURFACE}


@pytest.mark.parametrize("path", sources("specs"), ids=lambda path: path.stem)
def test_public_definitions_of_specs_have_docstrings(path: Path) -> None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name}"


def run_python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_rooms_import_without_a_warning() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sources("specs", "cost_models", "planner", "reports")
        if path.stem != "__init__"
    ]
    result = run_python("\n".join(f"import {name}" for name in [*names, "cli"]), "-W", "error")
    assert result.returncode == 0, result.stderr


HEAVY = ("torch", "pandas", "scipy", "networkx", "pulp", "highspy", "matplotlib", "transformers")


def test_help_is_light() -> None:
    code = (
        "import sys, cli\nsys.argv = ['plait', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
    assert result.stdout.splitlines()[-1] == "HEAVY []"


def test_specs_import_nothing_heavy() -> None:
    for path in sources("specs"):
        if path.stem != "__init__":
            importlib.import_module(f"specs.{path.stem}")
    result = run_python(
        "import sys, specs.presets, specs.runlog, specs.tensors\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert result.stdout.strip() == "[]"
