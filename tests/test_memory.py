"""Memory formulas against what autograd really keeps, against the executor's buckets, and against each other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_models.activations import activation_bytes
from cost_models.buckets import BUCKET_ELEMENTS, holdings
from cost_models.memory import MASTER_BYTES, MOMENT_BYTES, static_bytes
from cost_models.share import Share
from cost_models.working import MAX_LOGIT_ELEMENTS, working_bytes
from executor import buckets, functions
from executor.attention import AttentionModule
from executor.clock import Clock
from executor.collectives import Block
from executor.layout import ModuleLayout, tensor_holdings
from executor.memory import LiveStorages
from executor.modules import BlockModule
from executor.stage import StageModule, build_module
from specs.layout import Interval, balanced_cuts
from specs.model import Attention, Embedding, Head, Mlp, Module, Moe, Norm, num_units
from specs.plan import ModulePlacement, Pipeline, Plan, Recompute, Replica, Stage
from specs.schedule import Schedule
from tests.layouts import ReplicaShape, StageShape, build, small_model
from tests.plans import plan, rank_memory, tiny_model

LAYERNORM = Norm(kind="layernorm")
MODULES: dict[str, Module] = {
    "embedding": Embedding(hidden=128, vocab=500),
    "attention": Attention(hidden=128, num_heads=8, num_kv_heads=4, head_dim=16),
    "attention, layernorm": Attention(
        hidden=128, num_heads=6, num_kv_heads=6, head_dim=24, norm=LAYERNORM, rope_theta=None, qkv_bias=True
    ),
    "attention, qk norm": Attention(hidden=128, num_heads=8, num_kv_heads=2, head_dim=16, qk_norm=True),
    "mlp": Mlp(hidden=128, ffn=350),
    "mlp, plain": Mlp(hidden=128, ffn=512, gated=False, activation="gelu", norm=LAYERNORM, bias=True),
    "mlp, squared and gated": Mlp(hidden=128, ffn=350, activation="relu2"),
    "mlp, squared": Mlp(hidden=128, ffn=512, gated=False, activation="relu2"),
    "head": Head(hidden=128, vocab=500),
    "head, capped": Head(hidden=128, vocab=500, logit_cap=30.0),
    "attention, norm after": Attention(hidden=128, num_heads=8, num_kv_heads=4, head_dim=16, post_norm=True),
    "attention, window": Attention(hidden=128, num_heads=8, num_kv_heads=8, head_dim=16, window=32),
    "attention, capped": Attention(
        hidden=128, num_heads=8, num_kv_heads=4, head_dim=16, post_norm=True, score_cap=50.0, qk_norm=True
    ),
    "mlp, norm after": Mlp(hidden=128, ffn=350, post_norm=True, activation="gelu_tanh"),
    "experts": Moe(hidden=128, num_experts=8, experts_per_token=2, expert_ffn=192),
    "experts and shared ones": Moe(hidden=128, num_experts=8, experts_per_token=2, expert_ffn=192, shared_ffn=300),
    "many experts": Moe(hidden=64, num_experts=32, experts_per_token=4, expert_ffn=64),
    "few experts": Moe(hidden=128, num_experts=4, experts_per_token=2, expert_ffn=448),
}


class LonelyBlock(Block):
    """One rank of a block, without the others: collectives keep shapes and forget sums."""

    def all_gather(self, chunk: torch.Tensor) -> torch.Tensor:
        return chunk if self.size == 1 else torch.cat([chunk] * self.size)

    def reduce_scatter(self, partial: torch.Tensor) -> torch.Tensor:
        return partial if self.size == 1 else partial[: self.token_counts[self.position]].clone()

    def all_to_all(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """From every member what this one sends to itself; of counts what it sends to each."""
        if self.size == 1 or rows.dim() == 1:
            return rows
        own = rows.split(sent)[self.position]
        return own.repeat((sum(received) // max(1, len(own)) + 1, 1))[: sum(received)].clone()

    def all_reduce(self, value: torch.Tensor, op: object = None) -> torch.Tensor:
        del op
        return value


def built_module(module: Module, share: Share, recompute: Recompute) -> tuple[BlockModule, torch.Tensor]:
    """The executor's module on one rank of a block, with small random weights, and an input chunk for it."""
    layout = ModuleLayout(
        name="module",
        module=module,
        placement=ModulePlacement(module="module", blocks=(share.degree,), recompute=recompute),
        units=share.units,
        unit_cuts=balanced_cuts(num_units(module), share.degree),
        block_ranks=tuple(range(share.degree)),
        position=0,
        token_counts=(share.chunk_tokens,) * share.degree,
        block_tokens=Interval(0, share.block_tokens),
    )
    block = LonelyBlock(None, 0, layout.token_counts, Clock(torch.device("cpu")))
    built = build_module(
        layout,
        block,
        chunk=Interval(0, share.chunk_tokens),
        seq_len=share.seq_len,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    chunk = torch.randn(share.chunk_tokens, module.hidden)
    if isinstance(module, Moe):
        chunk = _balanced(module, built, share.chunk_tokens)
    return built, chunk.requires_grad_()


def kept_bytes(module: Module, share: Share, recompute: Recompute) -> int:
    """Bytes of distinct storages that autograd keeps, weights left out."""
    built, chunk = built_module(module, share, recompute)
    weights = {parameter.untyped_storage().data_ptr() for parameter in built.parameters()}
    if isinstance(built, AttentionModule) and built.mask is not None:  # one for all modules, counted once
        weights.add(built.mask.untyped_storage().data_ptr())
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(share.block_tokens, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        StageModule([built])(ids if module.kind == "embedding" else chunk, ids, 1.0)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def peak_bytes(module: Module, share: Share, recompute: Recompute) -> int:
    """Most bytes of live tensors from the input chunk on through forward and backward, weights left out.

    A gradient of a weight goes as soon as it is whole, as the executor's buckets take it.
    """
    built, chunk = built_module(module, share, recompute)
    live = LiveStorages()
    live.ignore(chunk.untyped_storage())  # else counted twice where a view of it is made
    for parameter in built.parameters():
        live.ignore(parameter.untyped_storage())
        parameter.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
    ids = torch.zeros(share.block_tokens, dtype=torch.int64)
    with live:
        out = StageModule([built])(ids if module.kind == "embedding" else chunk, ids, 1.0)
        out.backward(torch.ones_like(out))
    return live.peak_bytes + (0 if module.kind == "embedding" else 4 * chunk.numel())


def _balanced(module: Moe, built: torch.nn.Module, num_tokens: int) -> torch.Tensor:
    """Tokens that the router sends to all experts alike: experts shuffled again and again, dealt out to tokens."""
    built.norm.data.fill_(1.0)
    built.router.data.copy_(torch.eye(module.num_experts, module.hidden))
    chunk = torch.zeros(num_tokens, module.hidden)
    generator = torch.Generator().manual_seed(0)
    rounds = num_tokens * module.experts_per_token // module.num_experts
    dealt = torch.cat([torch.randperm(module.num_experts, generator=generator) for _ in range(rounds)])
    chunk[torch.arange(num_tokens).repeat_interleave(module.experts_per_token), dealt] = 1.0
    return chunk


def modes(doublings: int) -> list[tuple[str, int, str]]:
    """Module, degree, recompute."""
    found = [(name, 2**i, mode) for name in MODULES for i in range(doublings) for mode in ("none", "selective", "full")]
    found += [("few experts", 4, mode) for mode in ("none", "selective", "full") if doublings < 3]
    return found + [(name, 2, "keep") for name, module in MODULES.items() if module.kind in ("attention", "mlp")]


@pytest.mark.parametrize(("name", "degree", "recompute"), modes(3))
def test_activations_are_what_autograd_keeps(name: str, degree: int, recompute: Recompute) -> None:
    module = MODULES[name]
    share = Share.of(module, degree, 8 * 64, 64)
    measured = kept_bytes(module, share, recompute)
    assert activation_bytes(module, share, "fp32", recompute) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(("name", "degree", "recompute"), modes(2))
def test_peak_of_a_module_is_that_of_live_tensors(name: str, degree: int, recompute: Recompute) -> None:
    """The output is the next module's input: kept there, and held here by the caller."""
    module = MODULES[name]
    share = Share.of(module, degree, 8 * 64, 64)
    kept = activation_bytes(module, share, "fp32", recompute)
    out = 4 if module.kind == "head" else 4 * share.chunk_tokens * module.hidden
    predicted = kept + working_bytes(module, share, "fp32", recompute) + out
    assert predicted == pytest.approx(peak_bytes(module, share, recompute), rel=0.11)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_peak_is_that_of_the_virtual_stage_at_work(schedule: Schedule) -> None:
    """Beside each action, what is held then and what the modules of its virtual stage work with; and of the chunks on
    their way one of each kind, whatever the number of virtual stages.
    """
    shapes = [StageShape(1), StageShape(1)]
    model = tiny_model(num_layers=5)
    layout = build(model, [ReplicaShape(shapes, 1, 4, schedule, 1 if schedule == "1f1b" else 3)], seq_len=8)
    (pipeline,), chain, chunk = layout.pipelines, dict(model.modules()), 4 * 8 * model.hidden
    for index, stage in enumerate(pipeline.stages):
        shares = {p.module: Share.of(chain[p.module], 1, 8, 8) for p in stage.modules}
        kept, working = (
            [[of(chain[p.module], shares[p.module], "fp32") for p in run] for run in stage.runs()]
            for of in (activation_bytes, working_bytes)
        )
        held, most = 0, 0
        for kind, _, virtual in pipeline.stage_actions(4)[index]:
            held += sum(kept[virtual]) * (kind == "F")
            most = max(most, held + max(working[virtual]))
            held -= sum(kept[virtual]) * (kind == "B")
        terms = rank_memory(layout, 0, index, 0)
        assert terms.activations + terms.working == most
        assert terms.communication == (2 if schedule == "1f1b" else 4) * chunk


def test_constants_are_those_of_the_executor() -> None:
    assert BUCKET_ELEMENTS == buckets.BUCKET_ELEMENTS
    assert MAX_LOGIT_ELEMENTS == functions.MAX_LOGIT_ELEMENTS


def unlike(zero: int, *, tied: bool = False) -> Plan:
    """Two replicas with other stages, blocks and cuts."""
    first = [StageShape(3, {"mlp": (2, 1), "head": (1, 2)}), StageShape(2, {"attention": (2,), "mlp": (1, 1)})]
    second = [StageShape(3, {"mlp": (1, 1, 1), "embedding": (2, 1)})]
    shapes = [ReplicaShape(first, micro_batch=6, sequences=12), ReplicaShape(second, micro_batch=3, sequences=6)]
    return build(small_model(tied=tied), shapes, zero=zero)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_static_bytes_are_those_of_the_executors_buckets(zero: int, tied: bool) -> None:
    layout = unlike(zero, tied=tied)
    gradients = dict.fromkeys(range(layout.world_size), 0.0)
    optimizer = dict.fromkeys(range(layout.world_size), 0.0)
    weights = dict.fromkeys(range(layout.world_size), 0)
    for bucket in buckets.bucket_layouts(tensor_holdings(layout)):
        for owner in bucket.owners:
            weights[owner] += 4 * bucket.num_elements
            gradients[owner] += 4 * bucket.num_elements / (len(bucket.owners) if bucket.zero == 2 else 1)
            optimizer[owner] += MOMENT_BYTES * bucket.num_elements / (len(bucket.owners) if bucket.zero else 1)
    process = 0
    for number, pipeline in enumerate(layout.pipelines):
        for index, stage in enumerate(pipeline.stages):
            for rank in range(stage.num_ranks):
                terms = rank_memory(layout, number, index, rank)
                assert terms.gradients == pytest.approx(gradients[process], abs=1)
                assert terms.optimizer == pytest.approx(optimizer[process], abs=1)
                assert terms.weights >= weights[process]
                process += 1
    assert process == layout.world_size


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.sampled_from([0, 1, 2, 3]))
def test_module_form_agrees_with_the_plan(degree: int, replicas: int, zero: int) -> None:
    """The form that the search adds up equals the plan's, for equal blocks that divide."""
    model = tiny_model()
    layout = plan(ranks=8, replicas=replicas, degree=degree, model=model, micro_batch=8)
    layout = _with_zero(layout, zero)
    terms = rank_memory(layout, 0, 0, 0)
    parts = [
        static_bytes(module, degree=degree, num_copies=8 // degree * replicas, precision="bf16", zero=zero)
        for _, module in model.modules()
    ]
    assert terms.weights == pytest.approx(sum(part.weights for part in parts), abs=len(parts))
    assert terms.gradients == pytest.approx(sum(part.gradients for part in parts), abs=len(parts))
    assert terms.optimizer == pytest.approx(sum(part.optimizer for part in parts), abs=len(parts))


def _with_zero(layout: Plan, zero: int) -> Plan:
    stages = tuple(
        stage.model_copy(
            update={"modules": tuple(placement.model_copy(update={"zero": zero}) for placement in stage.modules)}
        )
        for stage in layout.pipelines[0].stages
    )
    return layout.model_copy(update={"pipelines": (layout.pipelines[0].model_copy(update={"stages": stages}),)})


def test_shared_kv_heads_have_more_owners() -> None:
    """Two KV heads over eight ranks: each is held by four, and their optimizer state is shared by four."""
    wide = Attention(hidden=64, num_heads=8, num_kv_heads=8, head_dim=8)
    narrow = Attention(hidden=64, num_heads=8, num_kv_heads=2, head_dim=8)
    common = 2 * 8 * 64 + 64 / 8  # query and output rows of one head, its part of the norm
    state = MOMENT_BYTES + MASTER_BYTES
    options = {"degree": 8, "num_copies": 1, "precision": "bf16", "zero": 1}
    assert static_bytes(wide, **options).optimizer == state * (common + 2 * 8 * 64)
    assert static_bytes(narrow, **options).optimizer == state * (common + 2 * 8 * 64 / 4)


def test_in_flight_micro_batches_multiply_activations() -> None:
    one = plan(stages=4, ranks=1, micro_batches=8)
    first, last = rank_memory(one, 0, 0, 0), rank_memory(one, 0, 3, 0)
    share = Share(1, 32, 32, Interval(0, 256), 32)
    assert last.activations == sum(
        activation_bytes(module, dataclasses.replace(share, units=Interval(0, units)), "bf16")
        for module, units in _modules_of(one, 3)
    )
    assert first.activations == 4 * sum(
        activation_bytes(module, dataclasses.replace(share, units=Interval(0, units)), "bf16")
        for module, units in _modules_of(one, 0)
    )


def _modules_of(layout: Plan, stage: int) -> list[tuple[Module, int]]:
    chain = dict(layout.model.modules())
    placed = layout.pipelines[0].stages[stage].modules
    return [(chain[p.module], p.units_of(0, chain[p.module]).size) for p in placed]


@given(st.sampled_from(sorted(MODULES)), st.sampled_from([1, 2, 4]), st.integers(1, 6))
def test_recomputation_never_keeps_more(name: str, degree: int, sequences: int) -> None:
    module = MODULES[name]
    share = Share.of(module, degree, 64 * sequences * degree, 64)
    kept = [activation_bytes(module, share, "bf16", mode) for mode in ("none", "selective", "full")]
    working = [working_bytes(module, share, "bf16", mode) for mode in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert min(working) == working[0]


def test_every_member_of_a_bucket_holds_it() -> None:
    """Elements over buckets, each times its holders, are what the executor's processes hold."""
    layout = unlike(0)
    counted = sum(bucket.num_elements * len(bucket.members) for bucket in holdings(layout).buckets)
    held = sum(h.elements.size for entry in tensor_holdings(layout).values() for h in entry.holdings)
    assert counted == held


def test_stage_of_one_rank_and_many_replicas() -> None:
    """Replicas that share a pipeline are owners too."""
    base = plan(ranks=1, replicas=1)
    many = base.model_copy(
        update={
            "replicas": tuple(Replica(pipeline=0, ranks=(i,), sequences=2) for i in range(4)),
            "pipelines": (_zeroed(base.pipelines[0]),),
        }
    )
    assert rank_memory(many, 0, 0, 0).optimizer == pytest.approx(rank_memory(base, 0, 0, 0).optimizer / 4, abs=1)


def _zeroed(pipeline: Pipeline) -> Pipeline:
    stages = tuple(
        Stage(num_ranks=s.num_ranks, modules=tuple(p.model_copy(update={"zero": 1}) for p in s.modules))
        for s in pipeline.stages
    )
    return pipeline.model_copy(update={"stages": stages})
