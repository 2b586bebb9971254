"""What the ranks of evenly cut blocks have of a module: intervals of units, and elements of tensors."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from cost_models.flops import local_kv_heads
from planner.blocks import Blocks
from specs.layout import Interval, balanced_cuts, interval_of, refine
from specs.model import Attention, Mamba2, Module, num_units
from specs.tensors import local_rows, tensors_of


@lru_cache(maxsize=4096)
def all_shares(module: Module, degree: int) -> tuple[Interval, ...]:
    """Every rank's interval of units in an evenly cut block; the last one is as large as any."""
    cuts = balanced_cuts(num_units(module), degree)
    return tuple(interval_of(cuts, part) for part in range(degree))


@lru_cache(maxsize=4096)
def distinct_shares(module: Module, degree: int) -> tuple[Interval, ...]:
    """One interval of units for every different amount of work that ranks of an evenly cut block have."""
    found: dict[tuple[int, int], Interval] = {}
    for units in all_shares(module, degree):
        heads = local_kv_heads(module, units) if isinstance(module, Attention | Mamba2) else 0
        found.setdefault((units.size, heads), units)
    return tuple(found.values())


@lru_cache(maxsize=4096)
def copied_elements(module: Module, blocks: Blocks) -> int:
    """Most weight elements that a rank keeps twice, because others hold other parts of the same rows: neighbours in its
    block (KV heads), or ranks of blocks of another size.
    """
    shares = [units for size in dict.fromkeys(blocks) for units in all_shares(module, size)]
    copied: Counter[Interval] = Counter()
    for tensor in tensors_of(module):
        if tensor.cut == "whole" or (tensor.cut == "unit" and blocks[0] == blocks[-1]):
            continue
        rows = {units: local_rows(module, tensor, units) for units in shares}
        atoms = set(refine(set(rows.values())))
        for units, own in rows.items():
            copied[units] += own.size * max(tensor.cols, 1) * (own not in atoms)
    return max(copied.values(), default=0)


@lru_cache(maxsize=4096)
def cut_elements(module: Module, degree: int, *, matrices: bool = False) -> int:
    """Elements that the last rank of a block holds of tensors (or matrices alone) that the block cuts."""
    units = all_shares(module, degree)[-1]
    return sum(
        local_rows(module, tensor, units).size * max(tensor.cols, 1)
        for tensor in tensors_of(module)
        if tensor.cut != "whole" and (tensor.cols or not matrices)
    )


@lru_cache(maxsize=4096)
def shared_elements(module: Module, degree: int, *, matrices: bool = False) -> int:
    """Of those, the elements of KV heads that other ranks of the block may hold too."""
    if not isinstance(module, Attention) or module.num_kv_heads % degree == 0:
        return 0
    units = all_shares(module, degree)[-1]
    return sum(
        local_rows(module, tensor, units).size * max(tensor.cols, 1)
        for tensor in tensors_of(module)
        if tensor.cut == "kv" and (tensor.cols or not matrices)
    )


@lru_cache(maxsize=4096)
def whole_elements(module: Module) -> int:
    """Elements of matrices that every rank holds whole, whatever the block."""
    return sum(t.num_elements for t in tensors_of(module) if t.cut == "whole" and t.cols and t.decay)
