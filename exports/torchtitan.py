"""A plan as a configuration function of torchtitan (0.3): degrees, `module_fqns_per_model_part`, batch sizes.

Fields: torchtitan/config/configs.py, `ParallelismConfig` and `TrainingConfig`.  torchtitan builds models from its own
registry, so the model must be one that it has.
"""

from __future__ import annotations

from typing import NamedTuple

from exports.engine import Engine, Pair
from exports.heading import heading
from exports.shape import Shape
from specs.errors import BadInputError
from specs.model import Attention, LatentAttention, Mlp, ModelSpec, Moe
from specs.plan import Plan, Recompute

SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
CHECKPOINTING: dict[Recompute, str] = {"selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}


class Entry(NamedTuple):
    """A model of torchtitan's registry: its package, flavor, and the configuration to begin with."""

    package: str
    flavor: str
    config: str


class Size(NamedTuple):
    """What tells models apart: layers, width, heads, KV heads, FFN columns (of an expert), experts, vocabulary."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    experts: int
    vocab: int


# Sizes: torchtitan/models/llama3/__init__.py and torchtitan/models/qwen3/__init__.py.
REGISTRY: dict[Size, Entry] = {
    Size(32, 4096, 32, 8, 14336, 0, 128256): Entry("llama3", "8B", "llama3_8b"),
    Size(80, 8192, 64, 8, 28672, 0, 128256): Entry("llama3", "70B", "llama3_70b"),
    Size(126, 16384, 128, 8, 53248, 0, 128256): Entry("llama3", "405B", "llama3_405b"),
    Size(48, 2048, 32, 4, 768, 128, 151936): Entry("qwen3", "30B-A3B", "qwen3_30b_a3b"),
}


def entry_of(model: ModelSpec) -> Entry:
    """The model of the registry that has these sizes.  Raises `BadInputError` when none has."""
    layer = model.layers[0]
    attention, part = layer.attention, layer.feed_forward
    found = None
    if len({(item.attention, item.feed_forward) for item in model.layers}) == 1 and attention and part:
        size = Size(
            layers=model.num_layers,
            hidden=model.hidden,
            heads=attention.num_heads,
            kv_heads=attention.num_heads if isinstance(attention, LatentAttention) else attention.num_kv_heads,
            ffn=part.ffn if isinstance(part, Mlp) else part.expert_ffn,
            experts=part.num_experts if isinstance(part, Moe) else 0,
            vocab=model.vocab,
        )
        found = REGISTRY.get(size) if isinstance(attention, Attention) else None
    if found is None:
        known = ", ".join(f"{entry.package} {entry.flavor}" for entry in REGISTRY.values())
        raise BadInputError(f"torchtitan's registry has no model of the sizes of {model.name}; known are {known}")
    return found


def check_model(model: ModelSpec) -> None:
    """Raise `BadInputError` unless torchtitan has this model."""
    entry_of(model)


def check(shape: Shape, model: ModelSpec) -> None:
    """Raise `BadInputError` unless torchtitan can cut a model in this shape."""
    if shape.schedule not in SCHEDULES:
        raise BadInputError(f"torchtitan has the schedules {', '.join(SCHEDULES)}, the plan has {shape.schedule}")
    if shape.order == "replica" and shape.pipeline > 1:
        raise BadInputError("torchtitan numbers ranks stage by stage, the plan replica by replica")
    for name, module in model.modules():
        if isinstance(module, Attention) and (module.num_heads % shape.tensor or module.num_kv_heads % shape.tensor):
            raise BadInputError(
                f"{name}: {module.num_heads} query and {module.num_kv_heads} KV heads are not both multiples of "
                f"tensor-parallel degree {shape.tensor}"
            )
        if isinstance(module, Mlp) and module.ffn % shape.tensor:
            raise BadInputError(f"{name}: {module.ffn} FFN columns are not a multiple of degree {shape.tensor}")
        if isinstance(module, Moe) and (module.num_experts % shape.expert or shape.tensor * shape.data % shape.expert):
            raise BadInputError(f"{name}: {module.num_experts} experts cannot be shared by {shape.expert} ranks")


def recomputes(model: ModelSpec) -> tuple[Pair, ...]:  # noqa: ARG001
    """Activation checkpointing by layer: none, selective by operator, full."""
    return (("none", "none"), ("selective", "selective"), ("full", "full"))


def module_names(shape: Shape) -> list[list[str]]:
    """Names of the modules of every stage, as torchtitan's models have them."""
    stages, start = [], 0
    for number in shape.layers:
        stages.append([f"layers.{index}" for index in range(start, start + number)])
        start += number
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return stages


def write(plan: Plan, shape: Shape) -> str:
    """A Python module with one configuration function."""
    entry = entry_of(plan.model)
    name = f"{entry.config}_plait"
    sequences = shape.micro_batch * (shape.num_micro_batches if shape.pipeline > 1 else 1)
    replicate, shard = (1, shape.data) if shape.zero else (shape.data, 1)
    settings = {
        "data_parallel_replicate_degree": str(replicate),
        "data_parallel_shard_degree": str(shard),
        "fsdp_reshard_after_forward": '"always"' if shape.zero == 3 else '"never"',
        "tensor_parallel_degree": str(shape.tensor),
        "pipeline_parallel_degree": str(shape.pipeline),
    }
    if shape.expert > 1:
        settings["expert_parallel_degree"] = str(shape.expert)
    if shape.pipeline > 1:
        settings["pipeline_parallel_schedule"] = f'"{SCHEDULES[shape.schedule]}"'
        settings["pipeline_parallel_microbatch_size"] = str(shape.micro_batch)
        settings["module_fqns_per_model_part"] = "MODULES"
    classes = {"selective": "SelectiveAC", "full": "FullAC"}
    used = classes.get(shape.attention)
    imports = [
        "from torchtitan.config import ParallelismConfig",
        *([f"from torchtitan.distributed.activation_checkpoint import {used}"] if used else []),
        f"from torchtitan.models.{entry.package} import model_registry",
        f"from torchtitan.models.{entry.package}.config_registry import {entry.config}",
        "from torchtitan.trainer import Trainer",
    ]
    lines = [
        *heading(plan, "torchtitan configuration"),
        *_remarks(shape),
        f"# Save it as a module MODULE on the Python path, then: --module MODULE --config {name}",
        *imports,
        "",
        *_modules(shape),
        "",
        f"def {name}() -> Trainer.Config:",
        f"    config = {entry.config}()",
        f'    config.model_spec = model_registry("{entry.flavor}")',
        f"    config.training.seq_len = {plan.training.seq_len}",
        f"    config.training.local_batch_size = {sequences}",
        f"    config.training.global_batch_size = {shape.global_batch}",
        "    config.parallelism = ParallelismConfig(",
        *(f"        {key}={value}," for key, value in settings.items()),
        "    )",
        f"    config.activation_checkpoint = {CHECKPOINTING.get(shape.attention, 'None')}",
        "    return config",
    ]
    return "\n".join(lines) + "\n"


def _remarks(shape: Shape) -> list[str]:
    found = []
    if shape.zero in (1, 2):
        found.append("# FSDP also shards what ZeRO of this level does not: less memory than predicted.")
    if shape.attention == "selective":
        found.append("# SelectiveAC also repeats every second matrix product: slower than predicted, less memory.")
    return found


def _modules(shape: Shape) -> list[str]:
    """The names of every stage, a line for each; layers as ranges, since a model may have a hundred."""
    if shape.pipeline == 1:
        return []
    lines, start = ["MODULES = ["], 0
    for index, number in enumerate(shape.layers):
        first = '"tok_embeddings", ' if index == 0 else ""
        last = ', "norm", "lm_head"' if index == len(shape.layers) - 1 else ""
        lines.append(f'    [{first}*(f"layers.{{i}}" for i in range({start}, {start + number})){last}],')
        start += number
    return [*lines, "]", ""]


TORCHTITAN = Engine("torchtitan", check_model, check, recomputes, False, write)
