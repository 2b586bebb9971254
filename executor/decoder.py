"""Text generation under a plan: forwards only, one sequence, keys and values kept.

Weights stay cut as in training.  Activations do not: one new token cannot be divided among ranks, so every rank of a
stage holds all tokens, and the gather of a block is nothing, its scatter a sum.  The blocks of a module then do
the same work side by side; only the plan's first replica is needed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from executor.attention import AttentionModule
from executor.buckets import Read
from executor.clock import Clock
from executor.collectives import Block
from executor.groups import Groups
from executor.layout import Channel, Layout, ModuleLayout
from executor.modules import BlockModule, EmbeddingModule, HeadModule
from executor.moe import MoeModule
from executor.stage import build_module
from specs.layout import Interval
from specs.plan import Plan

Tensor = torch.Tensor


class WholeBlock(Block):
    """A block whose members all hold all tokens."""

    def all_gather(self, chunk: Tensor) -> Tensor:
        """Everybody has it already."""
        return chunk

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """The sum of everybody's summands, whole."""
        return self.all_reduce(partial.contiguous())


class KvCache:
    """Keys and values of one attention module for the tokens so far: [1, own KV heads, positions, width] each."""

    def __init__(self, module: AttentionModule, max_tokens: int) -> None:
        shape = (1, module.key.shape[0] // module.spec.head_dim, max_tokens, module.spec.head_dim)
        self._key, self._value = (module.key.new_empty(shape) for _ in range(2))

    def append(self, key: Tensor, value: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Add the tokens from position `first` on; returns all up to and with them."""
        stop = first + key.shape[2]
        self._key[:, :, first:stop], self._value[:, :, first:stop] = key, value
        return self._key[:, :, :stop], self._value[:, :, :stop]


def first_replica(plan: Plan) -> Plan:
    """The plan's first replica alone."""
    replica = plan.replicas[0]
    training = plan.training.model_copy(update={"global_batch": replica.sequences})
    return plan.model_copy(update={"replicas": (replica,), "training": training})


class Decoder:
    """One rank of a replica that decodes.  All ranks construct it and call `forward` together.

    `read` gives row-major elements of a global tensor, flat; `max_tokens` bounds prompt and continuation.
    """

    def __init__(
        self,
        plan: Plan,
        read: Read,
        *,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        use_cache: bool = True,
    ) -> None:
        assert len(plan.replicas) == 1
        self._layout = Layout(plan, dist.get_rank())
        self._groups = Groups(self._layout, (), device)
        self._max_tokens, self._dtype, self._device = max_tokens, dtype, device
        self._clock = Clock(device)
        self._runs = [[self._load(module, read) for module in run] for run in self._layout.runs]
        self._caches = {
            module: KvCache(module, max_tokens)
            for run in self._runs
            for module in run
            if isinstance(module, AttentionModule)
        }
        self._use_cache = use_cache
        self._tokens = torch.empty(0, dtype=torch.int64)

    def _load(self, layout: ModuleLayout, read: Read) -> BlockModule:
        group = self._groups.of(layout.block_ranks)
        module = build_module(
            layout,
            WholeBlock(group, layout.position, layout.token_counts, self._clock),
            chunk=self._layout.chunk,
            seq_len=self._layout.plan.training.seq_len,
            dtype=self._dtype,
            device=self._device,
        )
        module.requires_grad_(False)
        for attribute, (name, elements) in module.slices.items():
            parameter = getattr(module, attribute)
            parameter.copy_(read(name, elements).view(parameter.shape))
        return module

    @torch.no_grad()
    def next_logits(self, ids: Tensor) -> Tensor | None:
        """Feed the next tokens [count]; logits [vocabulary] after the last one on the last stage, None elsewhere."""
        first = self._tokens.numel()
        self._tokens = torch.cat((self._tokens, ids))
        if not self._use_cache:
            first, ids = 0, self._tokens
        for turn, run in enumerate(self._runs):
            is_first = turn == 0 and self._layout.is_first_stage
            x = ids.to(self._device) if is_first else self._receive(ids.numel())
            for module in run:
                match module:
                    case EmbeddingModule():
                        x = module.embed(x, torch.arange(first, first + x.numel(), device=self._device))
                    case AttentionModule():
                        x = self._attention(module, x, first)
                    case HeadModule():
                        x = module.logits(x[-1:])[0]
                    case MoeModule():
                        x = module.on_whole(x)
                    case _:
                        x = module(x)
            if turn == len(self._runs) - 1 and self._layout.is_last_stage:
                return x
            self._send(x)
        return None

    def _attention(self, module: AttentionModule, x: Tensor, first: int) -> Tensor:
        positions = (Interval(first, first + x.shape[0]),)
        query, key, value = module.heads(*module.project(x), *module.qk_norms(), positions=positions)
        key, value = self._caches[module].append(key, value, first)
        y = module.attend(query, key, value) @ module.output
        return module.finish(x, module.block.reduce_scatter(y), "output_bias")

    def choose(self, logits: Tensor | None, *, temperature: float, generator: torch.Generator, num_ids: int) -> int:
        """The next token on every rank: the likeliest (temperature 0), or drawn; of the first `num_ids` only."""
        token = torch.zeros(1, dtype=torch.int64, device=self._device)
        source = self._layout.stage_processes(len(self._layout.pipeline.stages) - 1)[0]
        if self._layout.process == source:
            assert logits is not None
            scores = logits[:num_ids].float().cpu()
            if temperature == 0.0:
                token[0] = scores.argmax()
            else:
                token[0] = torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator)
        dist.broadcast(token, src=source)
        return int(token)

    def _neighbour(self, distance: int) -> tuple[int, ...]:
        """Processes of the stage so many further on, around the ring."""
        return self._layout.stage_processes((self._layout.stage_index + distance) % len(self._layout.pipeline.stages))

    def _send(self, x: Tensor) -> None:
        own, following = self._neighbour(0), self._neighbour(1)
        group = self._groups.channel(Channel("F", own, following))
        for process in following[self._layout.position :: len(own)]:
            dist.send(x.contiguous(), process, group=group)

    def _receive(self, count: int) -> Tensor:
        before, own = self._neighbour(-1), self._neighbour(0)
        x = torch.empty((count, self._layout.plan.model.hidden), dtype=self._dtype, device=self._device)
        source = before[self._layout.position % len(before)]
        dist.recv(x, source, group=self._groups.channel(Channel("F", before, own)))
        return x
