"""A plan made ready on one rank: modules, groups, gradient sync, optimizer; one call is one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from executor.buckets import Read, bucket_layouts
from executor.clock import Clock
from executor.gathered import release
from executor.groups import Groups
from executor.layout import Layout, ModuleLayout, tensor_holdings
from executor.modules import BlockModule, HeadModule, token_order
from executor.moe import MoeModule
from executor.optimizer import ShardedAdamW
from executor.pipeline import MicroBatch, PipelineRunner
from executor.stage import StageModule, build_module
from executor.sync import GradientSync, LocalTensor
from executor.waiting import wait
from executor.weight_work import WeightWork
from executor.weights import initial_values
from specs.layout import Interval
from specs.options import OptimizerOptions
from specs.plan import Plan, StepTerms

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Gives the tokens of sequences [first, first + count) of the global batch: [count, seq_len + 1].
Batch = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """Mean loss over the global batch (nats per token), gradient norm before clipping, seconds by term here.

    `flags` is the sum over ranks of the flags given to `step`.
    """

    loss: float
    gradient_norm: float
    seconds: dict[str, float]
    flags: float


class Engine:
    """Training of one plan on one rank.  All ranks must construct it and call its methods together."""

    def __init__(
        self,
        plan: Plan,
        options: OptimizerOptions,
        *,
        device: torch.device,
        seed: int,
        dtype: torch.dtype | None = None,
        clock: Clock | None = None,
        overlap: bool | None = None,
    ) -> None:
        """`overlap`: gradient sync beside backward; None: on GPUs (on gloo the sums would take the cores)."""
        self.plan = plan
        self.device = device
        self.layout = Layout(plan, dist.get_rank())
        self.clock = Clock(device) if clock is None else clock
        self.dtype = DTYPES[plan.training.precision] if dtype is None else dtype
        holdings = tensor_holdings(plan)
        layouts = bucket_layouts(holdings)
        self.groups = Groups(self.layout, (bucket.owners for bucket in layouts), device)
        weight_work = WeightWork()
        self.stages = [StageModule([self._build(module, weight_work) for module in run]) for run in self.layout.runs]
        self.local = _local_tensors(self.stages)
        self.sync = GradientSync(
            layouts,
            self.local,
            self.chain,
            process=self.layout.process,
            groups=self.groups,
            clock=self.clock,
            num_micro_batches=plan.num_micro_batches(self.layout.replica),
            num_rounds=max(plan.num_micro_batches(replica) for replica in plan.replicas),
            overlap=device.type == "cuda" if overlap is None else overlap,
        )
        self._initialise(seed, {name: entry.tensor.init for name, entry in holdings.items()})
        self.optimizer = ShardedAdamW(self.sync, options, self.clock)
        self.runner = PipelineRunner(
            self.layout,
            self.stages,
            self.groups,
            self.clock,
            weight_work,
            dtype=self.dtype,
            device=device,
        )

    def _build(self, module: ModuleLayout, weight_work: WeightWork) -> BlockModule:
        return release(
            build_module(
                module,
                self.groups.block(module, self.clock, weight_work),
                context=self.groups.context(module, self.clock),
                chunk=self.layout.chunk,
                seq_len=self.plan.training.seq_len,
                dtype=self.dtype,
                device=self.device,
            )
        )

    @property
    def chain(self) -> list[BlockModule]:
        """This rank's modules, of all its virtual stages."""
        return [module for stage in self.stages for module in stage.modules_in_order()]

    def _initialise(self, seed: int, inits: dict[str, str]) -> None:
        def first(tensor: str, elements: Interval) -> torch.Tensor:
            return initial_values(
                tensor,
                elements,
                inits[tensor],  # type: ignore[arg-type]
                num_layers=self.plan.model.num_layers,
                seed=seed,
                dtype=torch.promote_types(self.dtype, torch.float32),
            )

        self.set_weights(first)

    def set_weights(self, read: Read) -> None:
        """Fill weights and their masters; `read` gives row-major elements of a global tensor, flat, of any type."""
        for bucket in self.sync.buckets:
            bucket.fill(read)
        for bucket in self.sync.buckets:
            bucket.publish()

    def _micro_batches(self, batch: Batch) -> Callable[[int], MicroBatch]:
        pipeline = self.layout.pipeline
        needs_targets = any(isinstance(module, HeadModule) for module in self.chain)
        order = token_order(self.plan.training.seq_len, pipeline.context_parallel, self.device)

        def listed(tokens: torch.Tensor) -> torch.Tensor:
            return (tokens if order is None else tokens[:, order]).reshape(-1)

        def load(index: int) -> MicroBatch:
            if not (self.layout.is_first_stage or needs_targets):
                return MicroBatch(None, None)
            with self.clock.term("data"):
                first = self.layout.first_sequence + index * pipeline.micro_batch
                tokens = batch(first, pipeline.micro_batch).to(self.device, non_blocking=True)
                ids = listed(tokens[:, :-1]) if self.layout.is_first_stage else None
                targets = listed(tokens[:, 1:]) if needs_targets else None
            return MicroBatch(ids, targets)

        return load

    @property
    def _counts_loss(self) -> bool:
        """One member of each head block counts the block's loss."""
        last = self.chain[-1]
        return isinstance(last, HeadModule) and last.block.position == 0

    def step(self, number: int, batch: Batch, *, flag: float = 0.0, record: bool = False) -> StepResult:
        """One optimizer step, `number` from 1 on.  `record`: the clock keeps when its actions were."""
        self.clock.start(record=record)
        self.sync.begin_step()
        for module in self._mixtures:
            module.load.zero_()
        scale = 1.0 / self.plan.training.tokens_per_step
        loss = self.runner.run(self._micro_batches(batch), scale)
        self.sync.finish()
        shared = torch.stack((loss.double() * float(self._counts_loss), torch.full_like(loss.double(), flag)))
        norm, total = self.optimizer.step(number, shared)
        return StepResult(float(total[0]), norm, self.clock.stop(), float(total[1]))

    @property
    def _mixtures(self) -> list[MoeModule]:
        return [module for module in self.chain if isinstance(module, MoeModule)]

    def expert_load(self) -> dict[str, list[int]]:
        """By module: choices of each expert by this rank's tokens in the last step."""
        return {module.layout.name: module.load.tolist() for module in self._mixtures}

    def evaluate(self, batch: Batch) -> float:
        """Mean loss (nats per token) over one global batch, without a step."""
        loss = self.runner.run(self._micro_batches(batch), 1.0 / self.plan.training.tokens_per_step, train=False)
        total = loss.double() * float(self._counts_loss)
        wait(dist.all_reduce(total, async_op=True))
        return float(total)


