"""Peak memory of a published run on its fullest rank, as its framework keeps things.

peak = states (weights, gradients, optimizer) + activations in flight + the larger of one layer's and the
       head's working memory + reserved
"""

from __future__ import annotations

from cost_models.frameworks import Framework, framework
from cost_models.published import Run
from cost_models.run_experts import routed_tokens
from cost_models.run_shape import (
    expert_parameters,
    expert_replicas,
    layer_parameters,
    layers_of_stage,
    parameters_of_stage,
)


def run_memory_bytes(run: Run, stack: Framework | None = None) -> float:
    """Bytes on the fullest rank; `stack` None: as shipped."""
    known = stack if stack is not None else framework(run.stack)
    return max(stage_memory_bytes(run, known, stage) for stage in range(run.pp))


def stage_memory_bytes(run: Run, stack: Framework, stage: int) -> float:
    """Peak bytes on a rank of one stage."""
    layers = layers_of_stage(run)[stage]
    recompute = run.recompute or stack.usual_recompute
    kept = layer_activation_bytes(run, stack, recompute)
    whole = layer_activation_bytes(run, stack, "none")
    working = whole - kept if recompute != "none" else 0.0
    if stage == run.pp - 1:
        working = max(working, head_bytes(run, stack))
    dynamic = layers * micro_batches_in_flight(run, stage) * kept + working
    return state_bytes(run, stack, stage) + dynamic * (1.0 + stack.slack) + stack.reserved_bytes


def head_bytes(run: Run, stack: Framework) -> float:
    """Working memory of the head and its loss on one rank.

    # b T v / t, and with sequence parallelism in separate allocations 4 T h: its gathered input and that one's gradient
    #   b counts the allocator's blocks of a logit: 2 (16 bits) + 4 (fp32) + 4 (log-softmax) + 4 (its gradient) = 14.
    #   A softmax over a cut vocabulary that is composed of separate operations holds its exponentials beside them: 18.
    #   [torch.distributed.tensor.parallel.loss]
    """
    tokens = run.micro_batch * run.seq_len / run.cp
    per_logit = stack.logit_bytes + (stack.cut_softmax_bytes if run.tp > 1 else 0.0)
    gathered = 4.0 * tokens * run.hidden if run.sequence_parallel and run.tp > 1 else 0.0
    return per_logit * tokens * run.vocab / run.tp + gathered


def state_bytes(run: Run, stack: Framework, stage: int) -> float:
    """Weights, gradients and optimizer state of a stage on one rank.

    # none: (w + g + o) N     optimizer: (w + g + o / d) N     full: (w' + g + o) N / d + 2 layers gathered
    #   w weights 2 bytes, g gradients, o = 12: master weights and two moments (16 with an fp32 copy of the
    #   gradients, as DeepSpeed's optimizer keeps); d replicas x context ranks.  Unsharded, that optimizer casts every
    #   gradient to fp32 and then joins the casts to one tensor: 4 bytes more [DeepSpeed, runtime/fp16/fused_optimizer]
    """
    parameters = parameters_of_stage(run, stage, tied=stack.ties_embedding)
    gradient = stack.gradient_bytes_fp8 if run.precision == "fp8" else stack.gradient_bytes
    if run.fp32_gradients:
        gradient = 2.0 + 4.0  # as computed, and their sums
    if run.experts is not None:
        shards = expert_replicas(run) if run.sharding == "optimizer" else 1
        state = 2.0 + gradient + (12.0 + stack.extra_state_bytes) / shards
        routed = expert_parameters(run, stage) * state
    else:
        routed = 0.0
    if run.sharding == "full":
        gathered = 2.0 * (2.0 + gradient) * layer_parameters(run) / run.tp
        return parameters * (12.0 + gradient) / run.shard_size + gathered
    if run.sharding == "optimizer":
        return routed + parameters * (2.0 + gradient + (12.0 + stack.extra_state_bytes) / (run.dp * run.cp))
    return routed + parameters * (2.0 + gradient + 12.0 + stack.extra_state_bytes + stack.unsharded_update_bytes)


def micro_batches_in_flight(run: Run, stage: int) -> float:
    """Micro-batches whose activations a stage holds, in units of all its layers.

    # 1F1B, ZB-1p: p - stage.  ZB-2p: 2 (p - stage) + stage - 1, ZB-V: p - 1/2        [arXiv 2401.10241, section 4]
    # interleaved: (2 (p - 1 - stage) + (v - 1) p + 1) / v                              [arXiv 2104.04473]
    """
    p, m = run.pp, run.num_micro_batches
    if "2p" in run.schedule:
        return min(2.0 * p - 1.0, m)
    if run.schedule.startswith("ZB-V"):
        return min(p - 0.5, m)
    if run.chunks > 1:
        warm_up = 2.0 * (p - 1 - stage) + (run.chunks - 1) * p + 1.0
        return min(warm_up / run.chunks, m)
    return min(p - stage, m)


def layer_activation_bytes(run: Run, stack: Framework, recompute: str) -> float:
    """Bytes that one layer keeps of one micro-batch.

    # dropout (GPT, ungated): T h (10 / n + 24 / t), and 5 T s a / t where attention is unfused; selective without
    #   the latter; full 2 T h / n
    #   [Korthikanti et al., arXiv 2205.05198, section 4]  n = t with sequence parallelism, else 1
    # flash, no dropout: (4 + 2 w) T h / n (norms' inputs and outputs) + T d ((2 + w) q + 4 k) / t
    #   + T f (2 or 4, and w) / t, or with R tokens for the rank's experts, cut by u, R (f (2 or 4, and w) / u + w h)
    #   w bytes of a matrix product's stored input, 1 in fp8
    #   T tokens of the rank's micro-batch, q and k query and KV heads, f columns
    """
    tokens = run.micro_batch * run.seq_len / run.cp
    hidden = tokens * run.hidden
    spread = run.tp if run.sequence_parallel else 1
    if recompute == "full":
        return 2.0 * hidden / spread
    if not stack.flash_attention or (stack.dropout and not run.gated):
        scores = 5.0 * tokens * run.seq_len * run.heads / run.tp
        kept = recompute == "none" and not stack.flash_attention
        return hidden * (10.0 / spread + 24.0 / run.tp) + (scores if kept else 0.0)
    width = run.hidden / run.heads
    stored = 1.0 if run.precision == "fp8" else 2.0  # inputs of matrix products
    norms = (4.0 + 2.0 * stored) * hidden / spread
    attention = tokens * width * ((4.0 + stored - 2.0) * run.heads + 4.0 * run.kv_heads) / run.tp
    per_column = (4.0 if run.gated else 2.0) + stored
    if run.experts is None:
        columns = tokens * run.ffn * per_column / run.tp
    else:
        routed = routed_tokens(run, run.experts)
        columns = routed * (run.ffn * per_column / run.experts.tensor_parallel + stored * run.hidden)
    return (norms + attention + columns) * (stack.selective_kept if recompute == "selective" else 1.0)
