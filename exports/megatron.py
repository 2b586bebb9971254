"""A plan as arguments of Megatron-LM's `pretrain_gpt.py`.

Names of arguments: megatron/training/arguments.py and megatron/core/transformer/transformer_config.py of Megatron-LM
(core 0.16).  Data, tokenizer, learning rate and checkpoints are the user's own.
"""

from __future__ import annotations

import shlex

from exports.engine import Engine, Pair
from exports.heading import heading
from exports.megatron_model import model_arguments
from exports.pipeline_layout import format_layout
from exports.shape import Shape
from specs.errors import BadInputError
from specs.model import Attention, LatentAttention, ModelSpec, Moe
from specs.plan import Plan

Arguments = list[tuple[str, ...]]


def check_model(model: ModelSpec) -> None:
    """Raise `BadInputError` unless Megatron-LM's GPT model can be this one."""
    model_arguments(model)


def check(shape: Shape, model: ModelSpec) -> None:
    """Raise `BadInputError` unless Megatron-LM can cut this model in this shape."""
    if shape.zero > 1 and shape.pipeline > 1:
        raise BadInputError(f"ZeRO level {shape.zero} is written for one pipeline stage, the plan has {shape.pipeline}")
    if shape.schedule not in ("1f1b", "interleaved"):
        raise BadInputError(f"Megatron-LM has the schedules 1f1b and interleaved, the plan has {shape.schedule}")
    if shape.virtual > 1 and shape.num_micro_batches % shape.pipeline:
        raise BadInputError(
            f"Megatron-LM interleaves multiples of {shape.pipeline} micro-batches, the plan has "
            f"{shape.num_micro_batches}"
        )
    for name, module in model.modules():
        if isinstance(module, Moe):
            if module.num_experts % shape.expert:
                raise BadInputError(f"{name}: {module.num_experts} experts are not a multiple of {shape.expert}")
            continue
        for what, units in _units(module):
            if units % shape.tensor and not (what == "KV heads" and shape.tensor % units == 0):
                raise BadInputError(
                    f"{name}: {units} {what} are not a multiple of tensor-parallel degree {shape.tensor}, and "
                    "Megatron-LM cuts equally"
                )
    if shape.tensor * shape.data % shape.expert:
        raise BadInputError(f"experts in blocks of {shape.expert} do not divide {shape.tensor * shape.data} ranks")


def _units(module: object) -> list[tuple[str, int]]:
    """What must divide by the degree; the vocabulary is padded."""
    match module:
        case Attention(num_heads=heads, num_kv_heads=kv_heads):
            return [("query heads", heads), ("KV heads", kv_heads)]
        case LatentAttention(num_heads=heads):
            return [("heads", heads)]
    ffn = getattr(module, "ffn", None)
    return [] if ffn is None else [("FFN columns", ffn)]


def recomputes(model: ModelSpec) -> tuple[Pair, ...]:
    """Selective granularity by module (`--recompute-modules`), or whole layers.

    Activation functions alone are recomputed in experts (`moe_act`), not in dense MLPs.
    """
    kinds = {module.kind for _, module in model.modules()}
    pairs: list[Pair] = [("none", "none"), ("selective", "none"), ("none", "full"), ("selective", "full")]
    if "mlp" not in kinds:
        pairs += [("none", "selective"), ("selective", "selective")]
    return (*pairs, ("full", "full"))


def arguments(plan: Plan, shape: Shape) -> Arguments:
    """Options with their values, those of the layout first."""
    found: Arguments = [
        ("--tensor-model-parallel-size", str(shape.tensor)),
        ("--pipeline-model-parallel-size", str(shape.pipeline)),
    ]
    if shape.pipeline > 1:
        found.append(("--pipeline-model-parallel-layout", format_layout(shape.layers)))
    if shape.order == "replica" and shape.pipeline > 1:
        found.append(("--use-tp-pp-dp-mapping",))
    if shape.tensor > 1:
        found.append(("--sequence-parallel",))
    if any(isinstance(module, Moe) for _, module in plan.model.modules()):
        found.append(("--expert-model-parallel-size", str(shape.expert)))
        found.append(("--expert-tensor-parallel-size", "1"))
    found += [
        ("--micro-batch-size", str(shape.micro_batch)),
        ("--global-batch-size", str(shape.global_batch)),
        ("--seq-length", str(plan.training.seq_len)),
        *_recompute(plan.model, shape),
    ]
    if shape.data > 1:
        found.append(("--overlap-grad-reduce",))
    if shape.zero:
        found += [("--use-distributed-optimizer",), *([("--overlap-param-gather",)] if shape.data > 1 else [])]
    if shape.zero > 1:
        # Megatron-FSDP, with what its guide requires.  [Megatron-LM, docs: Megatron-FSDP quick start]
        found += [
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", "optim_grads" if shape.zero == 2 else "optim_grads_params"),
            ("--no-gradient-accumulation-fusion",),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
    if plan.training.precision != "fp32":
        found.append(("--bf16",))
    if plan.training.precision == "fp8":
        found.append(("--fp8-format", "hybrid"))
    return [*found, *model_arguments(plan.model)]


def _recompute(model: ModelSpec, shape: Shape) -> Arguments:
    if shape.full_layers:
        number = str(shape.full_layers)
        return [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "block"),
            ("--recompute-num-layers", number),
        ]
    if (shape.attention, shape.feed_forward) == ("full", "full"):
        return [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", "1")]
    modules = ["core_attn"] if shape.attention == "selective" else []
    kinds = {module.kind for _, module in model.modules()}
    if shape.feed_forward == "selective":
        modules.append("moe_act")
    elif shape.feed_forward == "full":
        modules += [name for name in ("mlp", "moe") if name in kinds]
    return [("--recompute-granularity", "selective"), ("--recompute-modules", *modules)] if modules else []


def write(plan: Plan, shape: Shape) -> str:
    """A bash file that sets the array `PLAIT_ARGS`."""
    nodes = plan.cluster.num_nodes
    lines = [
        *heading(plan, "Megatron-LM arguments"),
        "# Add data, tokenizer, learning rate and checkpoints, and start it on every node:",
        "#   source THIS_FILE",
        f"#   torchrun --nnodes {nodes} --nproc-per-node {plan.world_size // nodes} ... "
        'pretrain_gpt.py "${PLAIT_ARGS[@]}" ...',
        *(["unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron-FSDP refuses the 1"] if shape.zero > 1 else []),
        "PLAIT_ARGS=(",
        *(f"    {shlex.join(words)}" for words in arguments(plan, shape)),
        ")",
    ]
    return "\n".join(lines) + "\n"


def read_arguments(text: str) -> dict[str, tuple[str, ...]]:
    """Options of a file that `write` made, with their values.  Raises `BadInputError` for another file."""
    words = shlex.split(text, comments=True)
    if "PLAIT_ARGS=(" not in words or words[-1] != ")":
        raise BadInputError("the file does not set the array PLAIT_ARGS. Is it made by plait export --to megatron?")
    found: dict[str, tuple[str, ...]] = {}
    option = ""
    for word in words[words.index("PLAIT_ARGS=(") + 1 : -1]:
        if word.startswith("--"):
            option = word
            found[option] = ()
        else:
            found[option] = (*found[option], word)
    return found


MEGATRON = Engine("Megatron-LM", check_model, check, recomputes, True, write)
