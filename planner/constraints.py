"""Users' constraints: what must hold of a plan, whatever it costs.  Both engines read the rules made here.

    pin         layer.3.mlp.tp=4               these modules have this degree (or recompute mode)
    forbid      layer.*.mlp.tp=8               these modules do not
    equal       layer.*.attention,layer.*.mlp  all modules that match have one degree
    max degrees 2                              at most so many distinct degrees in the plan
    stages      0-15,16-31                     the layers of each stage; embedding first, head last

Patterns are shell-like over module names.  A pin outranks the freedom of a ladder's rung: "uniform" then means that
all other modules are alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import combinations, product
from typing import get_args

from specs.errors import BadInputError, NoPlanFitsError
from specs.model import UNIT_NAMES, ModelSpec, Module, num_units
from specs.plan import Recompute

# What is kept for backward: gathered inputs too, or all but what may be recomputed.  The embedding has nothing to keep;
# the head's core is its output.
MODES: dict[str, tuple[Recompute, ...]] = {
    "embedding": ("none",),
    "attention": ("keep", "none", "selective", "full"),
    "latent_attention": ("none", "selective", "full"),
    "mamba2": ("keep", "none", "selective", "full"),
    "mlp": ("keep", "none", "selective", "full"),
    "moe": ("none", "selective", "full"),
    "head": ("none", "full"),
}
# Combinations of degrees of equal groups that are searched one by one.
MAX_FAMILIES = 4096


@dataclass(frozen=True)
class Rule:
    """What the constraints say of one module.  `group` numbers its equal group (-1: in none)."""

    degree: int | None = None
    recompute: Recompute | None = None
    no_degrees: frozenset[int] = frozenset()
    no_recompute: frozenset[str] = frozenset()
    group: int = -1


@dataclass(frozen=True)
class Family:
    """One way to meet what ties modules together: degrees that may be used (None: all), the degree of each group."""

    degrees: tuple[int, ...] | None = None
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rules:
    """Constraints resolved for a model.  `boundaries`: module indices where the stages begin, plus the length."""

    by_module: tuple[Rule, ...]
    num_groups: int = 0
    max_degrees: int | None = None
    boundaries: tuple[int, ...] | None = None

    @property
    def pinned(self) -> frozenset[int]:
        """Degrees that some module must have."""
        return frozenset(rule.degree for rule in self.by_module if rule.degree is not None)

    def families(self, degrees: Sequence[int]) -> Iterator[Family]:
        """Every way to meet `equal` and `max degrees` with these degrees; together they are all plans that do."""
        pinned = self.pinned
        if self.max_degrees is None or self.max_degrees >= len(pinned.union(degrees)):
            subsets: list[tuple[int, ...] | None] = [None]
        else:
            others = [degree for degree in degrees if degree not in pinned]
            free = self.max_degrees - len(pinned)
            chosen = combinations(others, min(free, len(others))) if free >= 0 else iter(())
            subsets = [tuple(sorted({*pinned, *more})) for more in chosen]
        for subset in subsets:
            for groups in product(degrees if subset is None else subset, repeat=self.num_groups):
                yield Family(subset, groups)

    def allows_uniform(self, degree: int) -> bool:
        """Whether all unpinned modules may have this degree."""
        return self.max_degrees is None or len(self.pinned | {degree}) <= self.max_degrees


@dataclass(frozen=True)
class Constraints:
    """As the user wrote them."""

    pins: tuple[str, ...] = ()
    forbids: tuple[str, ...] = ()
    equals: tuple[str, ...] = ()
    max_degrees: int | None = None
    stages: str | None = None

    def texts(self) -> tuple[str, ...]:
        """Each as its option, e.g. `--pin layer.3.mlp.tp=4`."""
        found = [f"--pin {text}" for text in self.pins]
        found += [f"--forbid {text}" for text in self.forbids]
        found += [f"--equal {text}" for text in self.equals]
        if self.max_degrees is not None:
            found.append(f"--max-degrees {self.max_degrees}")
        if self.stages is not None:
            found.append(f"--stages {self.stages}")
        return tuple(found)

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> Constraints:
        """What `texts` wrote."""
        values: dict[str, list[str]] = {}
        for text in texts:
            option, _, value = text.partition(" ")
            values.setdefault(option, []).append(value)
        most, stages = values.get("--max-degrees"), values.get("--stages")
        return cls(
            pins=tuple(values.get("--pin", ())),
            forbids=tuple(values.get("--forbid", ())),
            equals=tuple(values.get("--equal", ())),
            max_degrees=int(most[0]) if most else None,
            stages=stages[0] if stages else None,
        )

    def resolve(self, model: ModelSpec) -> Rules:
        """The rules for each module of a model.

        Raises `BadInputError` for what cannot be read or names no module, `NoPlanFitsError` for constraints that
        contradict each other or the model.
        """
        chain = model.modules()
        rules = [Rule() for _ in chain]
        for text in self.pins:
            for index in _matching(model, f"--pin {text}", text):
                rules[index] = _pin(rules[index], *chain[index], text)
        for text in self.forbids:
            for index in _matching(model, f"--forbid {text}", text):
                rules[index] = _forbid(rules[index], *chain[index], text)
        groups = _groups(model, self.equals)
        for number, (text, members) in enumerate(groups):
            pinned = {rules[index].degree for index in members} - {None}
            if len(pinned) > 1:
                raise NoPlanFitsError(
                    f"--equal {text} contradicts the pins: its modules are pinned at the degrees "
                    f"{', '.join(map(str, sorted(d for d in pinned if d)))}. Leave out one of them."
                )
            for index in members:
                rules[index] = replace(rules[index], group=number)
                for degree in pinned:
                    rules[index] = _pin(rules[index], *chain[index], f"{text}.tp={degree}")
        found = Rules(tuple(rules), len(groups), self.max_degrees, _boundaries(model, self.stages))
        if self.max_degrees is not None and len(found.pinned) > self.max_degrees:
            raise NoPlanFitsError(
                f"--max-degrees {self.max_degrees} contradicts the pins, which name {len(found.pinned)} degrees "
                f"({', '.join(map(str, sorted(found.pinned)))}). Use at least {len(found.pinned)}."
            )
        return found


def _parts(text: str, option: str) -> tuple[str, str, str]:
    """Pattern, key and value of `layer.3.mlp.tp=4`."""
    form = re.fullmatch(r"\s*(.+)\.(tp|recompute)\s*=\s*(\w+)\s*", text)
    if form is None:
        raise BadInputError(f"{option} cannot be read. Write it as layer.3.mlp.tp=4 or layer.*.mlp.recompute=full.")
    pattern, key, value = form.groups()
    if key == "tp" and (not value.isdigit() or int(value) < 1):
        raise BadInputError(f"{option}: a degree is a whole number from 1 on, not {value!r}.")
    if key == "recompute" and value not in get_args(Recompute):
        raise BadInputError(f"{option}: recompute is one of {', '.join(get_args(Recompute))}, not {value!r}.")
    return pattern, key, value


def _matching(model: ModelSpec, option: str, text: str) -> list[int]:
    """Modules that a pin or forbid is about: those that match and, for recompute, have that mode."""
    pattern, key, value = _parts(text, option)
    found = _named(model, option, pattern)
    if key == "tp":
        return found
    chain = model.modules()
    kinds = {kind for kind, modes in MODES.items() if value in modes}
    usable = [index for index in found if chain[index].module.kind in kinds]
    if not usable:
        raise BadInputError(f"{option}: {chain[found[0]].name} has no recompute mode {value!r}.")
    return usable


def _named(model: ModelSpec, option: str, pattern: str) -> list[int]:
    chain = model.modules()
    found = [index for index, (name, _) in enumerate(chain) if fnmatchcase(name, pattern)]
    if not found:
        names = [name for name, _ in chain]
        raise BadInputError(
            f"{option}: no module of {model.name} is named {pattern!r}. It has {', '.join(names[:4])} ... {names[-1]}."
        )
    return found


def _pin(rule: Rule, name: str, module: Module, text: str) -> Rule:
    _, key, value = _parts(text, f"--pin {text}")
    if key == "tp":
        degree = int(value)
        if rule.degree not in (None, degree):
            raise NoPlanFitsError(f"--pin {text} contradicts another pin, which gives {name} degree {rule.degree}.")
        if degree > num_units(module):
            raise NoPlanFitsError(
                f"--pin {text} leaves ranks of {name} empty: it has {num_units(module)} {UNIT_NAMES[module.kind]}. "
                f"Use a degree of at most {num_units(module)}."
            )
        return replace(rule, degree=degree)
    mode = next(mode for mode in get_args(Recompute) if mode == value)
    if rule.recompute not in (None, mode):
        raise NoPlanFitsError(f"--pin {text} contradicts another pin: {name} with recompute={rule.recompute}.")
    return replace(rule, recompute=mode)


def _forbid(rule: Rule, name: str, module: Module, text: str) -> Rule:
    _, key, value = _parts(text, f"--forbid {text}")
    if key == "tp":
        if rule.degree == int(value):
            raise NoPlanFitsError(f"--forbid {text} contradicts a pin, which gives {name} degree {value}.")
        return replace(rule, no_degrees=rule.no_degrees | {int(value)})
    modes = rule.no_recompute | {value}
    if rule.recompute in modes:
        raise NoPlanFitsError(f"--forbid {text} contradicts a pin: {name} with recompute={value}.")
    if modes.issuperset(MODES[module.kind]):
        raise NoPlanFitsError(f"--forbid {text} leaves {name} no way to run. Its modes: {', '.join(sorted(modes))}.")
    return replace(rule, no_recompute=modes)


def _groups(model: ModelSpec, equals: Sequence[str]) -> list[tuple[str, set[int]]]:
    """Equal groups with the text that made them; those that share a module are one."""
    found: list[tuple[str, set[int]]] = []
    for text in equals:
        members = {index for pattern in text.split(",") for index in _named(model, f"--equal {text}", pattern.strip())}
        for other in [item for item in found if item[1] & members]:
            members |= other[1]
            found.remove(other)
        found.append((text, members))
    return found


def _boundaries(model: ModelSpec, stages: str | None) -> tuple[int, ...] | None:
    """Module indices where the stages begin, plus the length."""
    if stages is None:
        return None
    option = f"--stages {stages}"
    ranges: list[tuple[int, int]] = []
    for part in stages.split(","):
        form = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if form is None:
            raise BadInputError(f"{option} cannot be read. Write the layers of each stage, as 0-15,16-31.")
        ranges.append((int(form[1]), int(form[2] or form[1])))
    num_layers = sum(layer.repeat for layer in model.layers)
    expected = 0
    for first, last in ranges:
        if first != expected or last < first:
            raise BadInputError(
                f"{option}: a stage must begin at layer {expected}, where the one before ends; {first}-{last} does not."
            )
        expected = last + 1
    if expected != num_layers:
        raise BadInputError(f"{option} ends at layer {expected - 1}; {model.name} has the layers 0-{num_layers - 1}.")
    chain = model.modules()
    layers = [int(name.split(".")[1]) if name.startswith("layer.") else -1 for name, _ in chain]
    starts = [0]
    for first, last in ranges[1:]:
        inside = [index for index, layer in enumerate(layers) if first <= layer <= last]
        if not inside and last != num_layers - 1:
            raise BadInputError(f"{option}: the layers {first}-{last} have no modules, so the stage would be empty.")
        starts.append(inside[0] if inside else len(chain) - 1)
    return (*starts, len(chain))
