"""Module times in situ: short training steps of uniform layouts, all ranks running, with the executor's own code.

A model of each distinct module once is trained with one degree everywhere; marks between modules split each step's
forward and backward among them, collectives apart.  What is timed is what runs: gathers, gradient accumulation, the
wait for a slower peer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn

from cost_models.context import executed_score_flop
from cost_models.flops import SPLIT_KINDS, matrix_flop
from cost_models.share import Share
from executor.clock import REST, Clock
from executor.engine import Engine
from executor.memory import attention_masks, saved_tensor_bytes, static_tensors
from profiles.flops import counted_flop
from profiles.options import ProfileOptions
from profiles.statistics import gathered_timing, undisturbed
from specs.cluster import ClusterSpec
from specs.model import Embedding, FeedForward, Head, Layer, ModelSpec
from specs.options import OptimizerOptions
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Replica, Stage, TrainingSpec
from specs.profile import ModuleTiming, OptimizerTiming, StepOverhead
from specs.schedule import parse_actions

NUM_MICRO_BATCHES = 2
NUM_WARM_UP_STEPS = 2
# Turns of whole and split backward passes in a round, at least: their small difference needs disturbed ones left out.
MIN_SPLIT_TURNS = 8
# The same two micro-batches with whole backward passes, and with their weight gradients after both of them.
WHOLE, SPLIT = "F0 F1 B0 B1", "F0 F1 I0 I1 W0 W1"


class ModuleClock(Clock):
    """A clock whose terms name modules: `forward 3`, `backward 3`, and `... communication` inside them."""

    def mark(self, name: str) -> None:
        """From now on time belongs to `name`."""
        self._switch(name)

    def term(self, name: str):  # type: ignore[no-untyped-def]
        """Collectives belong to the module that is open."""
        return super().term(f"{self._term} communication" if name == "tp_communication" else name)


class _BackwardMark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, clock: ModuleClock, name: str):  # type: ignore[no-untyped-def]
        ctx.clock, ctx.name = clock, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        ctx.clock.mark(ctx.name)
        return grad, None, None


def _mark_modules(chain: nn.ModuleList, clock: ModuleClock) -> None:
    for index, module in enumerate(chain):
        module.register_forward_pre_hook(lambda _m, _i, index=index: clock.mark(f"forward {index}"))

        def leave(_m: nn.Module, _i: object, out: torch.Tensor, index: int = index) -> torch.Tensor:
            clock.mark("forward")
            return _BackwardMark.apply(out, clock, f"backward {index}")

        module.register_forward_hook(leave)


def distinct_model(model: ModelSpec) -> ModelSpec:
    """The model's distinct modules, each once, as a short model."""
    attentions = list(dict.fromkeys(layer.attention for layer in model.layers if layer.attention is not None))
    feed_forwards: list[FeedForward] = list(
        dict.fromkeys(layer.feed_forward for layer in model.layers if layer.feed_forward is not None)
    )
    layers = tuple(Layer(attention=a, feed_forward=f) for a, f in zip_longest(attentions, feed_forwards))
    return model.model_copy(update={"layers": layers})


def uniform_plan(
    model: ModelSpec, cluster: ClusterSpec, options: ProfileOptions, *, world_size: int, degree: int, sequences: int
) -> Plan:
    """One stage of all ranks in equal blocks of `degree`, each holding `sequences` sequences."""
    num_blocks = world_size // degree
    micro_batch = sequences * num_blocks
    modules = tuple(ModulePlacement(module=name, blocks=(degree,) * num_blocks) for name, _ in model.modules())
    pipeline = Pipeline(micro_batch=micro_batch, stages=(Stage(num_ranks=world_size, modules=modules),))
    batch = micro_batch * NUM_MICRO_BATCHES
    return Plan(
        made=Provenance(created_by="plait profile", created_at=options.created_at),
        model=model,
        cluster=cluster,
        training=TrainingSpec(global_batch=batch, seq_len=options.seq_len, precision=options.precision),
        pipelines=(pipeline,),
        replicas=(Replica(pipeline=0, ranks=tuple(range(world_size)), sequences=batch),),
    )


