"""Training runs that others published, one CSV row each: what ran, on what, and what was measured."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cost_models.device import efficiencies
from cost_models.frameworks import frameworks
from specs.errors import BadInputError

Recompute = Literal["none", "selective", "full"]

REQUIRED_COLUMNS = (
    *("id", "layers", "hidden", "heads", "ffn_hidden", "vocab", "seq_len", "gpu", "n_gpus", "tp", "pp", "dp"),
    *("micro_batch", "global_batch", "source_group", "measured_step_time_s", "measured_tokens_per_s_per_gpu"),
    *("measured_peak_mem_GB", "derived_step_time_s", "derived_basis"),
)

# GPT-2's vocabulary, padded to a multiple of 128 as Megatron-LM does: what sources that leave it out train with.
DEFAULT_VOCAB = 50304


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts in place of every feed-forward part, `per_token` of `number`."""

    number: int
    per_token: int
    parallel: int  # ranks among which they are dealt
    tensor_parallel: int  # ranks that cut each


@dataclass(frozen=True, slots=True)
class Run:
    """A decoder trained on equal GPUs; the layout as Megatron-LM counts it (tp x cp x pp x dp GPUs)."""

    id: str
    source_group: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    vocab: int
    seq_len: int
    gpu: str
    num_gpus: int
    gpus_per_node: int
    network_bytes_per_second: float | None  # per GPU, None: the GPU's usual network
    tp: int
    pp: int
    dp: int
    cp: int
    chunks: int  # model chunks per stage (interleaving)
    sequence_parallel: bool
    micro_batch: int
    global_batch: int
    recompute: Recompute | None  # None: the source does not say
    sharding: Literal["none", "optimizer", "full"]
    shard_size: int  # ranks over which `full` shards parameters
    precision: Literal["bf16", "fp8"]
    fp32_gradients: bool  # beside 16-bit ones, where the source says so
    schedule: str
    stack: str
    out_of_memory: bool
    experts: Experts | None = None

    @property
    def num_micro_batches(self) -> int:
        return max(1, round(self.global_batch / (self.dp * self.micro_batch)))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table; `run` is None when it cannot be modelled, `problem` then says why."""

    id: str
    source_group: str
    gpu: str
    run: Run | None
    problem: str
    step_seconds: float | None
    memory_bytes: float | None
    time_rests_on_flops: bool


def load_rows(path: Path) -> list[Row]:
    """Read a table of published runs.  Raises `BadInputError` for a missing file, column or an unreadable number."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in REQUIRED_COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise BadInputError(
                    f"{path} lacks the columns {', '.join(missing)}. The table needs one training run per row, "
                    "with the columns of benchmarks/data/published_runs.csv."
                )
            return [_row(path, line, row) for line, row in enumerate(reader, start=2)]
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}. Check the path.") from None
    except UnicodeDecodeError:
        raise BadInputError(f"{path} is not a text file in UTF-8. A CSV table is needed.") from None


def _row(path: Path, line: int, cells: Mapping[str, str]) -> Row:
    def number(name: str) -> float | None:
        text = (cells.get(name) or "").strip()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadInputError(f"{path}, line {line}, column {name}: {text!r} is not a number.")
        return value

    step, basis = number("measured_step_time_s"), (cells.get("derived_basis") or "")
    derived = number("derived_step_time_s")
    exact = "exact identity" in basis
    per_gpu = number("measured_tokens_per_s_per_gpu")
    if step is None and exact:
        step = derived
    elif step is None and per_gpu and not derived:
        batch, seq_len, gpus = number("global_batch"), number("seq_len"), number("n_gpus")
        step = batch * seq_len / (per_gpu * gpus) if batch and seq_len and gpus else None
    memory = number("measured_peak_mem_GB")
    run, problem = _run(cells, number)
    return Row(
        id=cells["id"],
        source_group=cells["source_group"],
        gpu=cells["gpu"],
        run=run,
        problem=problem,
        step_seconds=step,
        memory_bytes=memory * 1e9 if memory is not None else None,
        time_rests_on_flops=step is None and derived is not None,
    )


