"""Small random models of every supported family, made by `transformers`, and plans for them."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
import transformers

from specs.model import ModelSpec
from specs.plan import Plan
from tests.layouts import ReplicaShape, StageShape, build

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 50,
    "max_position_embeddings": 32,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(
        **_SIZES, rope_parameters={**_LLAMA3, "rope_theta": 500000.0}, attention_bias=True
    ),
    "mistral": transformers.MistralConfig(**_SIZES, sliding_window=3),
    "qwen2": transformers.Qwen2Config(**{**_SIZES, "tie_word_embeddings": True}),
    "qwen3": transformers.Qwen3Config(**_SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    "gemma2": transformers.Gemma2Config(
        **{**_SIZES, "tie_word_embeddings": True},
        sliding_window=3,
        query_pre_attn_scalar=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3_text": transformers.Gemma3TextConfig(
        **{**_SIZES, "tie_word_embeddings": True},
        sliding_window=3,
        query_pre_attn_scalar=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "mixtral": transformers.MixtralConfig(**_SIZES, num_local_experts=5, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **_SIZES,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=10,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=61, n_embd=24, n_layer=3, n_head=6, n_positions=32, bos_token_id=0, eos_token_id=0
    ),
}


def save_random(family: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A model with every tensor drawn at random (norms and biases too), saved to `folder`."""
    # By name, so that adding a family changes no other; with 9 none of them says one token for ever.
    torch.manual_seed(zlib.crc32(family.encode()) + 9)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[family], attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model


def plans(model: ModelSpec) -> dict[str, Plan]:
    """One rank, tensor parallel, pipeline, degrees that differ between modules, unlike replicas."""
    mixed = {
        "attention": (2, 2),
        "layer.1.attention": (4,),
        "mlp": (4,),
        "moe": (2, 2),
        "embedding": (1, 1, 2),
        "head": (3, 1),
    }
    return {
        "one rank": build(model, [ReplicaShape([StageShape(1)], 1, 2)]),
        "tp 4": build(model, [ReplicaShape([StageShape(4)], 1, 2)]),
        "pp 3": build(model, [ReplicaShape([StageShape(1), StageShape(2), StageShape(1)], 1, 2)]),
        "mixed": build(model, [ReplicaShape([StageShape(4, mixed)], 2, 2)]),
        "replicas tp 3 and pp 2": build(
            model,
            [ReplicaShape([StageShape(3)], 1, 2), ReplicaShape([StageShape(1), StageShape(1)], 1, 1)],
        ),
    }
