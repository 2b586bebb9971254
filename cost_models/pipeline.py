"""How long a pipeline of uneven stages takes: exact event simulation, and a closed form for the search.

Seconds are given per virtual stage in chain order, P V of them; without virtual stages, per stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from specs.schedule import Action, Actions, Schedule, pipeline_actions, repeats, run_order

# Ends of a turn that moved by amounts this near to each other, of the time gone by, moved alike.
ROUNDING = 1e-14


@dataclass(frozen=True, slots=True)
class PipelineTiming:
    """One step of one replica, from the first forward on.

    `makespan_seconds` ends with the last action of any stage, `finish_seconds` with that of each stage;
    `idle_seconds` is what each stage waited until its own finish.
    """

    makespan_seconds: float
    finish_seconds: tuple[float, ...]
    idle_seconds: tuple[float, ...]


# An action as the simulation needs it: its stage, which seconds it takes, how many steps before it the one ran whose
# result it needs, and over which link that came (the last but one: over none; the last: nothing is needed).
_Step = tuple[int, int, int, int]


@dataclass(frozen=True)
class _Program:
    """Steps in an order in which they can run: `first`, then `again` any number of times, then `rest`.

    `reach`: of the steps before `again` or `rest`, the last ones whose ends what follows asks for.
    """

    num_stages: int
    num_places: int
    first: tuple[_Step, ...]
    again: tuple[_Step, ...] = ()
    rest: tuple[_Step, ...] = ()
    reach: int = 0

    @cached_property
    def once(self) -> Counter[tuple[int, int]]:
        """How often each stage takes which seconds in `first` and `rest`."""
        return Counter(step[:2] for step in self.first + self.rest)

    @cached_property
    def more(self) -> Counter[tuple[int, int]]:
        """The same of `again`."""
        return Counter(step[:2] for step in self.again)


def _program(actions: tuple[Actions, ...]) -> _Program:
    num_stages = len(actions)
    num_places = num_stages * (1 + max(action.virtual for own in actions for action in own))
    # Of every kind of action on every place: which seconds, and the link that its result comes over.
    of_kind = {
        (kind, place): ("FBIW".index(kind) * num_places + place, link)
        for kind in "FBIW"
        for place in range(num_places)
        for link in [place - 1 if kind == "F" else num_places - 1 if kind == "W" else place]
    }
    steps: list[_Step] = []
    for number, (stage, (kind, _, virtual), source) in enumerate(run_order(actions)):
        seconds, link = of_kind[kind, virtual * num_stages + stage]
        steps.append((stage, seconds, 1, num_places) if source is None else (stage, seconds, number - source, link))
    return _Program(num_stages, num_places, tuple(steps))


_program_of_given = lru_cache(maxsize=64)(_program)


def _program_of(schedule: Schedule, num_stages: int, num_micro_batches: int, num_virtual: int) -> tuple[_Program, int]:
    """A schedule's program, and how often `again` runs in it."""
    few, turn, times = repeats(schedule, num_stages=num_stages, num_micro_batches=num_micro_batches)
    if not times:
        return _program_of_all(schedule, num_stages, num_micro_batches, num_virtual), 0
    return _program_of_turns(schedule, num_stages, few, num_virtual, turn), times


@lru_cache(maxsize=256)
def _program_of_all(schedule: Schedule, num_stages: int, num_micro_batches: int, num_virtual: int) -> _Program:
    return _program(
        pipeline_actions(schedule, num_stages=num_stages, num_micro_batches=num_micro_batches, num_virtual=num_virtual)
    )


@lru_cache(maxsize=256)
def _program_of_turns(schedule: Schedule, num_stages: int, few: int, num_virtual: int, turn: int) -> _Program:
    """The program of a `few` micro-batches, divided after the first turn that is like the one that follows it."""
    program = _program_of_all(schedule, num_stages, few, num_virtual)
    steps, length = program.first, (3 if schedule == "zb-h1" else 2) * turn * num_stages * num_virtual
    stop = next(
        stop for stop in range(length, len(steps)) if steps[stop - length : stop] == steps[stop : stop + length]
    )
    again, rest = steps[stop - length : stop], steps[stop:]
    reach = max(back - number for part in (again, rest) for number, (_, _, back, _) in enumerate(part))
    return replace(program, first=steps[:stop], again=again, rest=rest, reach=max(reach, length))


