"""Frameworks of published runs as parameter sets: what each overlaps, moves and keeps.  Data in `data/frameworks.json`.

One set per framework, fitted on some sources and reported on others (benchmarks/fit_published.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from specs.errors import BadInputError

_DATA = Path(__file__).parent / "data" / "frameworks.json"


@dataclass(frozen=True, slots=True)
class Framework:
    """Overlaps are fractions hidden; passes count how often element-wise kernels move a tensor in forward."""

    source: str
    flash_attention: bool
    dropout: bool  # GPT models (no gate) are trained with dropout and keep its masks
    tensor_overlap: float
    regather_exposed: float  # of the second gather of a layer's input under sequence parallelism
    transfer_overlap: float  # of pipeline transfers when interleaved
    transfer_sync_seconds: float  # of a blocking transfer, beyond its bytes
    gradient_overlap: float
    contention: float  # slowdown of computing, as a part of the fully sharded communication it hides
    norm_passes: float  # tokens x hidden, 2 bytes
    activation_passes: float  # tokens x columns, 2 bytes
    backward_passes: float  # element-wise traffic of backward over that of forward
    softmax_passes: float  # unfused attention: heads x tokens x sequence, 2 bytes
    logit_passes: float  # tokens x vocabulary, 4 bytes
    batched_efficiency: float  # unfused attention: batched products, of the matrix peak
    odd_head_factor: float  # unfused attention with a head size that is no multiple of 8
    grouped_efficiency: float  # products of experts, over those of one matrix
    selective_share: float  # of attention's forward time that selective recomputation repeats
    gradient_bytes: float
    gradient_bytes_fp8: float
    optimizer_bytes_per_element: float
    ties_embedding: bool
    usual_recompute: Literal["none", "selective", "full"]  # where a source does not say
    usual_recompute_share: float  # of the forward pass, where `usual_recompute` is full
    host_fraction: float  # of all computing
    layer_host_seconds: float  # per layer and pass, what the device waits for the host
    step_overhead_seconds: float
    extra_state_bytes: float  # of the optimizer, per parameter, beside master weights and moments
    unsharded_update_bytes: float  # of an optimizer that is not sharded, per parameter, while it updates
    selective_kept: float  # flash attention: part of a layer's activations that selective recomputation keeps
    logit_bytes: float  # at the head's peak, per token and vocabulary row of the rank
    cut_softmax_bytes: float  # beside `logit_bytes` where the vocabulary is cut
    slack: float  # allocator, as a part of activations and working memory
    reserved_bytes: float  # context, communicators, allocator slack, as the sources' way of measuring counts them


@cache
def frameworks() -> dict[str, Framework]:
    """Shipped frameworks by name."""
    return {name: Framework(**entry) for name, entry in json.loads(_DATA.read_text(encoding="utf-8")).items()}


def framework(name: str) -> Framework:
    """Raises `BadInputError` for an unknown name."""
    if name not in frameworks():
        raise BadInputError(f"unknown software stack {name!r}. Known: {', '.join(frameworks())}.")
    return frameworks()[name]
