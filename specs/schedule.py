"""Pipeline schedules as lists of actions per stage, printable and parseable: `F0 F1 B0 F2 B1 B2`.

The executor runs these lists and the cost model simulates the same ones.  A stage may hold several virtual stages,
runs of the chain that follow each other once around all stages: virtual stage v of stage s is number v P + s of the
chain, and `1F3` is micro-batch 3 on virtual stage 1 (`F3`: on virtual stage 0).
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from specs.layout import balanced_cuts

Schedule = Literal["1f1b", "gpipe", "interleaved", "zb-h1", "given"]
# F forward; B backward, or in two parts: I gradient of the input, later W gradients of the weights.
Kind = Literal["F", "B", "I", "W"]

_ACTION = re.compile(r"(\d{0,4})([FBIW])(\d{1,9})")


class Action(NamedTuple):
    """What a stage does with one micro-batch on one of its virtual stages."""

    kind: Kind
    micro_batch: int
    virtual: int = 0

    def __str__(self) -> str:
        return f"{self.virtual or ''}{self.kind}{self.micro_batch}"


Actions = tuple[Action, ...]


def stage_actions(
    schedule: Schedule, *, stage: int, num_stages: int, num_micro_batches: int, num_virtual: int = 1
) -> Actions:
    """What stage s of P does in one step, in order.

    gpipe: all forwards, then all backwards.
    1f1b (PipeDream-flush, arXiv 2006.09503): P - 1 - s forwards to warm up, then one forward and one backward in
      turn, so that at most P - s micro-batches are in flight.
    interleaved (arXiv 2104.04473): 1f1b over V virtual stages, a turn of g micro-batches on each before the next,
      with 2 (P - 1 - s) + (V - 1) g forwards to warm up.  g is P where that divides their number, else the most
      even turns of at least P (or of all, when there are fewer).
    zb-h1 (arXiv 2401.10241): 1f1b whose weight gradients come s backwards later, where a stage would be idle;
      what waits for its backward or for its weight gradients is P micro-batches on every stage.
    """
    forwards, backwards = _turns(num_stages, num_micro_batches, num_virtual)
    match schedule:
        case "gpipe":
            return (*forwards, *backwards)
        case "1f1b" | "zb-h1":
            ahead = num_stages - 1 - stage
        case "interleaved":
            longest = -(-num_micro_batches // max(1, num_micro_batches // num_stages))
            ahead = 2 * (num_stages - 1 - stage) + (num_virtual - 1) * longest
        case "given":
            raise ValueError("a given schedule brings its own actions")
    actions = list(forwards[:ahead])
    for number, backward in enumerate(backwards):
        actions += forwards[ahead + number : ahead + number + 1]
        if schedule != "zb-h1":
            actions.append(backward)
            continue
        actions.append(backward._replace(kind="I"))
        if number >= stage:
            actions.append(backwards[number - stage]._replace(kind="W"))
    if schedule == "zb-h1":
        actions += [backward._replace(kind="W") for backward in backwards[max(0, num_micro_batches - stage) :]]
    return tuple(actions)


@lru_cache(maxsize=256)
def _turns(num_stages: int, num_micro_batches: int, num_virtual: int) -> tuple[Actions, Actions]:
    """Order of forwards and of backwards: a turn of micro-batches passes all virtual stages before the next one."""
    starts = balanced_cuts(num_micro_batches, max(1, num_micro_batches // num_stages))
    turns = [range(start, stop) for start, stop in pairwise(starts)]
    forwards = [Action("F", i, v) for turn in turns for v in range(num_virtual) for i in turn]
    backwards = [Action("B", i, v) for turn in turns for v in reversed(range(num_virtual)) for i in turn]
    return tuple(forwards), tuple(backwards)


@lru_cache(maxsize=1024)
def pipeline_actions(
    schedule: Schedule, *, num_stages: int, num_micro_batches: int, num_virtual: int = 1
) -> tuple[Actions, ...]:
    """`stage_actions` of every stage."""
    return tuple(
        stage_actions(
            schedule,
            stage=stage,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            num_virtual=num_virtual,
        )
        for stage in range(num_stages)
    )


class Repeats(NamedTuple):
    """A step of many micro-batches: one of a `few`, with `times` more turns of `turn` micro-batches in its middle."""

    few: int
    turn: int
    times: int


def repeats(schedule: Schedule, *, num_stages: int, num_micro_batches: int) -> Repeats:
    """What repeats in a step.

    Once a pipeline is full, every turn of micro-batches does in `run_order` what the one before did, until it drains.
    `few` are the fewest in which that shows, up to a turn; stages never hold more than with these.
    """
    turn, few = 1, num_stages + 1
    if schedule == "zb-h1":
        few = 3 * num_stages
    elif schedule == "interleaved":
        turn, few = num_stages, 4 * num_stages
    if schedule in ("gpipe", "given") or num_micro_batches <= few or num_micro_batches % turn:
        return Repeats(num_micro_batches, turn, 0)
    return Repeats(few, turn, (num_micro_batches - few) // turn)


class Held(NamedTuple):
    """Micro-batches that a stage holds at one moment, by virtual stage, that of the action included.

    `kept`: their activations wait for B or I; `deferred`: what I left waits for W.  `working`: the virtual stage whose
    action it is.
    """

    kept: tuple[int, ...]
    deferred: tuple[int, ...]
    working: int


@lru_cache(maxsize=1024)
def most_held(actions: Actions) -> tuple[Held, ...]:
    """The moments at which a stage holds most: every other holds no more, in any respect, than one of these at which
    the same virtual stage works.
    """
    num_virtual = 1 + max(action.virtual for action in actions)
    kept, deferred = [0] * num_virtual, [0] * num_virtual
    moments: list[Held] = []
    seen: set[Held] = set()

    def note(virtual: int) -> None:
        nonlocal moments
        now = Held(tuple(kept), tuple(deferred), virtual)
        if now not in seen:
            seen.add(now)
            if not any(_within(now, other) for other in moments):
                moments = [other for other in moments if not _within(other, now)] + [now]

    for kind, _, virtual in actions:
        kept[virtual] += kind == "F"
        note(virtual)
        kept[virtual] -= kind in "BI"
        deferred[virtual] -= kind == "W"
        if kind == "I":
            deferred[virtual] += 1
            note(virtual)
    return tuple(moments)


def _within(one: Held, other: Held) -> bool:
    return one.working == other.working and all(
        a <= b for a, b in zip(one.kept + one.deferred, other.kept + other.deferred, strict=True)
    )


class Step(NamedTuple):
    """An action of a stage.  `source` is the index of the step whose result it needs, None for the first forwards."""

    stage: int
    action: Action
    source: int | None


def run_order(actions: tuple[Actions, ...]) -> tuple[Step, ...]:
    """All actions in an order in which they can run, the stages taking turns.

    Raises `ValueError` when the stages wait for each other.
    """
    num_virtual = 1 + max((action.virtual for own in actions for action in own), default=0)
    num_micro_batches = 1 + max((action.micro_batch for own in actions for action in own), default=0)
    last = len(actions) * num_virtual - 1

    # Results by number: 2 (place in the chain x micro-batches + micro-batch) the output of F, then its input gradient.
    steps: list[list[tuple[Action, int, int]]] = []  # of every stage: action, what it needs and makes, -1 for nothing
    for stage, own in enumerate(actions):
        of_stage = []
        for action in own:
            place = action.virtual * len(actions) + stage
            result = 2 * (place * num_micro_batches + action.micro_batch)
            if action.kind == "F":
                of_stage.append((action, result - 2 * num_micro_batches if place else -1, result))
            elif action.kind == "W":
                of_stage.append((action, result + 1, -1))
            else:
                source = result if place == last else result + 2 * num_micro_batches + 1
                of_stage.append((action, source, result + 1))
        steps.append(of_stage)
    position = [0] * len(actions)
    made = [-1] * (2 * (last + 1) * num_micro_batches)  # by number, the step that made it
    order: list[Step] = []
    stands: list[int] = [-1]
    while stands:
        before, stands = len(order), []
        for stage, of_stage in enumerate(steps):
            if position[stage] == len(of_stage):
                continue
            stands.append(stage)
            action, needs, makes = of_stage[position[stage]]
            if needs < 0 or made[needs] >= 0:
                if makes >= 0:
                    made[makes] = len(order)
                order.append(Step(stage, action, made[needs] if needs >= 0 else None))
                position[stage] += 1
        if stands and len(order) == before:
            where = " and ".join(f"stage {stage} at {actions[stage][position[stage]]}" for stage in stands)
            raise ValueError(f"the stages wait for each other: {where}")
    return tuple(order)


class Traffic(NamedTuple):
    """What a stage sends to the next one (F) or the one before (B), around the ring, in its own order.

    `order`: (virtual stage there, micro-batch).  `most_under_way`: with so many sent and not yet asked for, a sender
    that waits for the oldest can never block the step.
    """

    order: tuple[tuple[int, int], ...]
    most_under_way: int


def traffic(actions: tuple[Actions, ...]) -> dict[tuple[Kind, int], Traffic]:
    """By (F or B, sending stage); directions without messages are left out."""
    num_stages = len(actions)
    last = num_stages * (1 + max(action.virtual for own in actions for action in own)) - 1
    sent: defaultdict[tuple[Kind, int], dict[tuple[int, int], int]] = defaultdict(dict)
    asked: defaultdict[tuple[Kind, int], int] = defaultdict(int)
    most: defaultdict[tuple[Kind, int], int] = defaultdict(int)
    steps = run_order(actions)
    for stage, (kind, micro_batch, virtual), source in steps:
        if kind == "W":
            continue
        direction: Kind = "F" if kind == "F" else "B"
        if source is not None and steps[source].stage != stage:
            channel = (direction, steps[source].stage)
            asked[channel] = max(asked[channel], sent[channel][virtual, micro_batch] + 1)
        place = virtual * num_stages + stage
        following = place + 1 if kind == "F" else place - 1
        if 0 <= following <= last:
            channel = (direction, stage)
            sent[channel][following // num_stages, micro_batch] = len(sent[channel])
            most[channel] = max(most[channel], len(sent[channel]) - asked[channel])
    return {channel: Traffic(tuple(order), most[channel]) for channel, order in sent.items()}


def check_actions(actions: tuple[Actions, ...], *, num_micro_batches: int, num_virtual: int) -> None:
    """Raise `ValueError` unless every micro-batch goes forward and back once on every virtual stage, and it can run."""
    for stage, own in enumerate(actions):
        seen: set[Action] = set()
        for action in own:
            kind, micro_batch, virtual = action
            where = f"stage {stage}, action {action}"
            if micro_batch >= num_micro_batches:
                raise ValueError(f"{where}: there are {num_micro_batches} micro-batches, numbered from 0")
            if virtual >= num_virtual:
                raise ValueError(f"{where}: the stage has {num_virtual} virtual stages, numbered from 0")
            if action in seen:
                raise ValueError(f"{where} stands there twice")
            needed = action._replace(kind="I" if kind == "W" else "F")
            if kind != "F" and needed not in seen:
                raise ValueError(f"{where} comes before {needed}, whose result it needs")
            if kind in "BI" and action._replace(kind="I" if kind == "B" else "B") in seen:
                raise ValueError(f"{where}: this micro-batch has gone back already")
            seen.add(action)
        for virtual in range(num_virtual):
            for i in range(num_micro_batches):
                forward, split = Action("F", i, virtual), Action("I", i, virtual)
                if forward not in seen:
                    raise ValueError(f"stage {stage} lacks {forward}")
                if split in seen and split._replace(kind="W") not in seen:
                    raise ValueError(f"stage {stage} has {split} without {split._replace(kind='W')}")
                if split not in seen and split._replace(kind="B") not in seen:
                    raise ValueError(f"stage {stage} lacks {split._replace(kind='B')}")
    run_order(actions)


def format_actions(actions: Actions) -> str:
    """`F0 F1 B0 B1`."""
    return " ".join(map(str, actions))


def parse_actions(text: str) -> Actions:
    """Inverse of `format_actions`.  Raises `ValueError` for a word that is no action."""
    actions = []
    for word in text.split():
        match = _ACTION.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not an action such as F0, B12, I3, W3 or, on virtual stage 1, 1F0")
        virtual, kind, number = match.groups()
        actions.append(Action(kind, int(number), int(virtual or 0)))  # type: ignore[arg-type]
    return tuple(actions)
