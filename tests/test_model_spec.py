"""Models: the chain of modules, widths that must agree, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from specs.base import first_problem
from specs.model import UNIT_NAMES, Attention, Embedding, Head, Layer, Mlp, ModelSpec, Moe, num_units
from specs.presets import model_preset

ATTENTION = Attention(hidden=8, num_heads=4, num_kv_heads=2, head_dim=2)
MLP = Mlp(hidden=8, ffn=13)
MOE = Moe(hidden=8, num_experts=5, experts_per_token=2, expert_ffn=3)


def model(*layers: Layer, **changes: object) -> ModelSpec:
    fields: dict[str, object] = {
        "name": "m",
        "embedding": Embedding(hidden=8, vocab=11),
        "layers": layers,
        "head": Head(hidden=8, vocab=11),
    }
    return ModelSpec.model_validate({**fields, **changes})


def test_chain_unrolls_repeats_and_leaves_out_absent_parts() -> None:
    chain = model(
        Layer(attention=ATTENTION, feed_forward=MLP, repeat=2),
        Layer(feed_forward=MOE),
        Layer(attention=ATTENTION),
        Layer(),
        Layer(feed_forward=MLP),
    ).modules()
    assert [name for name, _ in chain] == [
        "embedding",
        "layer.0.attention",
        "layer.0.mlp",
        "layer.1.attention",
        "layer.1.mlp",
        "layer.2.moe",
        "layer.3.attention",
        "layer.5.mlp",
        "head",
    ]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_number_of_layers_counts_repeats(repeats: list[int]) -> None:
    built = model(*(Layer(attention=ATTENTION, feed_forward=MLP, repeat=repeat) for repeat in repeats))
    assert built.num_layers == sum(repeats)
    names = [name for name, _ in built.modules()]
    assert len(names) == len(set(names)) == 2 * sum(repeats) + 2


def test_units() -> None:
    assert [num_units(part) for part in (Embedding(hidden=8, vocab=11), ATTENTION, MLP, MOE)] == [11, 4, 13, 5]
    kinds = {module.kind for _, module in model_preset("tiny").modules()}
    assert set(UNIT_NAMES) == kinds | {"moe", "latent_attention", "mamba2"}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: Attention(hidden=8, num_heads=6, num_kv_heads=4, head_dim=2), "6 is not a multiple of num_kv_heads 4"),
        (lambda: model(Layer(feed_forward=Mlp(hidden=9, ffn=3))), "layer.0.mlp has hidden 9, the embedding has 8"),
        (lambda: model(Layer(), head=Head(hidden=8, vocab=12, tied=True)), "tied but has vocab 12, the embedding 11"),
        (lambda: model(), "layers: Tuple should have at least 1 item"),
        (lambda: model(Layer(), colour="red"), "colour: Extra inputs are not permitted"),
        (lambda: Layer(repeat=0), "repeat: Input should be greater than 0"),
        (lambda: Layer(repeat=10**9), "repeat: Input should be less than or equal to 10000"),
        (lambda: Mlp(hidden=0, ffn=3), "hidden: Input should be greater than 0"),
        (lambda: Layer.model_validate({"feed_forward": {"kind": "fft"}}), "feed_forward: Input tag 'fft'"),
    ],
)
def test_refused(build, expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        build()
    assert expected in first_problem(caught.value)


def test_specs_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        MLP.ffn = 4


def test_equal_modules_hash_alike() -> None:
    assert len({MLP, Mlp(hidden=8, ffn=13), Mlp(hidden=8, ffn=14)}) == 2


def test_json_round_trip_of_unlike_layers() -> None:
    built = model(Layer(attention=ATTENTION, feed_forward=MOE), Layer(attention=ATTENTION, feed_forward=MLP, repeat=3))
    assert ModelSpec.model_validate_json(built.model_dump_json()) == built
    assert ModelSpec.model_validate_json(built.model_dump_json()).sha256() == built.sha256()


def test_equal_modules_are_one_object_in_a_model_from_a_file_too() -> None:
    model = model_preset("openelm-3b")
    apart = ModelSpec.model_validate(model.model_dump())
    modules = [module for _, module in apart.modules()]
    assert len({id(module) for module in modules}) == len(set(modules)) < len(modules)
    assert apart.modules() == model.modules()
