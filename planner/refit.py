"""A stage composed anew for the ranks that are left: blocks of any sizes per module, recompute where memory asks.

The attention modules of a stage agree on token cuts that keep sequences whole; every other module takes any
composition.  For each such cut the fastest options that fit are chosen (`planner.rounding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.activations import ACTIVATION_BYTES, activation_bytes
from cost_models.buckets import BUCKET_ELEMENTS
from cost_models.interface import CostModel
from cost_models.memory import GRADIENT_BYTES, static_bytes
from cost_models.reduced import Blocks, candidates
from cost_models.share import Share
from cost_models.topology import Topology
from cost_models.working import working_bytes
from planner.constraints import MODES
from planner.rounding import best_rounding
from specs.cluster import LinkLevel
from specs.errors import BadInputError
from specs.layout import Cuts, balanced_cuts, block_starts, sequence_token_cuts
from specs.model import SEQUENCE_KINDS, Module, num_units
from specs.plan import ModulePlacement, Plan, Recompute, Stage
from specs.tensors import num_parameters

Option = tuple[Blocks, Recompute]
# Seconds forward and backward, seconds once a step, bytes held, bytes per micro-batch in flight, bytes at work.
Row = tuple[float, float, float, float, float, float]
# Stages with more ranks than this are not composed in every way.
MANY_RANKS = 12
_WEIGHT: dict[Recompute, int] = {"keep": -1, "none": 0, "selective": 1, "full": 2}


class Task(NamedTuple):
    """A stage to compose: `modules` (their places in the chain) on ranks that lie on `nodes`.

    `in_flight` micro-batches are kept at the peak, of `num_micro_batches` in a step.
    `others`: replicas beside this one.  `slack` bytes are left free, where a price found more than the tables say.
    `keep_blocks`: blocks stay as the plan has them, only recompute is chosen.
    """

    modules: tuple[int, ...]
    nodes: tuple[int, ...]
    micro_batch: int
    in_flight: int
    num_micro_batches: int
    others: int
    slack: int = 0
    keep_blocks: bool = False


@dataclass(frozen=True, slots=True)
class Fitted:
    """A stage with its seconds: per micro-batch with communication, and once a step (gradient sync, optimizer).

    `fits` by the fullest rank of every module, which is never below the price and rarely above it.
    """

    stage: Stage
    seconds: float
    once: float
    fits: bool


class Menu(NamedTuple):
    """Options of a kind of module, and their rows: [entry, option]."""

    options: list[Option]
    table: npt.NDArray[np.float64]


class _Choice(NamedTuple):
    """Options of every kind's modules one by one; `free`: memory made none of them slower."""

    seconds: float
    options: list[list[Option]]
    free: bool