def _local_tensors(stages: Sequence[StageModule]) -> dict[str, list[LocalTensor]]:
    """This rank's parameters by global tensor.  Equal copies (tied, cut alike) become one parameter."""
    local: defaultdict[str, list[LocalTensor]] = defaultdict(list)
    for stage in stages:
        known = {id(tensor) for tensors in local.values() for tensor in tensors}
        for module in stage.modules_in_order():
            for attribute, (name, elements) in module.slices.items():
                same = next((tensor for tensor in local[name] if tensor.elements == elements), None)
                if same is None:
                    local[name].append(LocalTensor(getattr(module, attribute), elements))
                    continue
                module.register_parameter(attribute, same.parameter)
                if id(same) in known:  # of another virtual stage, which has backward passes of its own
                    same.num_passes += 1
                    known.discard(id(same))
    return dict(local)


def mean_terms(seconds: dict[str, float], flag: float = 0.0) -> tuple[StepTerms, float]:
    """Means over all ranks of each term, and the sum of their flags; a collective."""
    names = list(StepTerms.model_fields)
    values = torch.tensor([*(seconds.get(name, 0.0) for name in names), flag], dtype=torch.float64)
    if dist.get_backend() == "nccl":
        values = values.cuda()
    wait(dist.all_reduce(values, async_op=True))
    *sums, flags = values.tolist()
    return StepTerms(**{name: total / dist.get_world_size() for name, total in zip(names, sums, strict=True)}), flags
