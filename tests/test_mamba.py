"""Mamba-2 is counted right: against a plain PyTorch block's operations and saved tensors, and a published size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from cost_models.activations import activation_bytes
from cost_models.flops import forward_flop, matrix_flop, score_backward_ratio, score_flop
from cost_models.kernels import products_of
from cost_models.share import Share
from cost_models.sources import device_costs
from cost_models.step import price
from cost_models.working import working_bytes
from executor.collectives import Block
from executor.functions import squared_relu
from executor.layout import ModuleLayout
from executor.stage import build_module
from exports.megatron_model import model_arguments
from exports.torchtitan import check_model
from planner.make import Problem, make_plan
from specs.errors import BadInputError
from specs.huggingface import model_from_config
from specs.layout import Interval, balanced_cuts, interval_of
from specs.model import Attention, Embedding, Head, Layer, Mamba2, Mlp, ModelSpec
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Replica, Stage, TrainingSpec
from specs.presets import cluster_preset, model_preset
from specs.tensors import local_num_elements, local_rows, num_parameters, tensors_of

Tensor = torch.Tensor
SMALL = Mamba2(hidden=24, num_heads=8, head_dim=6, num_groups=4, state_size=10, conv_kernel=4, chunk=16)
ALL = Interval(0, SMALL.num_heads)
INNER, SHARED = 8 * 6, 4 * 10
TOKENS = 64
MODEL = ModelSpec(
    name="small hybrid",
    embedding=Embedding(hidden=24, vocab=64),
    layers=(
        Layer(mamba=SMALL),
        Layer(feed_forward=Mlp(hidden=24, ffn=40, gated=False, activation="relu2")),
        Layer(attention=Attention(hidden=24, num_heads=4, num_kv_heads=2, head_dim=6, rope_theta=None)),
    ),
    head=Head(hidden=24, vocab=64),
)
NANO = {
    "model_type": "nemotron_h",
    "hidden_size": 4480,
    "num_hidden_layers": 56,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "intermediate_size": 15680,
    "mlp_hidden_act": "relu2",
    "vocab_size": 131072,
    "max_position_embeddings": 131072,
}

# a plain block: one sequence, [tokens, ...] throughout


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {tensor.name: torch.randn(tensor.shape(tensor.rows)).mul(0.3) for tensor in tensors_of(SMALL)}
    found["projection"] = torch.cat([found[name] for name in ("gate", "value", "b", "c", "step")])
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def convolve(inputs: Tensor, w: dict[str, Tensor]) -> Tensor:
    kernel, bias = (torch.cat([w[f"{name}_{end}"] for name in ("value", "b", "c")]) for end in ("conv", "conv_bias"))
    padded = F.pad(inputs.T, (SMALL.conv_kernel - 1, 0)).unsqueeze(0)
    return F.silu(F.conv1d(padded, kernel.unsqueeze(1), bias, groups=INNER + 2 * SHARED)[0].T).contiguous()


def step_sizes(step: Tensor, w: dict[str, Tensor]) -> Tensor:
    return F.softplus(step + w["step_bias"])


def decays(step: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Sums of log decays from the start of each chunk, [tokens, heads]."""
    logs = -torch.exp(w["decay"]) * step_sizes(step, w)
    return logs.view(-1, SMALL.chunk, SMALL.num_heads).cumsum(1).view(-1, SMALL.num_heads)