@dataclass
class _Samples:
    """Seconds per micro-batch, one entry per timed step."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    forward_communication: list[float] = field(default_factory=list)
    backward_communication: list[float] = field(default_factory=list)


@dataclass
class InSituTimings:
    """Collects samples over layouts and rounds."""

    options: ProfileOptions
    cluster: ClusterSpec
    device: torch.device
    _modules: defaultdict[tuple[int, int, int], _Samples] = field(default_factory=lambda: defaultdict(_Samples))
    _static: dict[tuple[int, int, int], tuple[int, float, float, int]] = field(default_factory=dict)
    _steps: defaultdict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    _optimizer: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _whole_backward: list[float] = field(default_factory=list)
    _split_backward: list[float] = field(default_factory=list)
    _per_action: list[float] = field(default_factory=list)
    _per_step: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = distinct_model(self.options.model)
        self.world_size = dist.get_world_size()

    def layouts(self) -> list[tuple[int, int]]:
        """(degree, sequences per block) to measure."""
        return [(t, s) for t in self.options.degrees for s in self.options.block_sequences]

    def run(self, degree: int, sequences: int) -> Iterator[None]:
        """Train one layout, yielding after every step; samples are kept."""
        plan = uniform_plan(
            self.model,
            self.cluster,
            self.options,
            world_size=self.world_size,
            degree=degree,
            sequences=sequences,
        )
        clock = ModuleClock(self.device)
        optimizer = OptimizerOptions(learning_rate=1e-5, num_steps=10**6)
        engine = Engine(plan, optimizer, device=self.device, seed=0, clock=clock)
        if (0, degree, sequences) not in self._static:
            self._measure_static(engine, degree, sequences)
        _mark_modules(engine.chain, clock)
        shape = (plan.training.global_batch, plan.training.seq_len + 1)
        tokens = torch.randint(self.model.vocab, shape, generator=torch.Generator().manual_seed(0))
        for step in range(1, NUM_WARM_UP_STEPS + self.options.num_steps + 1):
            dist.barrier()
            seconds = engine.step(step, lambda first, count: tokens[first : first + count]).seconds
            if step > NUM_WARM_UP_STEPS:
                self._keep(engine, degree, sequences, seconds)
            yield

    @property
    def split_layout(self) -> tuple[int, int]:
        """(degree, sequences per block) of the steps with split backward passes: the smallest degree, and half of the
        largest blocks, since both micro-batches are in flight.
        """
        return min(self.options.degrees), sorted(self.options.block_sequences)[-2:][0]

    @property
    def num_split_units(self) -> int:
        """Steps of a round of `run_split`, in sequences."""
        return self.num_split_steps * self.split_layout[1]

    @property
    def num_split_steps(self) -> int:
        """Of a round, whole and split ones."""
        return 2 * (NUM_WARM_UP_STEPS + max(self.options.num_steps, MIN_SPLIT_TURNS))

    def run_split(self) -> Iterator[None]:
        """Train one layout with whole and with split backward passes in turns, yielding after every step."""
        degree, sequences = self.split_layout
        plan = uniform_plan(
            self.model, self.cluster, self.options, world_size=self.world_size, degree=degree, sequences=sequences
        )
        optimizer = OptimizerOptions(learning_rate=1e-5, num_steps=10**6)
        engine = Engine(plan, optimizer, device=self.device, seed=0)
        shape = (plan.training.global_batch, plan.training.seq_len + 1)
        tokens = torch.randint(self.model.vocab, shape, generator=torch.Generator().manual_seed(0))
        for step in range(1, self.num_split_steps + 1):
            split = step % 2 == 0
            engine.runner.follow((parse_actions(SPLIT if split else WHOLE),))
            dist.barrier()
            seconds = engine.step(step, lambda first, count: tokens[first : first + count]).seconds
            if step > 2 * NUM_WARM_UP_STEPS:
                (self._split_backward if split else self._whole_backward).append(seconds["backward"])
            yield

    def _split_overhead(self, timings: Sequence[ModuleTiming]) -> float:
        """Seconds that splitting adds, over those of the modules that are split; a collective."""
        degree, sequences = self.split_layout
        every, those = 0.0, 0.0
        for timing in timings:
            if (timing.degree, timing.block_tokens) == (degree, sequences * self.options.seq_len):
                computing = timing.backward.mean_seconds - timing.backward_communication
                every += timing.backward.mean_seconds
                those += computing if isinstance(timing.module, SPLIT_KINDS) else 0.0
        steps = undisturbed([a + b for a, b in zip(self._whole_backward, self._split_backward, strict=True)])
        whole, split = (
            gathered_timing([values[step] for step in steps]).mean_seconds
            for values in (self._whole_backward, self._split_backward)
        )
        return max(0.0, split / whole - 1.0) * every / those if those else 0.0

    def _keep(self, engine: Engine, degree: int, sequences: int, seconds: dict[str, float]) -> None:
        self._steps[degree, sequences].append(sum(seconds.values()))
        for index in range(len(engine.chain)):
            samples = self._modules[index, degree, sequences]
            for direction in ("forward", "backward"):
                communication = seconds.get(f"{direction} {index} communication", 0.0)
                whole = seconds.get(f"{direction} {index}", 0.0) + communication
                getattr(samples, direction).append(whole / NUM_MICRO_BATCHES)
                getattr(samples, f"{direction}_communication").append(communication / NUM_MICRO_BATCHES)
        owned = sum(bucket.master.numel() for bucket in engine.sync.buckets)
        self._optimizer[owned].append(seconds.get("optimizer", 0.0))
        # What no module claims: inside the passes it goes with their number, outside with the step.
        passes = seconds.get("forward", 0.0) + seconds.get("backward", 0.0)
        self._per_action.append(passes / (2 * NUM_MICRO_BATCHES))
        self._per_step.append(seconds.get(REST, 0.0))

    def _measure_static(self, engine: Engine, degree: int, sequences: int) -> None:
        """Bytes kept for backward by each module on its own, and operations counted on the meta device."""
        static = static_tensors(engine)
        generator = torch.Generator().manual_seed(0)
        num_tokens = engine.plan.pipelines[0].micro_batch * engine.plan.training.seq_len
        ids = torch.randint(self.model.vocab, (num_tokens,), generator=generator).to(self.device)
        for index, module in enumerate(engine.chain):
            layout = module.layout
            shape = (engine.layout.chunk.size, self.model.hidden)
            chunk = torch.randn(shape, generator=generator).to(self.device, engine.dtype).requires_grad_()
            with saved_tensor_bytes(static + attention_masks(engine)) as saved:
                if isinstance(layout.module, Embedding):
                    out = module(ids)
                elif isinstance(layout.module, Head):
                    out = module(chunk, ids, 1.0)
                else:
                    out = module(chunk)
                kept = saved.live_bytes
                del out
            weights = sum(p.numel() * p.element_size() for p in module.parameters())
            tokens = layout.block_tokens.size
            share = Share.of(layout.module, degree, tokens, self.options.seq_len, layout.units)
            formula = matrix_flop(layout.module, tokens, layout.units) + executed_score_flop(layout.module, share)
            counted = counted_flop(layout, seq_len=self.options.seq_len)
            assert abs(counted - formula) <= 0.01 * formula, f"{layout.name}: counted {counted}, formula {formula}"
            self._static[index, degree, sequences] = (kept, counted, formula, weights)
        for parameter in (p for module in engine.chain for p in module.parameters()):
            parameter.grad = None

    def timings(self) -> tuple[ModuleTiming, ...]:
        """Every module, degree and size, over all ranks; a collective."""
        timings = []
        kept_steps = {layout: undisturbed(steps) for layout, steps in self._steps.items()}
        for (index, degree, sequences), samples in self._modules.items():
            kept, counted, formula, weights = self._static[index, degree, sequences]
            _, module = self.model.modules()[index]
            steps = kept_steps[degree, sequences]
            forward, backward = (
                gathered_timing([values[step] for step in steps], averaged=NUM_MICRO_BATCHES)
                for values in (samples.forward, samples.backward)
            )
            communication = [
                gathered_timing([values[step] for step in steps], floor=0.0).mean_seconds if degree > 1 else 0.0
                for values in (samples.forward_communication, samples.backward_communication)
            ]
            timings.append(
                ModuleTiming(
                    module=module,
                    degree=degree,
                    block_tokens=sequences * self.options.seq_len,
                    seq_len=self.options.seq_len,
                    precision=self.options.precision,
                    world_size=self.world_size,
                    forward=forward,
                    backward=backward,
                    forward_communication=communication[0],
                    backward_communication=communication[1],
                    flop_counted=counted,
                    flop_formula=formula,
                    activation_bytes=kept,
                    weight_bytes=weights,
                )
            )
        return tuple(timings)

    def optimizer_timings(self) -> tuple[OptimizerTiming, ...]:
        """By number of elements that a rank optimises; a collective."""
        return tuple(
            OptimizerTiming(num_elements=owned, timing=gathered_timing(samples))
            for owned, samples in sorted(self._optimizer.items())
        )

    def overhead(self, data_seconds_per_sequence: float, timings: Sequence[ModuleTiming]) -> StepOverhead:
        """Host time outside modules, and what split backward passes add; a collective."""
        return StepOverhead(
            data_seconds_per_sequence=data_seconds_per_sequence,
            other_seconds_per_step=gathered_timing(self._per_step).mean_seconds,
            other_seconds_per_action=gathered_timing(self._per_action).mean_seconds,
            split_backward_overhead=self._split_overhead(timings),
        )


def loading_seconds_per_sequence(seq_len: int) -> float:
    """Seconds to gather one sequence of a memory-mapped corpus, here on random tokens."""
    import tempfile
    from pathlib import Path

    import numpy as np

    from executor.data import Samples

    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        path = Path(folder) / "tokens.npy"
        tokens = np.random.default_rng(0).integers(0, 256, size=256 * seq_len + 1, dtype=np.uint8)
        np.save(path, tokens, allow_pickle=False)
        samples = Samples(path, seq_len=seq_len, global_batch=16, seed=0)
        samples.sequences(1, 0, 16)
        begin = time.perf_counter()
        for step in range(2, 12):
            samples.sequences(step, 0, 16)
        return (time.perf_counter() - begin) / 160
