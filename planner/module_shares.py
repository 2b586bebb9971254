"""What the ranks of an evenly cut block have of a module: intervals of units, and elements of tensors."""

from __future__ import annotations

from functools import lru_cache

from cost_models.flops import local_kv_heads
from specs.layout import Interval, balanced_cuts, interval_of, refine
from specs.model import Attention, Module, num_units
from specs.tensors import local_rows, tensors_of


@lru_cache(maxsize=4096)
def all_shares(module: Module, degree: int) -> tuple[Interval, ...]:
    """Every rank's interval of units in an evenly cut block."""
    cuts = balanced_cuts(num_units(module), degree)
    return tuple(interval_of(cuts, part) for part in range(degree))


@lru_cache(maxsize=4096)
def distinct_shares(module: Module, degree: int) -> tuple[Interval, ...]:
    """One interval of units for every different amount of work that ranks of an evenly cut block have."""
    cuts = balanced_cuts(num_units(module), degree)
    found: dict[tuple[int, int], Interval] = {}
    for part in range(degree):
        units = interval_of(cuts, part)
        heads = local_kv_heads(module, units) if isinstance(module, Attention) else 0
        found.setdefault((units.size, heads), units)
    return tuple(found.values())


@lru_cache(maxsize=4096)
def copied_elements(module: Module, degree: int) -> int:
    """Most weight elements that a rank keeps twice, because neighbours hold other parts of the same rows (KV heads)."""
    cuts = balanced_cuts(num_units(module), degree)
    copied = [0] * degree
    for tensor in tensors_of(module):
        if tensor.cut != "kv":
            continue
        rows = [local_rows(module, tensor, interval_of(cuts, part)) for part in range(degree)]
        atoms = set(refine(set(rows)))
        for part, own in enumerate(rows):
            if own not in atoms:
                copied[part] += own.size * max(tensor.cols, 1)
    return max(copied)


@lru_cache(maxsize=4096)
def cut_elements(module: Module, degree: int, *, matrices: bool = False) -> int:
    """Fewest elements that a rank holds of tensors (or matrices alone) that the block cuts."""
    return min(
        sum(
            local_rows(module, tensor, units).size * max(tensor.cols, 1)
            for tensor in tensors_of(module)
            if tensor.cut != "whole" and (tensor.cols or not matrices)
        )
        for units in distinct_shares(module, degree)
    )


@lru_cache(maxsize=4096)
def whole_elements(module: Module) -> int:
    """Elements of matrices that every rank holds whole, whatever the block."""
    return sum(t.num_elements for t in tensors_of(module) if t.cut == "whole" and t.cols and t.decay)
