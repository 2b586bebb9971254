"""Megatron-LM's `--pipeline-model-parallel-layout`: which layers each pipeline stage holds, in one string.

    E embedding, t decoder layer, m multi-token prediction, L loss; | ends a stage, x*n and (...)*n repeat

The grammar is that of `PipelineParallelLayerLayout.parse_str_to_list` (megatron-core 0.16): commas are cosmetic,
repeated parentheses are unrolled first, then repeated letters; neither nests.
"""

from __future__ import annotations

import re
from itertools import groupby

from specs.errors import BadInputError

LETTERS = "EtmL"
MAX_LENGTH = 1_000_000  # letters after unrolling: a mistyped number must not fill memory


def format_layout(layers: tuple[int, ...]) -> str:
    """Layers per stage as a string, the embedding before the first and the loss after the last: `Ett|(t*3|)*2tL`."""
    first, last = _letters(layers[0]), _letters(layers[-1])
    if len(layers) == 1:
        return f"E{first}L"
    middle = ""
    for number, run in groupby(layers[1:-1]):
        count = len(list(run))
        middle += f"({_letters(number)}|)*{count}" if count > 1 else f"{_letters(number)}|"
    return f"E{first}|{middle}{last}L"


def _letters(number: int) -> str:
    return "t" * number if number <= 2 else f"t*{number}"


def parse_layout(text: str) -> list[str]:
    """Letters of every stage: `Ett|tL` is `['Ett', 'tL']`.  Raises `BadInputError` for what is no layout."""
    unrolled = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        times = [(len(m[1]), m[2]) for m in re.finditer(pattern, unrolled)]
        if any(len(digits) > 7 for _, digits in times) or sum(size * int(d) for size, d in times) > MAX_LENGTH:
            raise BadInputError(f"pipeline layout {text!r} unrolls to more than {MAX_LENGTH:,} layers.")
        unrolled = re.sub(pattern, lambda match: match[1] * int(match[2]), unrolled)
    wrong = sorted(set(unrolled) - {*LETTERS, "|"})
    if wrong:
        raise BadInputError(f"pipeline layout {text!r}: {wrong[0]!r} is none of {', '.join(LETTERS)}, |, * and ().")
    if unrolled.count("E") != 1 or unrolled.count("L") != 1 or unrolled[0] != "E" or unrolled[-1] != "L":
        raise BadInputError(f"pipeline layout {text!r} must begin with E and end with L, one of each.")
    return unrolled.split("|")


def layers_per_stage(text: str) -> tuple[int, ...]:
    """Inverse of `format_layout`."""
    return tuple(stage.count("t") for stage in parse_layout(text))