class Refit:
    """Composes stages for one plan; equal questions are answered once."""

    def __init__(self, plan: Plan, costs: CostModel, capacity: int) -> None:
        """`capacity`: bytes of a rank that tensors may fill."""
        self._capacity = capacity
        self._plan = plan
        self._costs = costs
        named = plan.model.modules()
        placed = {p.module: p for stage in plan.pipelines[0].stages for p in stage.modules}
        # Equal modules in equal blocks are one kind: what a lost copy means depends on where the others are.
        numbers: dict[tuple[Module, Blocks], int] = {}
        self._names = [name for name, _ in named]
        self._kinds = [numbers.setdefault((module, placed[name].blocks), len(numbers)) for name, module in named]
        self._modules = [module for module, _ in numbers]
        self._blocks = [blocks for _, blocks in numbers]
        self._zero = [placed[name].zero for name in self._names]
        self._modes: list[set[Recompute]] = [set() for _ in self._modules]
        for name, kind in zip(self._names, self._kinds, strict=True):
            self._modes[kind].add(placed[name].recompute)
        self._rows: dict[tuple[object, ...], Row | None] = {}
        self._shares: dict[tuple[object, ...], tuple[float, float, float, float] | None] = {}
        self._held: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._menus: dict[tuple[object, ...], Menu] = {}
        self._composed: dict[tuple[object, ...], tuple[float, Cuts, list[list[Option]]] | None] = {}
        self._rates: dict[int, float] = {}
        self._spread = Topology(plan).span([replica.ranks[0] for replica in plan.replicas])

    def compose(self, task: Task) -> Fitted | None:
        """The fastest stage that fits; None when nothing fits, keeps sequences whole or was measured."""
        nodes = tuple(node - task.nodes[0] for node in task.nodes)
        key = (tuple(self._kinds_of(task)), nodes, task[2:], self._edges(task))
        if key not in self._composed:
            self._composed[key] = self._compose(task)
        found = self._composed[key]
        return None if found is None else self.as_it_is(self._stage(task, *found[1:]), task)

    def as_it_is(self, stage: Stage, task: Task) -> Fitted:
        """A stage that is there already.  Raises `BadInputError` for what was not measured."""
        cuts = stage.chunk_cuts(task.micro_batch * self._plan.training.seq_len)
        seconds, once, held, working = self._host(task), 0.0, 0.0, 0.0
        for kind, placement in zip(self._kinds_of(task), stage.modules, strict=True):
            row = self._row(kind, placement.blocks, placement.recompute, cuts, task)
            if row is None:
                raise BadInputError(f"{placement.module}: blocks {list(placement.blocks)} were not measured.")
            seconds += row[0] + row[1]
            once += row[2]
            held += row[3] + task.in_flight * row[4]
            working = max(working, row[5])
        return Fitted(stage, seconds, once, held + working <= self._room(task))

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Seconds of every module of the chain on one rank alone, for cutting stages: only their proportions count."""
        length = self._plan.training.seq_len
        by_kind = [
            next(
                (
                    row[0] + row[1]
                    for degree in (1, 2, 4, 8, 16, 32)
                    if degree <= num_units(module) and (row := self._block(kind, 1, "none", degree, length, "scale_up"))
                ),
                0.0,
            )
            for kind, module in enumerate(self._modules)
        ]
        return tuple(by_kind[kind] for kind in self._kinds)

    def _compose(self, task: Task) -> tuple[float, Cuts, list[list[Option]]] | None:
        """Seconds, token cuts and for every kind the options of its modules; more recompute only if memory asks."""
        every = self._kinds_of(task)
        kinds = sorted(set(every))
        counts = [every.count(kind) for kind in kinds]
        for every_mode in (True,) if task.keep_blocks else (False, True):
            best: tuple[float, Cuts, list[list[Option]]] | None = None
            free = True
            tried: list[tuple[float, int, Cuts, list[Menu]]] = []
            for number, (cuts, attention) in enumerate(self._token_cuts(task, kinds)):
                menus = [self._menu(kind, cuts, attention, task, every_mode) for kind in kinds]
                if all(menu.options for menu in menus):
                    tried.append((_fastest(menus, counts, task), number, cuts, menus))
            for fastest, _, cuts, menus in sorted(tried, key=lambda one: one[:2]):
                if best is not None and fastest >= best[0]:
                    break  # nor are any of the others faster, whatever the memory
                choice = self._choose(menus, counts, task)
                free = free and choice is not None and choice.free
                if choice is not None and (best is None or choice.seconds < best[0]):
                    best = choice.seconds, cuts, [sorted(options, key=_largest_last) for options in choice.options]
            if best is not None and free:
                break
        return best

    def _token_cuts(self, task: Task, kinds: Sequence[int]) -> Iterator[tuple[Cuts, bool]]:
        """Distinct token cuts, and whether attention limits what is allowed under them."""
        size, length = len(task.nodes), self._plan.training.seq_len
        if not any(self._modules[kind].kind in SEQUENCE_KINDS for kind in kinds):
            yield balanced_cuts(task.micro_batch * length, size), False
            return
        seen: set[Cuts] = set()
        compositions = {self._blocks[kind] for kind in kinds} if task.keep_blocks else compositions_of(size)
        for blocks in compositions:
            if sum(blocks) != size:
                continue
            cuts = sequence_token_cuts(blocks, task.micro_batch, length)
            if cuts is not None and cuts not in seen and all(a < b for a, b in pairwise(cuts)):
                seen.add(cuts)
                yield cuts, True

    def _menu(self, kind: int, cuts: Cuts, attention: bool, task: Task, every_mode: bool) -> Menu:
        nodes = tuple(node - task.nodes[0] for node in task.nodes)
        key = (kind, cuts, attention, nodes, task.others, task.keep_blocks, every_mode)
        if key not in self._menus:
            rows = list(self._options(kind, cuts, attention, task, every_mode))
            table = np.array([row for _, row in rows]).T
            self._menus[key] = Menu([option for option, _ in rows], table)
        return self._menus[key]

    def _options(
        self, kind: int, cuts: Cuts, attention: bool, task: Task, every_mode: bool
    ) -> Iterator[tuple[Option, Row]]:
        module, length = self._modules[kind], self._plan.training.seq_len
        own = self._modes[kind]  # where memory asks for another mode, it never asks for more to keep
        modes = [mode for mode in MODES[module.kind] if mode in own or (every_mode and mode != "keep")]
        for blocks in (self._blocks[kind],) if task.keep_blocks else compositions_of(len(task.nodes)):
            if sum(blocks) != len(task.nodes) or max(blocks) > num_units(module):
                continue
            if (
                attention
                and module.kind in SEQUENCE_KINDS
                and any(cuts[rank] % length for rank in block_starts(blocks))
            ):
                continue
            for mode in modes:
                row = self._row(kind, blocks, mode, cuts, task)
                if row is not None:
                    yield (blocks, mode), row

    def _choose(self, menus: Sequence[Menu], counts: Sequence[int], task: Task) -> _Choice | None:
        """At most one module from the fastest that fits."""
        tables = [menu.table for menu in menus]
        fastest = _fastest(menus, counts, task) * (1.0 + 1e-9)
        found = best_rounding(
            counts,
            [_seconds(menu, task) for menu in menus],
            [table[3] + task.in_flight * table[4] for table in tables],
            [table[5] for table in tables],
            self._room(task),
            enough=fastest,
        )
        if found is None:
            return None
        options = [
            [menu.options[option] for option, number in taken for _ in range(number)]
            for menu, taken in zip(menus, found.selection, strict=True)
        ]
        return _Choice(found.seconds, options, found.seconds <= fastest)

    def _stage(self, task: Task, cuts: Cuts, options: list[list[Option]]) -> Stage:
        kinds = self._kinds_of(task)
        waiting = dict(zip(sorted(set(kinds)), ([*of_kind] for of_kind in options), strict=True))
        placements = []
        for index, kind in zip(task.modules, kinds, strict=True):
            blocks, mode = waiting[kind].pop()
            placements.append(
                ModulePlacement(module=self._names[index], blocks=blocks, recompute=mode, zero=self._zero[index])
            )
        even = balanced_cuts(cuts[-1], len(task.nodes))
        return Stage(num_ranks=len(task.nodes), modules=tuple(placements), token_cuts=None if cuts == even else cuts)

    def _room(self, task: Task) -> float:
        """Bytes for modules: the capacity without the chunks on their way at both edges of the stage."""
        chunk = ACTIVATION_BYTES[self._plan.training.precision] * self._plan.model.hidden
        tokens = -(-task.micro_batch * self._plan.training.seq_len // len(task.nodes))
        return float(self._capacity - task.slack - 2 * sum(self._edges(task)) * chunk * tokens)

    def _kinds_of(self, task: Task) -> list[int]:
        return [self._kinds[index] for index in task.modules]

    def _edges(self, task: Task) -> tuple[bool, bool]:
        """Whether a stage comes before and after."""
        return task.modules[0] > 0, task.modules[-1] < len(self._kinds) - 1

    def _host(self, task: Task) -> float:
        overhead = self._costs.overhead
        reads = not all(self._edges(task))
        return 2.0 * overhead.other_seconds_per_action + reads * overhead.data_seconds_per_sequence * task.micro_batch

    def _row(self, kind: int, blocks: Blocks, mode: Recompute, cuts: Cuts, task: Task) -> Row | None:
        """The slowest and the fullest block of a composition; None where the costs were not measured."""
        copies = len(blocks) + task.others * len(self._blocks[kind])
        parts = _parts(blocks, cuts, task.nodes)
        key = (kind, copies, mode, parts)
        if key not in self._rows:
            rows = [self._block(kind, copies, mode, *part) for part in parts]
            known = [row for row in rows if row is not None]
            whole = len(known) == len(rows)
            self._rows[key] = tuple(max(values) for values in zip(*known, strict=True)) if whole else None
        return self._rows[key]

    def _block(
        self, kind: int, copies: int, mode: Recompute, degree: int, block_tokens: int, level: LinkLevel
    ) -> Row | None:
        key = (kind, mode, degree, block_tokens, level)
        if key not in self._shares:
            self._shares[key] = self._share(*key)
        share, held = self._shares[key], (kind, degree, copies)
        if held not in self._held:
            module, precision = self._modules[kind], self._plan.training.precision
            zero = self._zero[self._kinds.index(kind)]
            found = static_bytes(module, degree=degree, num_copies=copies, precision=precision, zero=zero)
            once = found.gradients / GRADIENT_BYTES * self._once_per_element(copies)
            self._held[held] = once, float(found.total)
        return None if share is None else (*share[:2], *self._held[held], *share[2:])

    def _share(
        self, kind: int, mode: Recompute, degree: int, block_tokens: int, level: LinkLevel
    ) -> tuple[float, float, float, float] | None:
        """What a row has whatever the number of copies."""
        module, training = self._modules[kind], self._plan.training
        share = Share.of(module, degree, block_tokens, training.seq_len)
        try:
            cost = self._costs.module(
                module,
                degree=degree,
                block_tokens=block_tokens,
                seq_len=training.seq_len,
                recompute=mode,
                level=level,
            )
        except BadInputError:
            return None
        return (
            cost.forward_seconds + cost.forward_communication_seconds,
            cost.backward_seconds + cost.backward_communication_seconds,
            float(activation_bytes(module, share, training.precision, mode)),
            float(working_bytes(module, share, training.precision, mode)),
        )

    def _once_per_element(self, copies: int) -> float:
        """Seconds of gradient sync and optimizer for an element that so many ranks hold."""
        if copies not in self._rates:
            elements = min(num_parameters(self._plan.model.modules()), BUCKET_ELEMENTS)
            sync = self._costs.collective(
                "all_reduce",
                num_ranks=copies,
                payload_bytes=GRADIENT_BYTES * elements,
                level=self._spread.level,
                ranks_per_domain=1,
            )
            self._rates[copies] = (sync + self._costs.optimizer(elements)) / elements
        return self._rates[copies]


@lru_cache(maxsize=65536)
def _parts(blocks: Blocks, cuts: Cuts, nodes: tuple[int, ...]) -> tuple[tuple[int, int, LinkLevel], ...]:
    """What tells a composition's blocks apart: ranks, tokens, and whether they share a node."""
    found: dict[tuple[int, int, LinkLevel], None] = {}
    for start, stop in pairwise(block_starts(blocks)):
        inside = len(set(nodes[start:stop])) == 1
        found[stop - start, cuts[stop] - cuts[start], "scale_up" if inside else "scale_out"] = None
    return tuple(found)


def _seconds(menu: Menu, task: Task) -> npt.NDArray[np.float64]:
    """Of each option: per micro-batch, with its part of what comes once a step."""
    seconds: npt.NDArray[np.float64] = menu.table[0] + menu.table[1] + menu.table[2] / task.num_micro_batches
    return seconds


def _fastest(menus: Sequence[Menu], counts: Sequence[int], task: Task) -> float:
    """Seconds of a stage, memory aside."""
    return sum(count * float(_seconds(menu, task).min()) for count, menu in zip(counts, menus, strict=True))


def _largest_last(option: Option) -> tuple[int, int, Blocks]:
    """Order in which `pop` takes larger degrees and less recompute first."""
    return max(option[0]), -_WEIGHT[option[1]], option[0]


def compositions_of(num_ranks: int) -> tuple[Blocks, ...]:
    """Compositions that are tried: of many ranks only those into few blocks, or into ones."""
    found = candidates(num_ranks)
    if num_ranks <= MANY_RANKS:
        return found
    return tuple(blocks for blocks in found if len(blocks) in (1, 2, 3, 4, 6, 8, 12, 16, num_ranks))
