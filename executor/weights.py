"""First weights: the same numbers for every layout, made piece by piece so that no rank holds a whole tensor."""

from __future__ import annotations

import hashlib
import math

import torch

from specs.layout import Interval
from specs.tensors import Init

# Elements drawn from one generator.  The block's seed depends on the tensor's name and the block's number only.
_DRAW = 2**16
_STANDARD_DEVIATION = 0.02  # of normal weights (GPT-2); residual outputs are divided by sqrt(2 x layers)


def initial_values(
    name: str, elements: Interval, init: Init, *, num_layers: int, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    """Row-major elements [start, stop) of a tensor's first value, 1-D on the CPU."""
    if init == "ones":
        return torch.ones(elements.size, dtype=dtype)
    if init == "zeros":
        return torch.zeros(elements.size, dtype=dtype)
    scale = _STANDARD_DEVIATION / (math.sqrt(2 * num_layers) if init == "residual" else 1.0)
    parts = []
    for block in range(elements.start // _DRAW, -(-elements.stop // _DRAW)):
        digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        drawn = torch.empty(_DRAW).normal_(generator=generator)
        common = elements.overlap(Interval(block * _DRAW, (block + 1) * _DRAW)).shifted(-block * _DRAW)
        parts.append(drawn[common.start : common.stop])
    return torch.cat(parts).mul_(scale).to(dtype)
