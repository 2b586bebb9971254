"""A model as a chain of modules: embedding, then per layer attention and a feed-forward part, then the head.

Layers may all differ; a layer may lack any part (a "no-op" block) or have Mamba-2 for attention.  Each module owns
its input norm, so that between modules only the residual stream exists.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from typing_extensions import Self

from specs.base import Document, Spec

# Deeper than any model there is; a mistyped number must not fill memory with modules.
MAX_LAYERS = 10_000

NormKind = Literal["rmsnorm", "layernorm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]  # relu2: the square of relu


class Norm(Spec):
    """Normalisation in front of a module; `layernorm` has a bias, `rmsnorm` has none.

    `unit_offset`: the factor is 1 + weight (Gemma), so that weights start at zero.
    """

    kind: NormKind = "rmsnorm"
    epsilon: float = 1e-5
    unit_offset: bool = False


class RopeScaling(Spec):
    """Llama 3.1's frequency scaling of rotary embeddings (arXiv 2407.21783, section 3.4.3 and its release code)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: PositiveInt


class Embedding(Spec):
    """Token embedding, cut by vocabulary rows; learned positions when `num_positions` > 0.

    `scale` multiplies the tokens' rows (Gemma: the square root of the width).
    """

    kind: Literal["embedding"] = "embedding"
    hidden: PositiveInt
    vocab: PositiveInt
    num_positions: int = 0
    scale: PositiveFloat | None = None


class Attention(Spec):
    """Causal self-attention, cut by query heads together with the KV heads they read.

    `post_norm`: a norm of the same kind on the output too, before it is added to the residual stream.  `score_scale`
    None: 1 / sqrt(head_dim).  `score_cap` c: scores become c tanh(score / c).  `rope_factor`: positions are divided
    by it (linear scaling).
    """

    kind: Literal["attention"] = "attention"
    hidden: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    norm: Norm = Norm()
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    rope_theta: float | None = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_factor: PositiveFloat = 1.0
    window: int | None = None
    post_norm: bool = False
    score_scale: PositiveFloat | None = None
    score_cap: PositiveFloat | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "every KV head must serve the same number of query heads"
            )
        return self


class LatentAttention(Spec):
    """Causal self-attention over low-rank queries, keys and values (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A token's `query_rank` and `kv_rank` numbers are expanded to heads of `head_dim` (keys also carry `rope_dim` shared
    rotary numbers, queries their own) and values of `value_dim`.  Cut by heads; low-rank weights are on every rank.
    """

    kind: Literal["latent_attention"] = "latent_attention"
    hidden: PositiveInt
    num_heads: PositiveInt
    query_rank: PositiveInt
    kv_rank: PositiveInt
    head_dim: PositiveInt
    rope_dim: PositiveInt
    value_dim: PositiveInt
    norm: Norm = Norm()
    rope_theta: float = 10000.0

    @property
    def key_dim(self) -> int:
        """Width of one query or key: the part without and the part with positions."""
        return self.head_dim + self.rope_dim

    @property
    def latent_width(self) -> int:
        """Numbers per token from which all heads are expanded."""
        return self.query_rank + self.kv_rank + self.rope_dim


class Mamba2(Spec):
    """Selective state space of structured matrices (Mamba-2, arXiv 2405.21060, section 7), cut by heads.

    The input is projected to a gate and values of num_heads x head_dim, B and C of num_groups x `state_size`, and a
    step size per head.  Values, B and C go through a causal convolution over `conv_kernel` tokens of each channel and a
    scan by chunks of `chunk` tokens, whose gated output is normalised.  Heads of a group share its B and C; a rank has
    those of its heads, as KV heads.
    """

    kind: Literal["mamba2"] = "mamba2"
    hidden: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt
    num_groups: PositiveInt
    state_size: PositiveInt
    conv_kernel: PositiveInt
    conv_bias: bool = True
    chunk: PositiveInt = 256
    norm: Norm = Norm()

    @model_validator(mode="after")
    def _groups_divide(self) -> Self:
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_groups {self.num_groups}; every group must serve "
                "the same number of heads"
            )
        return self

    @property
    def num_kv_heads(self) -> int:
        """Groups: their B and C are to heads what keys and values are to query heads (the paper's section 7.2)."""
        return self.num_groups