def _seconds(forward: Sequence[float], backward: Sequence[float], weight: Sequence[float]) -> list[float]:
    """Seconds of F, B, I and W on every place, as a program's steps name them."""
    weight = weight or (0.0,) * len(forward)
    inputs = [b - w for b, w in zip(backward, weight, strict=True)]
    return [*forward, *backward, *inputs, *weight]


def _play(
    program: _Program, seconds: Sequence[float], transfer: Sequence[float], times: int = 0
) -> tuple[list[float], PipelineTiming]:
    """When each step ends (of those left out: none), `again` run so many `times`.

    A turn adds to each end what the longest waits add up to, so it maps ends to ends, none of which ever moves by more
    than the one that moved most before it.  Two turns that leave all ends that count later by the same distance behind,
    within rounding, so do all that follow, and the rest of them is one multiplication.
    """
    links = [*transfer, 0.0, -math.inf]
    assert len(seconds) == 4 * program.num_places
    assert len(links) == program.num_places + 1
    free_at, ends = [0.0] * program.num_stages, [0.0]  # the first step looks back on the beginning
    _run(program.first, seconds, links, free_at, ends)
    for left in reversed(range(times)):
        _run(program.again, seconds, links, free_at, ends)
        gained = _steady(ends, len(program.again), program.reach)
        if gained is not None:
            ends += [end + left * gained for end in ends[-program.reach :]]
            free_at = [end + left * gained for end in free_at]
            break
    _run(program.rest, seconds, links, free_at, ends)
    busy = [0.0] * program.num_stages
    for (stage, cost), number in program.once.items():
        busy[stage] += (number + times * program.more[stage, cost]) * seconds[cost]
    idle = tuple(max(0.0, finish - own) for finish, own in zip(free_at, busy, strict=True))
    return ends[1:], PipelineTiming(max(free_at), tuple(free_at), idle)


def _run(
    steps: Sequence[_Step],
    seconds: Sequence[float],
    links: Sequence[float],
    free_at: list[float],
    ends: list[float],
) -> None:
    for stage, cost, back, link in steps:
        start, arrived = free_at[stage], ends[-back] + links[link]
        if arrived > start:
            start = arrived
        free_at[stage] = end = start + seconds[cost]
        ends.append(end)


def _steady(ends: Sequence[float], length: int, reach: int) -> float | None:
    """By how much the last turn of `length` steps moved all of the last ends; None if not all alike."""
    gained, rounding = ends[-1] - ends[-1 - length], ROUNDING * ends[-1]
    if len(ends) < reach + length:
        return None
    for number in range(1, reach + 1):
        if abs(ends[-number] - ends[-number - length] - gained) > rounding:
            return None
    return gained


