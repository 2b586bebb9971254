"""`config.json` files: the same number of parameters as transformers builds, and clear refusals."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specs.errors import BadInputError
from specs.huggingface import MODEL_TYPES, model_from_config
from specs.model import ModelSpec, RopeScaling
from specs.presets import load_model, model_preset
from specs.tensors import num_parameters

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
OPENELM = {"vocab_size": 97, "model_dim": 48, "num_transformer_layers": 2, "head_dim": 8}
NEMOTRON_H = {
    **{key: size for key, size in SMALL.items() if key != "max_position_embeddings"},
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 32,
}
SIZES = {"gpt2": GPT2, "openelm": OPENELM, "nemotron_h": NEMOTRON_H}


def read(config: dict[str, Any]) -> ModelSpec:
    return model_from_config(config, name="m", where="model config.json")


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(BadInputError) as caught:
        read(config)
    message = str(caught.value)
    assert message.startswith("model config.json")
    assert "\n" not in message
    return message


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", SMALL),
    ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    ("llama", {**SMALL, "tie_word_embeddings": True, "head_dim": 10}),
    ("llama", {**SMALL, "num_key_value_heads": None}),
    ("mistral", {**SMALL, "sliding_window": 16}),
    ("mistral", {**SMALL, "head_dim": 12, "sliding_window": None}),
    ("qwen2", SMALL),
    ("qwen2", {**SMALL, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    ("qwen3", SMALL),
    ("qwen3", {**SMALL, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ("mixtral", {**SMALL, "num_local_experts": 5, "num_experts_per_tok": 2}),
    (
        "qwen3_moe",
        {
            **SMALL,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    ("gemma2", SMALL),
    ("gemma2", {**SMALL, "attn_logit_softcapping": None, "tie_word_embeddings": False, "attention_bias": True}),
    ("gemma3_text", {**SMALL, "sliding_window": 16, "query_pre_attn_scalar": 48}),
    ("gpt2", GPT2),
    ("gpt2", {**GPT2, "n_inner": 100, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("model_type", "options"), CASES)
def test_same_parameters_as_transformers(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Oracle: the model that transformers builds from the very file that we read."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **options)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    ours = load_model(str(tmp_path))
    assert num_parameters(ours.modules()) == theirs.num_parameters()
    assert ours.num_layers == 3
    assert ours.max_positions == 64
    assert ours.head.tied == bool(config.tie_word_embeddings)


def test_published_llama_31_config_equals_the_preset() -> None:
    """Keys as on the model's card (older rope_scaling form)."""
    config = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
    }
    assert read(config).model_copy(update={"name": "llama-3-405b"}) == model_preset("llama-3-405b")


def test_published_gpt2_config_equals_the_preset() -> None:
    config = {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "vocab_size": 50257,
    }
    assert read(config).model_copy(update={"name": "gpt2"}) == model_preset("gpt2")


def test_rope_of_transformers_5_and_4_read_alike() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    old = read({"model_type": "llama", **SMALL, "rope_theta": 7e5, "rope_scaling": scaling})
    new = read({"model_type": "llama", **SMALL, "rope_parameters": {"rope_theta": 7e5, **scaling}})
    assert old == new
    attention = old.layers[0].attention
    assert attention is not None
    assert attention.rope_theta == 7e5
    assert attention.rope_scaling == RopeScaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=32
    )


