"""Runs a stage's list of actions for one step: receive, compute, send.

Chunks cross a stage boundary by interval overlap, each rank sending only its own tokens; the two directions have
groups of their own.  Receives are posted one action ahead, sends are not waited for until the step ends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from executor.clock import Clock
from executor.groups import Groups
from executor.layout import Layout
from executor.stage import StageModule
from specs.layout import Interval
from specs.schedule import Action, stage_actions

Tensor = torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Token ids and targets [micro-batch tokens]; a stage that needs neither gets None."""

    ids: Tensor | None
    targets: Tensor | None


# The sends of one chunk, with the tensors that must live until they are done.
_Sent = list[tuple[dist.Work, Tensor]]


def _wait_for(sent: _Sent) -> None:
    for work, _ in sent:
        work.wait()


@dataclass
class _Edge:
    """The ranks of a neighbouring stage that hold parts of this rank's chunk, and the groups to them."""

    transfers: list[tuple[int, Interval]]
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


class PipelineRunner:
    """One stage of one replica on one rank."""

    def __init__(
        self,
        layout: Layout,
        stage: StageModule,
        groups: Groups,
        clock: Clock,
        *,
        dtype: torch.dtype,
        device: torch.device,
        before_last_backward: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._stage = stage
        self._clock = clock
        self._dtype, self._device = dtype, device
        self._before_last_backward = before_last_backward
        self._actions = stage_actions(
            layout.pipeline.schedule,
            stage=layout.stage_index,
            num_stages=len(layout.pipeline.stages),
            num_micro_batches=layout.num_micro_batches,
        )
        self._previous = None if layout.is_first_stage else self._edge(groups, layout.stage_index - 1)
        self._next = None if layout.is_last_stage else self._edge(groups, layout.stage_index + 1)
        self._sends: defaultdict[dist.ProcessGroup, deque[_Sent]] = defaultdict(deque)

    def _edge(self, groups: Groups, other: int) -> _Edge:
        ranks = {*self._layout.stage_processes(self._layout.stage_index), *self._layout.stage_processes(other)}
        return _Edge(self._layout.boundary_transfers(other), groups.boundary(ranks, "F"), groups.boundary(ranks, "B"))

    def _send(self, edge: _Edge, group: dist.ProcessGroup, chunk: Tensor) -> None:
        chunk = chunk.detach().contiguous()
        works = []
        for process, tokens in edge.transfers:
            part = chunk[tokens.start : tokens.stop]
            works.append((dist.isend(part, process, group=group), part))
        sends = self._sends[group]
        sends.append(works)
        # A schedule never runs further ahead than the pipeline is deep, so the oldest has long arrived: free it.
        if len(sends) > len(self._layout.pipeline.stages):
            _wait_for(sends.popleft())

    def _finish_sends(self) -> None:
        for sends in self._sends.values():
            while sends:
                _wait_for(sends.popleft())

    def _post_receive(self, edge: _Edge, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
        hidden = self._layout.plan.model.hidden
        chunk = torch.empty((self._layout.chunk.size, hidden), dtype=self._dtype, device=self._device)
        works = [dist.irecv(chunk[t.start : t.stop], process, group=group) for process, t in edge.transfers]
        return chunk, works

    def _needs(self, action: Action) -> tuple[_Edge, dist.ProcessGroup] | None:
        """The edge and group that an action receives from, if any."""
        if action.direction == "F":
            return None if self._previous is None else (self._previous, self._previous.forward)
        return None if self._next is None else (self._next, self._next.backward)

    def run(self, micro_batches: Callable[[int], MicroBatch], scale: float, *, train: bool = True) -> Tensor:
        """One step (or, with train=False, the forwards alone): the replica's scaled loss on its last stage, else 0.

        Every member of the head's block returns the same loss, so only one of them may count it.
        """
        actions = self._actions if train else tuple(a for a in self._actions if a.direction == "F")
        loss = torch.zeros((), dtype=torch.promote_types(self._dtype, torch.float32), device=self._device)
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        posted = self._post(actions[0])
        last_backward = max((i for i, a in enumerate(actions) if a.direction == "B"), default=-1)
        for number, action in enumerate(actions):
            received = self._wait(posted)
            posted = self._post(actions[number + 1]) if number + 1 < len(actions) else None
            if action.direction == "F":
                with self._clock.term("forward"), torch.set_grad_enabled(train):
                    chunk, out = self._forward(micro_batches(action.micro_batch), received, scale)
                if self._next is None:
                    loss += out.detach()
                else:
                    with self._clock.term("pipeline_idle"):
                        self._send(self._next, self._next.forward, out)
                if train:
                    kept[action.micro_batch] = (chunk, out)
            else:
                if number == last_backward:
                    self._before_last_backward()
                chunk, out = kept.pop(action.micro_batch)
                with self._clock.term("backward"):
                    torch.autograd.backward(out, received)
                if self._previous is not None:
                    assert chunk.grad is not None
                    with self._clock.term("pipeline_idle"):
                        self._send(self._previous, self._previous.backward, chunk.grad)
        with self._clock.term("pipeline_idle"):
            self._finish_sends()
        return loss

    @torch.no_grad()
    def logits(self, ids: Tensor | None) -> Tensor:
        """One micro-batch forward: logits [head block's tokens, vocabulary] on the last stage, the chunk elsewhere.

        `ids` [micro-batch tokens] on the first stage, None elsewhere.
        """
        received = self._wait(self._post(Action("F", 0)))
        _, out = self._forward(MicroBatch(ids, None), received, 1.0)
        if self._next is not None:
            self._send(self._next, self._next.forward, out)
            self._finish_sends()
        return out

    def _forward(self, batch: MicroBatch, received: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        if received is None:
            assert batch.ids is not None
            chunk = batch.ids
        else:
            chunk = received.requires_grad_(torch.is_grad_enabled())
        return chunk, self._stage(chunk, batch.targets, scale)

    def _post(self, action: Action) -> tuple[Tensor, list[dist.Work]] | None:
        source = self._needs(action)
        return None if source is None else self._post_receive(*source)

    def _wait(self, posted: tuple[Tensor, list[dist.Work]] | None) -> Tensor | None:
        if posted is None:
            return None
        chunk, works = posted
        with self._clock.term("pipeline_idle"):
            for work in works:
                work.wait()
        return chunk