def scan(convolved: Tensor, step: Tensor, sums: Tensor, w: dict[str, Tensor]) -> Tensor:
    """By chunks, as the paper's section 6 has it: inside a chunk quadratic, between chunks by states."""
    heads, groups, chunk = SMALL.num_heads, SMALL.num_groups, SMALL.chunk
    value, b, c = (
        part.reshape(-1, chunk, number, part.shape[-1] // number).transpose(1, 2)
        for part, number in zip(convolved.split([INNER, SHARED, SHARED], -1), (heads, groups, groups), strict=True)
    )  # [chunks, heads or groups, chunk, width]
    log = sums.view(-1, chunk, heads).transpose(1, 2)
    scaled = value * step_sizes(step, w).view(-1, chunk, heads).transpose(1, 2).unsqueeze(-1)
    reach = torch.exp(log.unsqueeze(-1) - log.unsqueeze(-2)).tril()
    scores = (c @ b.transpose(-1, -2)).repeat_interleave(heads // groups, 1) * reach
    inside = scores @ scaled
    b, c = (part.repeat_interleave(heads // groups, 1) for part in (b, c))
    states = (b * torch.exp(log[..., -1:] - log).unsqueeze(-1)).transpose(-1, -2) @ scaled
    state, before = torch.zeros_like(states[0]), []
    for index in range(len(states)):
        before.append(state)
        state = state * torch.exp(log[index, :, -1])[:, None, None] + states[index]
    between = (c * torch.exp(log).unsqueeze(-1)) @ torch.stack(before)
    y = inside + between + w["skip"][:, None, None] * value
    return y.transpose(1, 2).reshape(-1, INNER)


def gated_norm(y: Tensor, gate: Tensor, w: dict[str, Tensor]) -> Tensor:
    gated = (y * F.silu(gate)).view(len(y), SMALL.num_groups, -1)
    return rms(gated, w["gated_norm"].view(SMALL.num_groups, -1)).view(len(y), -1)


class Fused(torch.autograd.Function):
    """A kernel that keeps its inputs alone and does its forward pass again in backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.function(*inputs), inputs, gradient)


Run = Callable[..., Tensor]


def plain(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return function(*inputs)


def core(projected: Tensor, w: dict[str, Tensor], run: Run) -> Tensor:
    gate, convolving, step = projected.split([INNER, INNER + 2 * SHARED, SMALL.num_heads], -1)
    convolved = run(lambda x: convolve(x, w), convolving)
    sums = run(lambda x: decays(x, w), step)
    y = run(lambda *parts: scan(*parts, w), convolved, step, sums)
    normalised = run(lambda *parts: gated_norm(*parts, w), y, gate)
    return F.linear(normalised, w["output"].T)


def block(x: Tensor, w: dict[str, Tensor], run: Run = plain, *, selective: bool = False) -> Tensor:
    projected = F.linear(run(lambda inputs: rms(inputs, w["norm"]), x), w["projection"])
    return run(lambda inputs: core(inputs, w, plain), projected) if selective else core(projected, w, run)


def test_the_plain_block_is_the_recurrence() -> None:
    """State' = decay x state + step x b value; output = c state + skip x value, token by token."""
    w, projected = weights(), torch.randn(TOKENS, 2 * INNER + 2 * SHARED + 8)
    step = projected[:, -8:]
    convolved = convolve(projected[:, INNER:-8], w)
    found = scan(convolved, step, decays(step, w), w)
    state, expected = torch.zeros(8, 10, 6), []
    for token, sizes in zip(convolved, step_sizes(step, w), strict=True):
        value = token[:INNER].view(8, 6)
        b, c = (part.view(4, 10).repeat_interleave(2, 0) for part in (token[INNER:-SHARED], token[-SHARED:]))
        keep = torch.exp(-torch.exp(w["decay"]) * sizes)
        state = state * keep[:, None, None] + sizes[:, None, None] * b[:, :, None] * value[:, None, :]
        expected.append((torch.einsum("hn,hnp->hp", c, state) + w["skip"][:, None] * value).flatten())
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_operations_are_those_that_torch_counts() -> None:
    w, x = weights(), torch.randn(TOKENS, SMALL.hidden, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = block(x, w)
    assert forward.get_total_flops() == forward_flop(SMALL, block_tokens=TOKENS, seq_len=TOKENS, units=ALL)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    scan_forward, scan_backward = (
        counter.get_flop_counts()["Global"][torch.ops.aten.bmm] for counter in (forward, backward)
    )
    assert scan_forward == score_flop(SMALL, TOKENS, TOKENS, ALL)
    assert scan_backward == score_backward_ratio(SMALL) * scan_forward


def test_short_sequences_have_short_chunks() -> None:
    assert score_flop(SMALL, TOKENS, 8, ALL) == score_flop(SMALL.model_copy(update={"chunk": 8}), TOKENS, 64, ALL)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_activations_are_what_autograd_keeps(recompute: str) -> None:
    w, x = weights(), torch.randn(TOKENS, SMALL.hidden, requires_grad=True)
    own = {tensor.untyped_storage().data_ptr() for tensor in w.values()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x, w, Fused.apply, selective=recompute == "selective")
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    share = Share.of(SMALL, 1, TOKENS, TOKENS)
    assert found == activation_bytes(SMALL, share, "fp32", recompute)
    y.sum().backward()
    assert x.grad is not None
    y = block(same := x.detach().requires_grad_(), w)
    y.sum().backward()
    torch.testing.assert_close(x.grad, same.grad)


def test_bytes_kept_by_a_rank_of_several() -> None:
    """Two ranks a group: B and C of it on both.  c own tokens, t of the block."""
    share, c, t = Share(8, 4, 32, Interval(2, 3), 32), 4, 32
    inner, shared, heads = 6, 2 * 10, 1
    projected, convolved, scanned, normalised = 2 * inner + shared + heads, inner + shared, inner, inner
    whole = 2 * (2 * c * 24 + t * (projected + convolved + scanned + normalised)) + 4 * t * heads
    assert activation_bytes(SMALL, share, "bf16") == whole
    assert activation_bytes(SMALL, share, "bf16", "keep") == whole + 2 * (t - c) * 24
    assert activation_bytes(SMALL, share, "bf16", "selective") == 2 * (2 * c * 24 + t * projected)
    assert activation_bytes(SMALL, share, "bf16", "full") == 2 * c * 24
    modes = ("none", "selective", "full")
    assert len({activation_bytes(SMALL, share, "bf16", m) + working_bytes(SMALL, share, "bf16", m) for m in modes}) == 1


@given(degree=st.integers(1, 8), tokens=st.integers(8, 60))
def test_ranks_of_a_block_do_the_work_of_one_and_that_of_shared_groups(degree: int, tokens: int) -> None:
    cuts = balanced_cuts(SMALL.num_heads, degree)
    ranks = [interval_of(cuts, part) for part in range(degree)]
    groups = sum(len({head // 2 for head in range(own.start, own.stop)}) for own in ranks)
    again = groups - SMALL.num_groups  # groups that a second rank has too
    width = 2 * SMALL.state_size
    products = sum(matrix_flop(SMALL, tokens, own) for own in ranks) - matrix_flop(SMALL, tokens, ALL)
    assert products == pytest.approx(2 * tokens * again * width * (SMALL.hidden + SMALL.conv_kernel))
    scans = sum(score_flop(SMALL, tokens, 64, own) for own in ranks) - score_flop(SMALL, tokens, 64, ALL)
    assert scans == pytest.approx(2 * tokens * again * SMALL.chunk * SMALL.state_size)
    elements = sum(local_num_elements(SMALL, own) for own in ranks)
    copies = again * width * (SMALL.hidden + SMALL.conv_kernel + 1) + (degree - 1) * SMALL.hidden
    assert elements == sum(tensor.num_elements for tensor in tensors_of(SMALL)) + copies
    for tensor in tensors_of(SMALL):
        held = {row for own in ranks for row in range(*local_rows(SMALL, tensor, own))}
        assert held == set(range(tensor.rows))


def test_products_leave_out_the_convolution_alone() -> None:
    share = Share(8, 4, 32, Interval(2, 3), 32)
    convolution = 2 * 32 * 4 * (6 + 2 * 10)
    assert sum(m.flop for m in products_of(SMALL, share)) == matrix_flop(SMALL, 32, Interval(2, 3)) - convolution


def test_nemotron_nano_is_its_config_and_has_its_published_size() -> None:
    """nvidia/NVIDIA-Nemotron-Nano-9B-v2: 8.89B; 27 Mamba-2, 25 MLP and 4 attention layers."""
    model = model_preset("nemotron-nano-9b-v2")
    assert model_from_config(NANO, name=model.name, where="config.json") == model
    assert num_parameters(model.modules()) == pytest.approx(8.9e9, rel=0.01)
    kinds = [module.kind for _, module in model.modules()]
    assert [kinds.count(kind) for kind in ("mamba2", "mlp", "attention")] == [27, 25, 4]
    assert [name for name, _ in model.modules()][1:3] == ["layer.0.mamba2", "layer.1.mlp"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hybrid_override_pattern": "M-*"}, "a text of 56 letters is needed, each one of M, *, -"),
        ({"hybrid_override_pattern": "E" * 56}, "a text of 56 letters is needed"),
        ({"mamba_proj_bias": True}, "projections of Mamba-2 layers have no bias"),
        ({"mamba_hidden_act": "gelu"}, "followed by silu"),
        ({"n_groups": 7}, "num_heads 128 is not a multiple of num_groups 7"),
        ({"chunk_size": None}, "the key 'chunk_size' is missing"),
    ],
)
def test_a_config_that_cannot_be_read_says_why(change: dict[str, object], expected: str) -> None:
    with pytest.raises(BadInputError) as caught:
        model_from_config({**NANO, **change}, name="m", where="config.json")
    assert expected in str(caught.value)


def make(degree: int, micro_batch: int) -> Plan:
    blocks = (degree,) * (4 // degree)
    stage = Stage(
        num_ranks=4, modules=tuple(ModulePlacement(module=name, blocks=blocks) for name, _ in MODEL.modules())
    )
    return Plan(
        made=Provenance(created_by="test", created_at="2026-11-30"),
        model=MODEL,
        cluster=cluster_preset("h100x4"),
        training=TrainingSpec(global_batch=4, seq_len=32),
        pipelines=(Pipeline(micro_batch=micro_batch, stages=(stage,)),),
        replicas=(Replica(pipeline=0, ranks=(0, 1, 2, 3), sequences=4),),
    )


def test_a_plan_is_priced_and_keeps_sequences_whole() -> None:
    plan = make(4, 1)
    assert price(plan, device_costs(plan.cluster, plan.training)).step_terms.tp_communication > 0
    with pytest.raises(ValueError, match=r"layer\.0\.mamba2: blocks \[2, 2\] do not hold whole sequences"):
        make(2, 1)


def test_nemotron_nano_is_planned_within_its_memory() -> None:
    problem = Problem(
        model=model_preset("nemotron-nano-9b-v2"),
        cluster=cluster_preset("h100x8"),
        training=TrainingSpec(global_batch=32, seq_len=8192),
        provenance=Provenance(created_by="test", created_at="2026-11-30"),
        memory_cap_bytes=36 * 2**30,
    )
    plan = make_plan(problem, device_costs, objective="step-time", freedom="modules", time_limit_seconds=30, top_k=0)
    assert plan.certificate is not None
    assert plan.certificate.gap < 0.01
    assert price(plan, device_costs(plan.cluster, plan.training)).peak_memory_bytes <= 36 * 2**30
    seconds = [rung.step_time_seconds for rung in plan.ladder]
    assert seconds == sorted(seconds, reverse=True)


def test_the_executor_and_the_exports_refuse_it_in_one_sentence() -> None:
    layout = ModuleLayout.__new__(ModuleLayout)
    object.__setattr__(layout, "module", SMALL)
    object.__setattr__(layout, "name", "layer.0.mamba2")
    with pytest.raises(BadInputError, match=r"layer\.0\.mamba2 is of kind mamba2, which the executor does not train"):
        build_module(
            layout,
            Block.__new__(Block),
            chunk=Interval(0, 4),
            seq_len=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    with pytest.raises(BadInputError, match="a layer has Mamba-2, which this export does not write"):
        model_arguments(MODEL)
    with pytest.raises(BadInputError, match="no model of the sizes of small hybrid"):
        check_model(MODEL)


def test_squared_relu_is_the_square_of_relu() -> None:
    x = torch.linspace(-2, 2, 41, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(squared_relu(x), torch.relu(x) ** 2)
    assert torch.autograd.gradcheck(squared_relu, (x,))
