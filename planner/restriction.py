"""What a rung of the ladder, or a way to meet the user's constraints, leaves of a module's options."""

from __future__ import annotations

from dataclasses import dataclass

from planner.blocks import stage_degrees
from planner.constraints import MODES, Rule
from specs.model import Head, Module
from specs.plan import Recompute


@dataclass(frozen=True)
class Restriction:
    """Limits of a menu: these degrees only, this recompute mode only (of modules that have it; never the head), these
    degrees of the user's equal groups.  What the user pinned outranks them.

    `tied`: the degree of an embedding and a head that share their weight in one stage.
    """

    degrees: tuple[int, ...] | None = None
    recompute: Recompute | None = None
    groups: tuple[int, ...] = ()
    tied: int | None = None

    def degrees_of(self, rule: Rule, num_ranks: int) -> list[int]:
        """Degrees of a module under a rule."""
        if rule.degree is not None:
            return [rule.degree]
        if rule.group >= 0 and self.groups:
            return [] if self.groups[rule.group] in rule.no_degrees else [self.groups[rule.group]]
        usual = stage_degrees(num_ranks) if self.degrees is None else self.degrees
        return [degree for degree in usual if degree not in rule.no_degrees]

    def modes_of(self, module: Module, rule: Rule) -> list[Recompute]:
        """Recompute modes of a module under a rule."""
        if rule.recompute is not None:
            return [rule.recompute]
        modes = MODES[module.kind]
        if self.recompute is not None:
            available = self.recompute in modes and not isinstance(module, Head)
            modes = (self.recompute,) if available else ("none",)
        return [mode for mode in modes if mode not in rule.no_recompute]
