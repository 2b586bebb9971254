"""Runs a stage's list of actions for one step: receive, compute, send.

Chunks cross from stage to stage by interval overlap, each rank sending only its own tokens.  Every channel (from one
stage to another, activations or gradients) has a group of its own; receives are posted in the order of the other
side's sends, on every channel the next one as soon as one has arrived: what is sent travels while this stage computes,
whatever it computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from executor.clock import Clock
from executor.groups import Groups
from executor.layout import Channel, Layout
from executor.stage import StageModule
from executor.waiting import wait_transfer
from executor.weight_work import Deferred, WeightWork
from specs.layout import Interval
from specs.schedule import Action, Actions, traffic

Tensor = torch.Tensor
Direction = Literal["F", "B"]


@dataclass(frozen=True)
class MicroBatch:
    """Token ids and targets [micro-batch tokens]; a stage that needs neither gets None."""

    ids: Tensor | None
    targets: Tensor | None


@dataclass
class _Outbox:
    """Sends to another stage.  Their tensors must live until they are done."""

    group: dist.ProcessGroup
    transfers: list[tuple[int, Interval]]
    most_under_way: int
    sent: deque[list[tuple[dist.Work, Tensor]]] = field(default_factory=deque)

    def send(self, chunk: Tensor) -> None:
        chunk = chunk.detach().contiguous()
        parts = [(process, chunk[tokens.start : tokens.stop]) for process, tokens in self.transfers]
        self.sent.append([(dist.isend(part, process, group=self.group), part) for process, part in parts])
        while self.sent and all(work.is_completed() for work, _ in self.sent[0]):
            self.sent.popleft()
        self.finish(self.most_under_way)

    def finish(self, under_way: int = 0) -> None:
        """Wait for the oldest until no more than that many are left (gloo knows of no end before it is waited for)."""
        while len(self.sent) > under_way:
            for work, _ in self.sent.popleft():
                wait_transfer(work)


@dataclass
class _Inbox:
    """Receives from another stage, in the order in which it sends: (virtual stage here, micro-batch).  `empty` makes
    room for one.
    """

    group: dist.ProcessGroup
    transfers: list[tuple[int, Interval]]
    order: Sequence[tuple[int, int]]
    empty: Callable[[], Tensor]
    num_posted: int = 0
    posted: dict[tuple[int, int], tuple[Tensor, list[dist.Work]]] = field(default_factory=dict)

    def post(self) -> None:
        """Post the next receive, if there is one."""
        if self.num_posted == len(self.order):
            return
        chunk = self.empty()
        works = [dist.irecv(chunk[t.start : t.stop], process, group=self.group) for process, t in self.transfers]
        self.posted[self.order[self.num_posted]] = (chunk, works)
        self.num_posted += 1

    def take(self, key: tuple[int, int]) -> Tensor:
        """Wait for one, which others may come before, and let the next one come."""
        while key not in self.posted:
            self.post()
        chunk, works = self.posted.pop(key)
        for work in works:
            wait_transfer(work)
        if not self.posted:
            self.post()
        return chunk


class _Program:
    """What every stage does, and what this one sends and receives by it."""

    def __init__(self, layout: Layout, groups: Groups, actions: tuple[Actions, ...]) -> None:
        self._layout, self._groups = layout, groups
        self._traffic = traffic(actions)
        self.actions = actions[layout.stage_index]
        self.num_stages = len(actions)

    def inboxes(self, empty: Callable[[], Tensor]) -> dict[Direction, _Inbox]:
        """For one step: where activations and gradients come from, if they do; `empty` makes room for a chunk."""
        here, boxes = self._layout.stage_index, {}
        for kind, source in self._neighbours(before=-1):
            if (kind, source) in self._traffic:
                group = self._group(kind, source, here)
                transfers = self._layout.boundary_transfers(source)
                boxes[kind] = _Inbox(group, transfers, self._traffic[kind, source].order, empty)
        return boxes

    def outboxes(self) -> dict[Direction, _Outbox]:
        """For one step: where they go."""
        here, boxes = self._layout.stage_index, {}
        for kind, target in self._neighbours(before=1):
            if (kind, here) in self._traffic:
                group = self._group(kind, here, target)
                # As many as the pipeline is deep: no reason to wait for a slower neighbour before that.
                most = max(self.num_stages, self._traffic[kind, here].most_under_way)
                boxes[kind] = _Outbox(group, self._layout.boundary_transfers(target), most)
        return boxes

    def _neighbours(self, *, before: int) -> list[tuple[Direction, int]]:
        here = self._layout.stage_index
        return [("F", (here + before) % self.num_stages), ("B", (here - before) % self.num_stages)]

    def _group(self, kind: Direction, source: int, target: int) -> dist.ProcessGroup:
        processes = self._layout.stage_processes
        return self._groups.channel(Channel(kind, processes(source), processes(target)))


class PipelineRunner:
    """The virtual stages of one stage of one replica on one rank."""

    def __init__(
        self,
        layout: Layout,
        stages: Sequence[StageModule],
        groups: Groups,
        clock: Clock,
        weight_work: WeightWork,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`stages` by virtual stage; `weight_work` is that of their blocks."""
        self.layout = layout
        self.stages = stages
        self._groups = groups
        self.clock = clock
        self.weight_work = weight_work
        self.dtype, self.device = dtype, device
        actions = layout.pipeline.stage_actions(layout.num_micro_batches)
        forwards = tuple(tuple(action for action in own if action.kind == "F") for own in actions)
        single = tuple(Action("F", 0, virtual) for virtual in range(len(stages)))
        self._training = _Program(layout, groups, actions)
        self._evaluation = _Program(layout, groups, forwards)
        self._single = _Program(layout, groups, (single,) * len(actions))

    def follow(self, actions: tuple[Actions, ...]) -> None:
        """Train by these actions of every stage from the next step on; their channels are those of the ones before."""
        self._training = _Program(self.layout, self._groups, actions)

    def run(self, micro_batches: Callable[[int], MicroBatch], scale: float, *, train: bool = True) -> Tensor:
        """One step (or, with train=False, the forwards alone): the replica's scaled loss on its last stage, else 0.

        Every member of the head's block returns the same loss, so only one of them may count it.
        """
        loss = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        with torch.set_grad_enabled(train):
            for out in _Step(self, self._training if train else self._evaluation).run(micro_batches, scale):
                loss += out.detach()
        return loss

    @torch.no_grad()
    def logits(self, ids: Tensor | None) -> Tensor | None:
        """One micro-batch forward: logits [head block's tokens, vocabulary] on the last stage, None elsewhere.

        `ids` [micro-batch tokens] on the first stage, None elsewhere.
        """
        return next(iter([*_Step(self, self._single).run(lambda _: MicroBatch(ids, None), 1.0)]), None)