class Mlp(Spec):
    """Feed-forward part, cut by FFN columns (gate and up alike); `post_norm` as of attention."""

    kind: Literal["mlp"] = "mlp"
    hidden: PositiveInt
    ffn: PositiveInt
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False
    norm: Norm = Norm()
    post_norm: bool = False


class Moe(Spec):
    """Token-choice mixture of experts with optional shared experts, cut by experts (shared ones by columns)."""

    kind: Literal["moe"] = "moe"
    hidden: PositiveInt
    num_experts: PositiveInt
    experts_per_token: PositiveInt
    expert_ffn: PositiveInt
    shared_ffn: int = 0
    activation: Activation = "silu"
    norm: Norm = Norm()


class Head(Spec):
    """Final norm, projection to the vocabulary and cross-entropy, cut by vocabulary rows.

    `logit_cap` c: logits become c tanh(logit / c).
    """

    kind: Literal["head"] = "head"
    hidden: PositiveInt
    vocab: PositiveInt
    tied: bool = False
    norm: Norm = Norm()
    logit_cap: PositiveFloat | None = None


FeedForward = Annotated[Mlp | Moe, Field(discriminator="kind")]
Module = Annotated[Embedding | Attention | LatentAttention | Mamba2 | Mlp | Moe | Head, Field(discriminator="kind")]


class Layer(Spec):
    """`repeat` equal layers in a row, each of the parts that it has, in this order."""

    attention: Annotated[Attention | LatentAttention, Field(discriminator="kind")] | None = None
    mamba: Mamba2 | None = None
    feed_forward: FeedForward | None = None
    repeat: PositiveInt = Field(default=1, le=MAX_LAYERS)


class NamedModule(NamedTuple):
    """A module with its place in the chain, e.g. `layer.3.attention`."""

    name: str
    module: Embedding | Attention | LatentAttention | Mamba2 | Mlp | Moe | Head


class ModelSpec(Document):
    """The whole chain.  `max_positions` bounds the sequence length when positions are learned or stated."""

    name: str
    embedding: Embedding
    layers: tuple[Layer, ...] = Field(min_length=1)
    head: Head
    max_positions: int | None = None

    @model_validator(mode="after")
    def _one_width(self) -> Self:
        hidden = self.embedding.hidden
        for name, module in self.modules():
            if module.hidden != hidden:
                raise ValueError(f"{name} has hidden {module.hidden}, the embedding has {hidden}; widths must agree")
        if self.head.tied and self.head.vocab != self.embedding.vocab:
            raise ValueError(f"the head is tied but has vocab {self.head.vocab}, the embedding {self.embedding.vocab}")
        return self

    @property
    def hidden(self) -> int:
        return self.embedding.hidden

    @property
    def vocab(self) -> int:
        return self.head.vocab

    @property
    def num_layers(self) -> int:
        return sum(layer.repeat for layer in self.layers)

    def modules(self) -> tuple[NamedModule, ...]:
        """The chain in order, `repeat` unrolled; absent parts of a layer are left out.

        Equal modules are one object, in a model from a file too.
        """
        chain, index = [NamedModule("embedding", self.embedding)], 0
        known: dict[Module, Module] = {}
        for layer in self.layers:
            parts = (("attention", layer.attention), ("mamba2", layer.mamba), ("", layer.feed_forward))
            there = [(kind or part.kind, known.setdefault(part, part)) for kind, part in parts if part is not None]
            for _ in range(layer.repeat):
                chain += [NamedModule(f"layer.{index}.{kind}", part) for kind, part in there]
                index += 1
        chain.append(NamedModule("head", self.head))
        return tuple(chain)


def num_units(module: Embedding | Attention | LatentAttention | Mamba2 | Mlp | Moe | Head) -> int:
    """Units that a block cuts a module by: vocabulary rows, (query) heads, FFN columns, or experts."""
    match module:
        case Embedding() | Head():
            return module.vocab
        case Attention() | LatentAttention() | Mamba2():
            return module.num_heads
        case Mlp():
            return module.ffn
        case Moe():
            return module.num_experts


# Kinds whose blocks must hold whole sequences: every token looks at those before it.
SEQUENCE_KINDS = ("attention", "latent_attention", "mamba2")

UNIT_NAMES = {
    "embedding": "vocabulary rows",
    "attention": "query heads",
    "latent_attention": "heads",
    "mamba2": "heads",
    "mlp": "FFN columns",
    "moe": "experts",
    "head": "vocabulary rows",
}