def _run(cells: Mapping[str, str], number: Callable[[str], float | None]) -> tuple[Run | None, str]:
    needed = ("layers", "hidden", "heads", "ffn_hidden", "seq_len", "n_gpus", "tp", "pp", "dp", "micro_batch")
    missing = [name for name in (*needed, "global_batch") if number(name) is None]
    if missing:
        return None, f"layout or shape incomplete: no {', '.join(missing)}"
    values = {name: int(number(name) or 0) for name in (*needed, "global_batch")}
    if min(values.values()) < 1 or values["hidden"] % values["heads"]:
        return None, "a size below one, or a hidden size that the heads do not divide"
    gpu = gpu_name(cells["gpu"])
    if gpu is None:
        return None, f"no data for the GPU {cells['gpu']!r}"
    precision: Literal["bf16", "fp8"] = "fp8" if "fp8" in (cells.get("precision") or "") else "bf16"
    if gpu in efficiencies() and precision not in efficiencies()[gpu].matrix_efficiency:
        return None, f"no fp8 rate for {gpu}"
    cp = max(1, int(number("cp") or 1))
    product = values["tp"] * values["pp"] * values["dp"] * cp
    if product != values["n_gpus"]:
        return None, f"tp x pp x dp x cp = {product} is not the number of GPUs, {values['n_gpus']}"
    if values["micro_batch"] < 1 or values["global_batch"] < values["dp"] * values["micro_batch"]:
        return None, "global batch smaller than one micro-batch per replica"
    experts, problem = _experts(cells, number, values["tp"], values["n_gpus"] // values["pp"])
    if problem:
        return None, problem
    schedule = cells.get("schedule") or ""
    recompute = (cells.get("recompute") or "").strip()
    zero = (cells.get("zero_stage") or "").lower()
    sharding: Literal["none", "optimizer", "full"] = "none"
    shard_size = values["dp"] * cp
    if zero.startswith("3") or "fsdp" in zero:
        sharding = "full"
        sized = re.search(r"fsdp(\d+)$", zero)
        shard_size = min(int(sized.group(1)), values["dp"]) if sized and sized.group(1) != "2" else shard_size
    elif zero.startswith(("1", "2")):
        sharding = "optimizer"
    stack = (cells.get("stack") or "").strip() or stack_of(gpu, zero, schedule)
    if stack not in frameworks():
        return None, f"no parameters for the software stack {stack!r} (there are for {', '.join(frameworks())})"
    gated, per_node = number("gated_mlp"), max(1, int(number("gpus_per_node") or 8))
    return (
        Run(
            id=cells["id"],
            source_group=cells["source_group"],
            layers=values["layers"],
            hidden=values["hidden"],
            heads=values["heads"],
            kv_heads=max(1, int(number("kv_heads") or values["heads"])),
            ffn=values["ffn_hidden"],
            gated=bool(gated),
            vocab=max(1, int(number("vocab") or DEFAULT_VOCAB)),
            seq_len=values["seq_len"],
            gpu=gpu,
            num_gpus=values["n_gpus"],
            gpus_per_node=per_node,
            network_bytes_per_second=network_rate(cells.get("inter_node_link") or "", per_node),
            tp=values["tp"],
            pp=values["pp"],
            dp=values["dp"],
            cp=cp,
            chunks=max(1, int(number("vpp") or 1)),
            sequence_parallel=bool(number("sequence_parallel")),
            micro_batch=values["micro_batch"],
            global_batch=values["global_batch"],
            recompute=_recompute(recompute),
            sharding=sharding,
            shard_size=shard_size,
            precision=precision,
            fp32_gradients="fp32 grads" in (cells.get("precision") or ""),
            schedule=schedule,
            stack=stack,
            out_of_memory="OOM ROW" in (cells.get("notes") or ""),
            experts=experts,
        ),
        "",
    )


def _experts(
    cells: Mapping[str, str], number: Callable[[str], float | None], tp: int, gpus_per_stage: int
) -> tuple[Experts | None, str]:
    """Experts of a row, or what is missing.  Without a word on it each is cut as wide as all else, Megatron-Core's
    default, where the number of GPUs allows that, else not at all.
    """
    count, per_token, parallel = (int(number(name) or 0) for name in ("n_experts", "topk", "ep"))
    if not count:
        return None, ""
    if per_token < 1 or parallel < 1:
        return None, "mixture of experts with an incomplete layout: no topk or ep"
    if "alternate layers" in (cells.get("notes") or ""):
        return None, "mixture of experts in some layers only: not in the table's columns"
    if (cells.get("zero_stage") or "").startswith("3"):
        return None, "mixture of experts, fully sharded: not modelled"
    stated = re.search(r"ETP=(\d+)(?: on (\w+), (\d+) on (\w+))?", cells.get("notes") or "")
    cut = tp if gpus_per_stage % (parallel * tp) == 0 else 1
    if stated:
        by_gpu = {stated[2]: stated[1], stated[4]: stated[3]} if stated[2] else {}
        cut = int(by_gpu.get(cells["gpu"].split("-")[0], stated[1]))
    if count % parallel or gpus_per_stage % (parallel * cut):
        return (
            None,
            f"{count} experts over {parallel} ranks cut by {cut}: not a layout of {gpus_per_stage} GPUs a stage",
        )
    return Experts(count, per_token, parallel, cut), ""


def _recompute(text: str) -> Recompute | None:
    if not text:
        return None
    return "full" if text == "full" else "selective" if text.startswith("sel") else "none"


def gpu_name(text: str) -> str | None:
    """Name in the shipped device data; None if there is none.  An A100 without its memory is the one of 80 GB."""
    special = {"A100-40G": "A100-40G", "A100": "A100-80G", "H100-96G": "H100-500W"}
    names = special | {name: name for name in efficiencies()}
    for prefix in sorted(names, key=len, reverse=True):
        if text.startswith(prefix):
            return names[prefix]
    return None


def network_rate(text: str, gpus_per_node: int) -> float | None:
    """Bytes per second and GPU from a description such as `8x200Gb/s HDR IB per node`; None when it has no rate."""
    found = re.search(r"(?:(\d+)x)?[^0-9]*?(\d+)\s*Gb/s", text)
    if found is None:
        return None
    gigabits = float(found.group(2)) * int(found.group(1) or 1)
    return gigabits * 1e9 / 8 / (1 if "per GPU" in text else gpus_per_node)


def stack_of(gpu: str, zero: str, schedule: str) -> str:
    """The software stack that a row's own columns point to; a column `stack` overrides it."""
    if re.search(r"fsdp2\b", zero) or zero.startswith("3"):
        return "torchtitan"
    if "fsdp" in zero:
        return "jax"
    if gpu.startswith("A100") and "distributed optimizer" not in zero:
        return "megatron-deepspeed" if "DeepSpeed" in schedule or zero.startswith("1") else "megatron-2022"
    return "megatron-core"
