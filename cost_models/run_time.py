"""Step time of a published run: the same kernels and collectives as for plans, laid out as its framework does.

step = pipeline(stages) + exposed gradient sync + optimizer + host
layer = matrix products + attention + element-wise traffic + exposed tensor-parallel communication
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cost_models.collectives import scale_out_seconds, scale_up_seconds, shipped_curves
from cost_models.device import Efficiency, efficiencies
from cost_models.frameworks import Framework, framework
from cost_models.kernels import Matrix, matrix_seconds
from cost_models.pipeline import simulate
from cost_models.published import Run
from cost_models.run_experts import dispatch_seconds, expert_work
from cost_models.run_shape import expert_parameters_of_rank, expert_replicas, layers_of_stage, parameters_of_rank
from specs.cluster import CollectiveOp, Device, Link
from specs.presets import Machine, machines

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one micro-batch: forward, and the two halves of backward (input gradients, weight gradients)."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient

    def times(self, factor: float) -> Pass:
        return Pass(self.forward * factor, self.input_gradient * factor, self.weight_gradient * factor)

    def plus(self, other: Pass) -> Pass:
        return Pass(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )


class RunModel:
    """Predicts one run's step."""

    def __init__(self, run: Run, efficiency: Efficiency | None = None, stack: Framework | None = None) -> None:
        """`efficiency` and `stack` None: as shipped."""
        machine = hardware_of(run.gpu)
        self.run = run
        self.device: Device = machine.device
        self.efficiency = efficiency if efficiency is not None else run_efficiencies()[run.gpu]
        self.stack = stack if stack is not None else framework(run.stack)
        self._scale_up: Link = machine.scale_up
        rate = run.network_bytes_per_second or machine.scale_out.bytes_per_second
        self._scale_out = machine.scale_out.model_copy(update={"bytes_per_second": rate})

    def step_seconds(self) -> float:
        """Seconds of one optimizer step."""
        layer, ends = self.layer(), self.ends()
        counts = layers_of_stage(self.run)
        stages = [layer.times(count) for count in counts]
        stages[-1] = stages[-1].plus(ends)
        seconds = self._pipeline_seconds(stages)
        return (
            seconds * (1.0 + self.stack.host_fraction)
            + self._gradient_seconds(max(stages, key=lambda s: s.backward))
            + self._optimizer_seconds()
            + self.stack.step_overhead_seconds
        )

    # computing

    def layer(self) -> Pass:
        """One transformer layer on one rank, with its tensor-parallel communication."""
        run = self.run
        tokens = run.micro_batch * run.seq_len // run.cp
        width = run.hidden // run.heads
        qkv = (run.heads + 2 * run.kv_heads) * width // run.tp
        columns = run.ffn // run.tp
        first = columns * (2 if run.gated else 1)
        attention = (Matrix(tokens, qkv, run.hidden), Matrix(tokens, run.hidden, run.hidden // run.tp))
        experts = expert_work(run, run.experts) if run.experts is not None else None
        products: tuple[Matrix, ...] = attention
        grouped: tuple[Matrix, ...] = ()
        if experts is not None:
            grouped = experts.products
            activated, permuted = experts.activation_elements, experts.permuted_elements
        else:
            products = (*attention, Matrix(tokens, first, run.hidden), Matrix(tokens, run.hidden, columns))
            activated, permuted = float(tokens * (first + columns)), 0.0
        one, several = self._products_pass(products, 1.0), self._products_pass(grouped, self.stack.grouped_efficiency)
        forward, inputs, weights = (a + b for a, b in zip(one, several, strict=True))
        scores_forward, scores_backward = self._attention_seconds(tokens, width)
        own = tokens / run.tp if run.sequence_parallel else tokens
        elementwise = self._traffic_seconds(
            2.0 * self.stack.norm_passes * own * run.hidden
            + 2.0 * self.stack.activation_passes * activated
            + 2.0 * permuted
        )
        gather, scatter = self._tensor_seconds(tokens)
        halves = 2.0 if run.experts is None else 1.0  # of a layer, that gather and scatter
        dispatch = dispatch_seconds(run, run.experts, self._seconds) if run.experts is not None else 0.0
        shown = 1.0 - self.stack.tensor_overlap
        communication = halves * shown * (gather + scatter) + dispatch
        host = self.stack.layer_host_seconds
        forward_all = forward + scores_forward + elementwise + communication + host
        inputs += host + scores_backward + self.stack.backward_passes * elementwise + communication
        if run.sequence_parallel:
            # the input is gathered again for the weight gradient, beside the input gradient's product
            inputs += halves * shown * self.stack.regather_exposed * gather
        recompute = run.recompute or self.stack.usual_recompute
        if recompute == "full":
            inputs += forward_all * (1.0 if run.recompute else self.stack.usual_recompute_share)
        elif recompute == "selective":
            inputs += self.stack.selective_share * scores_forward
        return Pass(forward_all, inputs, weights)

    def ends(self) -> Pass:
        """Head and loss (the embedding's lookup is small beside them)."""
        run = self.run
        tokens = run.micro_batch * run.seq_len // run.cp
        logits = Matrix(tokens, run.vocab // run.tp, run.hidden)
        rate = self.device.peak_flop_per_second["bf16"] * self.efficiency.matrix_efficiency["bf16"]
        depth, start = self.efficiency.matrix_depth_overhead, self.efficiency.kernel_seconds
        traffic = self._traffic_seconds(self.stack.logit_passes * 4.0 * tokens * run.vocab / run.tp)
        gather, _ = self._tensor_seconds(tokens)
        return Pass(
            matrix_seconds(logits, rate, depth, start) + traffic + gather,
            matrix_seconds(logits.for_input(), rate, depth, start) + traffic + gather,
            matrix_seconds(logits.for_weight(), rate, depth, start),
        )

    def _products_pass(self, products: tuple[Matrix, ...], efficiency: float) -> tuple[float, float, float]:
        """Seconds of products with weights: forward, gradients of the inputs, of the weights."""
        rate, depth = self._matrix_rate()
        start = self.efficiency.kernel_seconds
        return (
            sum(matrix_seconds(m, efficiency * rate, depth, start) for m in products),
            sum(matrix_seconds(m.for_input(), efficiency * rate, depth, start) for m in products),
            sum(matrix_seconds(m.for_weight(), efficiency * rate, depth, start) for m in products),
        )

    def _matrix_rate(self) -> tuple[float, float]:
        precision = self.run.precision
        rate = self.device.peak_flop_per_second[precision] * self.efficiency.matrix_efficiency[precision]
        return rate, self.efficiency.matrix_depth_overhead * (2.0 if precision == "fp8" else 1.0)

    def _attention_seconds(self, tokens: int, width: int) -> tuple[float, float]:
        """Scores, softmax and their product with the values: (forward, backward).

        # flash: causal half of 4 T s h / t operations, 2.5 times that in backward
        # unfused: all of them as batched products, and the score matrix passes memory several times
        """
        run = self.run
        flop = 4.0 * tokens * run.seq_len * run.hidden / run.tp
        peak = self.device.peak_flop_per_second["bf16"]
        if self.stack.flash_attention:
            forward = 0.5 * flop / (peak * self.efficiency.attention_forward_efficiency)
            backward = 0.5 * 2.5 * flop / (peak * self.efficiency.attention_backward_efficiency)
            return forward, backward
        heads = run.heads / run.tp
        scores = 2.0 * heads * tokens * run.seq_len
        padded = -(-width // 64) * 64 / width if width % 8 == 0 else self.stack.odd_head_factor
        product = flop * padded / (peak * self.stack.batched_efficiency)
        forward = product + self._traffic_seconds(self.stack.softmax_passes * scores)
        return forward, 2.0 * product + self._traffic_seconds(1.25 * self.stack.softmax_passes * scores)

    def _traffic_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.device.memory_bytes_per_second * self.efficiency.memory_efficiency)

    # communication

    def _seconds(self, op: CollectiveOp, ranks: int, payload: float, per_domain: int) -> float:
        """A group of `ranks`, `per_domain` of them in one node."""
        if ranks <= 1 or payload <= 0:
            return 0.0
        efficiency, size = self.efficiency, round(payload)
        curves = shipped_curves(efficiency.collective_curves)
        if per_domain >= ranks:
            return scale_up_seconds(curves, self._scale_up, efficiency.scale_up_efficiency, op, ranks, size)
        return scale_out_seconds(
            curves,
            self._scale_up,
            efficiency.scale_up_efficiency,
            self._scale_out,
            efficiency.scale_out_efficiency,
            op,
            ranks,
            size,
            per_domain,
        )

    def _tensor_seconds(self, tokens: int) -> tuple[float, float]:
        """(gather, scatter) of a layer's half; without sequence parallelism half an all-reduce each."""
        run = self.run
        payload, inside = 2.0 * tokens * run.hidden, min(run.tp, run.gpus_per_node)
        if run.sequence_parallel:
            return (
                self._seconds("all_gather", run.tp, payload, inside),
                self._seconds("reduce_scatter", run.tp, payload, inside),
            )
        half = 0.5 * self._seconds("all_reduce", run.tp, payload, inside)
        return half, half

    def _transfer_seconds(self) -> float:
        """Activations from one stage to the next; without sequence parallelism every rank sends its 1 / t and the
        receivers gather.
        """
        run = self.run
        if run.pp == 1:
            return 0.0
        payload = 2.0 * run.micro_batch * run.seq_len / run.cp * run.hidden / run.tp
        per_stage = run.tp * run.cp * run.dp
        inside = per_stage * 2 <= run.gpus_per_node
        seconds = self._seconds("point_to_point", 2, payload, 2 if inside else 1)
        if not run.sequence_parallel:
            gathered = self._seconds("all_gather", run.tp, payload * run.tp, min(run.tp, run.gpus_per_node))
            seconds += gathered
        return seconds + self.stack.transfer_sync_seconds

    # assembly

    def _pipeline_seconds(self, stages: list[Pass]) -> float:
        run = self.run
        m, p = run.num_micro_batches, run.pp
        transfer = self._transfer_seconds()
        shown = transfer * (1.0 - self.stack.transfer_overlap if run.chunks > 1 else 1.0)
        slowest = max(s.forward + s.backward for s in stages)
        mean = sum(s.forward + s.backward for s in stages) / p
        if p == 1:
            return m * slowest
        if "ZB" in run.schedule:
            # bubble of ZB-H1 (p - 1)(F + B - W), of ZB-H2 and ZB-V (p - 1)(F + B - 2 W)    [arXiv 2401.10241]
            middle = stages[p // 2]
            halves = 1.0 if "1p" in run.schedule else 2.0
            bubble = middle.forward + middle.input_gradient - halves * middle.weight_gradient
            bubble = max(0.0, bubble) / (2.0 if "V" in run.schedule else 1.0)
            filled = m * (slowest + 2.0 * shown) + (p - 1) * bubble
            # with few micro-batches nothing fills the way of the first forward and the last backward
            return max(filled, (p - 1 + m) * (middle.forward + middle.input_gradient + 2.0 * shown))
        if run.chunks > 1:
            # interleaved: bubble (p - 1) / v micro-batches, v transfers each way per micro-batch [arXiv 2104.04473]
            return m * (slowest + 2.0 * run.chunks * shown) + (p - 1) / run.chunks * mean
        blocking = [(s.forward + shown, s.backward + shown) for s in stages]
        timing = simulate("1f1b", [f for f, _ in blocking], [b for _, b in blocking], [0.0] * (p - 1), m)
        return timing.makespan_seconds

    def _gradient_seconds(self, stage: Pass) -> float:
        """Reduce gradients over the replicas, gather sharded weights; what backward hides is not counted."""
        run, stack = self.run, self.stack
        parameters = parameters_of_rank(run)
        if run.sharding == "full":
            return self._sharded_seconds(stage, parameters)
        seconds = self._replica_seconds(parameters, run.dp * run.cp, run.tp)
        if run.experts is not None:
            apart = run.experts.parallel * run.experts.tensor_parallel
            seconds += self._replica_seconds(expert_parameters_of_rank(run), expert_replicas(run), apart)
        hidden = min(stack.gradient_overlap * seconds, stage.forward + stage.backward)
        tied = 0.0
        if run.pp > 1 and stack.ties_embedding:
            tied = self._seconds("all_reduce", 2, stack.gradient_bytes * run.vocab * run.hidden / run.tp, 1)
        return seconds - hidden + tied

    def _replica_seconds(self, parameters: float, ranks: int, apart: int) -> float:
        """Gradients of parameters that `ranks` hold, each `apart` from the next."""
        run, stack = self.run, self.stack
        per_domain = max(1, min(ranks, run.gpus_per_node // apart))
        if run.sharding == "optimizer":
            seconds = self._seconds("reduce_scatter", ranks, stack.gradient_bytes * parameters, per_domain)
            return seconds + self._seconds("all_gather", ranks, 2.0 * parameters, per_domain)
        return self._seconds("all_reduce", ranks, stack.gradient_bytes * parameters, per_domain)

    def _sharded_seconds(self, stage: Pass, parameters: float) -> float:
        """Fully sharded: every micro-batch gathers the weights twice and scatters the gradients once.

        # exposed = max(0, communication - overlap x computing) + contention x hidden
        """
        run, stack = self.run, self.stack
        per_domain = max(1, min(run.shard_size, run.gpus_per_node // run.tp))
        gather = self._seconds("all_gather", run.shard_size, 2.0 * parameters, per_domain)
        scatter = self._seconds("reduce_scatter", run.shard_size, stack.gradient_bytes * parameters, per_domain)
        times = run.num_micro_batches if run.pp == 1 else 1
        total = times * (2.0 * gather + scatter)
        computing = run.num_micro_batches * (stage.forward + stage.backward)
        hidden = min(total * stack.gradient_overlap, computing)
        return total - hidden + stack.contention * hidden

    def _optimizer_seconds(self) -> float:
        run = self.run
        parameters = parameters_of_rank(run)
        updated = parameters / {"none": 1, "optimizer": run.dp * run.cp, "full": run.shard_size}[run.sharding]
        if run.experts is not None:
            shards = expert_replicas(run) if run.sharding == "optimizer" else 1
            updated += expert_parameters_of_rank(run) / shards
        return self._traffic_seconds(self.stack.optimizer_bytes_per_element * updated)


@cache
def run_efficiencies() -> dict[str, Efficiency]:
    """What training runs reach, by GPU: the shipped devices and their variants."""
    known = dict(efficiencies())
    variants = json.loads((_DATA / "device_variants.json").read_text(encoding="utf-8"))
    for name, entry in variants.items():
        base = known[machines()[entry["machine"]].device.name]
        known[name] = dataclasses.replace(base, **entry["rates"], source=entry["source"])
    return known


@cache
def hardware_of(gpu: str) -> Machine:
    """The shipped machine with that device, or the variant of one."""
    variants = json.loads((_DATA / "device_variants.json").read_text(encoding="utf-8"))
    if gpu in variants:
        entry = variants[gpu]
        base = machines()[entry["machine"]]
        changes = {"name": gpu, "source": entry["source"]} | {
            key: entry[key] for key in ("memory_bytes", "memory_bytes_per_second")
        }
        return base.model_copy(update={"device": base.device.model_copy(update=changes)})
    return next(machine for machine in machines().values() if machine.device.name == gpu)