class _Step:
    """One pass through a program."""

    def __init__(self, runner: PipelineRunner, program: _Program) -> None:
        self._runner, self._clock = runner, runner.clock
        self._stage, self._num_stages = runner.layout.stage_index, program.num_stages
        self._last_place = program.num_stages * len(runner.stages) - 1
        self._actions = program.actions
        self._inboxes, self._outboxes = program.inboxes(self._empty_chunk), program.outboxes()
        # By (virtual stage, micro-batch): input and output from F to B or I, weight gradients from I to W.
        self._kept: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = {}
        self._deferred: dict[tuple[int, int], list[Deferred]] = {}

    def run(self, micro_batches: Callable[[int], MicroBatch], scale: float) -> Iterator[Tensor]:
        """Run all actions; yields what the last virtual stage of the chain makes."""
        for inbox in self._inboxes.values():
            inbox.post()
        for action in self._actions:
            received = self._take(action)
            with self._clock.action(str(action)):
                match action.kind:
                    case "F":
                        out = self._forward(action, micro_batches(action.micro_batch), received, scale)
                        if self._place(action) == self._last_place:
                            yield out
                        del out
                    case "W":
                        self._weights(action)
                    case _:
                        self._backward(action, received)
            received = None  # nothing of an action outlives it here
        with self._clock.term("pipeline_idle"):
            for outbox in self._outboxes.values():
                outbox.finish()

    def _forward(self, action: Action, batch: MicroBatch, received: Tensor | None, scale: float) -> Tensor:
        train = torch.is_grad_enabled()
        if received is None:
            assert batch.ids is not None
            chunk = batch.ids
        else:
            chunk = received.requires_grad_(train)
        with self._clock.term("forward"):
            out = self._runner.stages[action.virtual](chunk, batch.targets, scale)
        if train:
            self._kept[action.virtual, action.micro_batch] = (chunk, get_gradient_edge(out))
        if self._place(action) != self._last_place:
            with self._clock.term("pipeline_idle"):
                self._outboxes["F"].send(out)
        return out

    def _backward(self, action: Action, received: Tensor | None) -> None:
        key = (action.virtual, action.micro_batch)
        chunk, out = self._kept.pop(key)
        with self._clock.term("backward"):
            if action.kind == "I":
                with self._runner.weight_work.later() as self._deferred[key]:
                    torch.autograd.backward(out, received)
            else:
                torch.autograd.backward(out, received)
        if self._place(action) != 0:
            assert chunk.grad is not None
            with self._clock.term("pipeline_idle"):
                self._outboxes["B"].send(chunk.grad)

    def _weights(self, action: Action) -> None:
        deferred = self._deferred.pop((action.virtual, action.micro_batch))
        with self._clock.term("backward"):
            while deferred:  # each is freed as soon as it is done
                deferred.pop(0).run()

    def _place(self, action: Action) -> int:
        """Which virtual stage of the whole chain an action is about."""
        return action.virtual * self._num_stages + self._stage

    def _inbox(self, action: Action) -> _Inbox | None:
        """Where an action's input comes from."""
        if action.kind == "F":
            return None if self._place(action) == 0 else self._inboxes["F"]
        return None if action.kind == "W" or self._place(action) == self._last_place else self._inboxes["B"]

    def _empty_chunk(self) -> Tensor:
        layout = self._runner.layout
        shape = (layout.chunk.size, layout.plan.model.hidden)
        return torch.empty(shape, dtype=self._runner.dtype, device=self._runner.device)

    def _take(self, action: Action) -> Tensor | None:
        inbox = self._inbox(action)
        if inbox is None:
            return None
        with self._clock.term("pipeline_idle"):
            return inbox.take((action.virtual, action.micro_batch))