def simulate(
    schedule: Schedule,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    num_micro_batches: int,
    *,
    weight_seconds: Sequence[float] = (),
    num_virtual: int = 1,
) -> PipelineTiming:
    """Exact times of a schedule: an action starts when its stage is free and its input has arrived.

    `forward_seconds[k]`, `backward_seconds[k]` hold for one micro-batch on place k; `weight_seconds[k]` is the part of
    the backward that a split one may do later (none: 0).  `transfer_seconds[k]` passes between the end of an action on
    place k and the earliest start of its successor on k + 1 (and back).  Transfers occupy no stage.
    """
    program, times = _program_of(schedule, len(forward_seconds) // num_virtual, num_micro_batches, num_virtual)
    return _play(program, _seconds(forward_seconds, backward_seconds, weight_seconds), transfer_seconds, times)[1]


def simulate_actions(
    actions: tuple[Actions, ...],
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    *,
    weight_seconds: Sequence[float] = (),
) -> PipelineTiming:
    """The same for any actions.  Raises `ValueError` when the stages wait for each other."""
    program = _program_of_given(actions)
    return _play(program, _seconds(forward_seconds, backward_seconds, weight_seconds), transfer_seconds)[1]


class Span(NamedTuple):
    """An action on a stage, from `start` to `stop` seconds after the step began."""

    stage: int
    action: Action
    start: float
    stop: float


def action_spans(
    actions: tuple[Actions, ...],
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    *,
    weight_seconds: Sequence[float] = (),
) -> list[Span]:
    """When the simulation runs each action."""
    program = _program_of_given(actions)
    seconds = _seconds(forward_seconds, backward_seconds, weight_seconds)
    ends, _ = _play(program, seconds, transfer_seconds)
    return [
        Span(stage, action, end - seconds[cost], end)
        for (stage, action, _), (_, cost, _, _), end in zip(run_order(actions), program.first, ends, strict=True)
    ]


def closed_form(
    schedule: Schedule,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    num_micro_batches: int,
    *,
    weight_seconds: Sequence[float] = (),
    num_virtual: int = 1,
) -> float:
    """Makespan without simulation; arguments as in `simulate`.

    gpipe: exact.  1f1b: exact for equal stages, and per micro-batch in the long run.  Never below the simulation where
    every stage has the same ratio of backward to forward (up to 15 % above, in short runs whose first stages are
    slow); with unlike ratios the simulation may exceed it (17 % at most in 20,000 random pipelines with ratios from 0
    to infinity, never with ratios between 1.7 and 3.2).
    zb-h1, interleaved: never above the simulation, exact for equal stages without transfers (interleaved: when P
    divides m).  With stages that differ by up to a factor of two the simulation is 1 to 3 % longer in the median, at
    most 20 % (zb-h1) and 30 % (interleaved, with few micro-batches).

    # 1f1b:  T = sum_s (f_s + b_s) + 2 sum_s x_s + (m - 1) c
    #        c = max over runs of stages i..j of (sum (f + b) over i..j + 2 sum x over i..j-1) / (j - i + 1)
    # gpipe: T = sum_s (f_s + b_s) + 2 sum_s x_s + (m - 1) (max_s f_s + max_s b_s)
    # zb-h1: T = max over s of  pre_s + m (f_s + b_s)                                   it is never idle
    #            pre_s + m (f_s + b_s) - min(s + 1, m) w_s + post_s + w_0  (s > 0)      its last I goes back
    # interleaved: T = max over s of  pre_s + m (sum over its places of f + b) + post_s
    # both, one micro-batch through all places:  sum_k (f_k + b_k - w_k) + 2 sum_k x_k + w_0
    #   f, b seconds of a micro-batch on a place, x seconds between places, m micro-batches, w the weights' part of b;
    #   pre_s = sum over k < s of (f_k + x_k), post_s = sum over k < s of (b_k - w_k + x_k).  c is the largest mean
    #   of a cycle of waits: stage i may run only j - i + 1 micro-batches ahead of stage j's return.  Without
    #   transfers c is the slowest stage.  Leaves out that a slow early stage hides the first round trip (1f1b), and
    #   what stages wait for each other in between (zb-h1, interleaved).
    """
    m = num_micro_batches
    if schedule in ("zb-h1", "interleaved"):
        weight = weight_seconds or (0.0,) * len(forward_seconds)
        return _longest_path(schedule, forward_seconds, backward_seconds, transfer_seconds, weight, m, num_virtual)
    work = [f + b for f, b in zip(forward_seconds, backward_seconds, strict=True)]
    once = sum(work) + 2.0 * sum(transfer_seconds)
    if schedule == "gpipe":
        return once + (m - 1) * (max(forward_seconds) + max(backward_seconds))
    assert schedule == "1f1b", f"{schedule} has no closed form"
    if not any(transfer_seconds):
        return once + (m - 1) * max(work)
    along = list(accumulate(work, initial=0.0))
    between = list(accumulate(transfer_seconds, initial=0.0))
    cycle = max(
        (along[j + 1] - along[i] + 2.0 * (between[j] - between[i])) / (j - i + 1)
        for i in range(len(work))
        for j in range(i, len(work))
    )
    return once + (m - 1) * cycle


def _longest_path(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    weight: Sequence[float],
    m: int,
    num_virtual: int,
) -> float:
    num_stages = len(forward) // num_virtual
    inputs = [b - w for b, w in zip(backward, weight, strict=True)] if schedule == "zb-h1" else backward
    first_weight = weight[0] if schedule == "zb-h1" else 0.0
    longest = sum(forward) + sum(inputs) + 2.0 * sum(transfer) + first_weight
    before = after = 0.0
    for stage in range(num_stages):
        work = m * sum(forward[k] + backward[k] for k in range(stage, len(forward), num_stages))
        if schedule == "interleaved":
            longest = max(longest, before + work + after)
        else:
            longest = max(longest, before + work)
            if stage > 0:
                longest = max(longest, before + work - min(stage + 1, m) * weight[stage] + after + first_weight)
        if stage < num_stages - 1:
            before += forward[stage] + transfer[stage]
            after += inputs[stage] + transfer[stage]
    return longest