def test_windows_follow_max_window_layers() -> None:
    model = read(
        {"model_type": "qwen2", **SMALL, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    )
    windows = [layer.attention.window for layer in model.layers for _ in range(layer.repeat) if layer.attention]
    assert windows == [None, None, 16]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_missing_size_is_named(model_type: str) -> None:
    full: dict[str, Any] = {
        **SIZES.get(model_type, SMALL),
        "num_query_heads": [6, 8],
        "num_kv_heads": [3, 4],
        "ffn_multipliers": [0.5, 1.9],
        "model_type": model_type,
        "hybrid_override_pattern": "M-*",
        "norm_topk_prob": True,
        **({"num_local_experts": 4} if model_type == "mixtral" else {"num_experts": 4}),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    }
    read(full)
    optional = {"num_key_value_heads", "max_position_embeddings"}
    if model_type == "qwen3_moe":  # the width of dense layers, of which there are none here
        optional.add("intermediate_size")
    for key in set(SIZES.get(model_type, SMALL)) - optional:
        without = {name: value for name, value in full.items() if name != key}
        assert f"the key '{key}' is missing" in refusal(without)


def test_openelm_270m_has_its_published_size() -> None:
    """The lists of apple/OpenELM-270M's config.json; 271,527,168 parameters by its model card."""
    model = read(
        {
            "model_type": "openelm",
            "vocab_size": 32000,
            "model_dim": 1280,
            "num_transformer_layers": 16,
            "head_dim": 64,
            "num_query_heads": [12, 12, 12, 12, 12, 16, 16, 16, 16, 16, 16, 16, 20, 20, 20, 20],
            "num_kv_heads": [3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5],
            "ffn_multipliers": [
                0.5,
                0.73,
                0.97,
                1.2,
                1.43,
                1.67,
                1.9,
                2.13,
                2.37,
                2.6,
                2.83,
                3.07,
                3.3,
                3.53,
                3.77,
                4.0,
            ],
            "normalize_qk_projections": True,
        }
    )
    assert num_parameters(model.modules()) == 271_527_168


def test_openelm_lists_are_checked() -> None:
    lists = {"num_query_heads": [6, 8], "num_kv_heads": [3, 4], "ffn_multipliers": [0.5, 1.9]}
    whole = {"model_type": "openelm", **OPENELM, **lists}
    assert "a list of 2 positive numbers is needed" in refusal({**whole, "num_kv_heads": [3]})
    assert "a list of 2 positive numbers is needed" in refusal({**whole, "ffn_multipliers": 4.0})
    assert "need whole numbers" in refusal({**whole, "num_query_heads": [6.0, 8]})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "bloom"}, "model_type 'bloom' is not supported; supported are gemma2, gemma3_text, gpt2"),
        ({"hidden_size": "48"}, "'hidden_size' is '48', a positive whole number is needed"),
        ({"hidden_size": True}, "'hidden_size' is True"),
        ({"num_hidden_layers": 10**12}, "more than 10,000 layers"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"num_key_value_heads": 4}, "num_heads 6 is not a multiple of num_kv_heads 4"),
        ({"num_attention_heads": 7}, "hidden size 48 is not a multiple of 7 heads"),
        ({"hidden_act": "mish"}, "'hidden_act' is 'mish'; supported are gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "the key 'factor' is missing"),
        ({"rope_scaling": "llama3"}, "'rope_scaling' is 'llama3', an object is needed"),
        ({"rope_theta": -1}, "'rope_theta' is -1, a positive number is needed"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5, which is not supported"),
        ({"attention_bias": "yes"}, "'attention_bias' is 'yes', true or false is needed"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'quantization_config'"),
        ({"model_type": "qwen3_moe"}, "'norm_topk_prob' is false"),
        ({"model_type": "gpt2", **GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]},
            "layer_types has 1 entries for 3 layers",
        ),
    ],
)
def test_refusals(change: dict[str, Any], expected: str) -> None:
    assert expected in refusal({"model_type": "llama", **SMALL, **change})


def test_neither_format(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(BadInputError, match=r"neither a plait model .* nor a Hugging Face"):
        load_model(str(path))


OPTIONAL_KEYS = [
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "mlp_only_layers",
    "head_dim",
    "sliding_window",
    "use_sliding_window",
    "norm_topk_prob",
    "num_experts",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "quantization_config",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(MODEL_TYPES),
    st.dictionaries(
        st.sampled_from(
            sorted({*SMALL, *GPT2, *OPTIONAL_KEYS}),
        ),
        JSON,
        max_size=3,
    ),
)
def test_any_value_under_any_key_is_read_or_refused(model_type: str, change: dict[str, Any]) -> None:
    with contextlib.suppress(BadInputError):
        read({"model_type": model_type, **SMALL, **GPT2, **change})
