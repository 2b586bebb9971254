"""Shapes of published models that are no presets: decoders, vision encoders and the language models behind them."""

from __future__ import annotations

from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec, Norm


def decoder(
    name: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    gated: bool = True,
    tied: bool = False,
) -> ModelSpec:
    attention = Attention(hidden=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    layer = Layer(attention=attention, feed_forward=Mlp(hidden=hidden, ffn=ffn, gated=gated), repeat=layers)
    return ModelSpec(
        name=name,
        embedding=Embedding(hidden=hidden, vocab=vocab),
        layers=(layer,),
        head=Head(hidden=hidden, vocab=vocab, tied=tied, norm=Norm()),
    )


def gemma_shape() -> ModelSpec:
    """transformers' defaults of Gemma 3's text part: a table of 604M weights beside 2.0B in layers."""
    return decoder(
        "gemma-3 shape",
        hidden=2304,
        layers=26,
        heads=8,
        kv_heads=4,
        head_dim=256,
        ffn=9216,
        vocab=262208,
        tied=True,
    )


def two_kv_heads() -> ModelSpec:
    """Qwen2.5-3B's shape: 16 query heads over 2 KV heads."""
    return decoder(
        "two KV heads",
        hidden=2048,
        layers=36,
        heads=16,
        kv_heads=2,
        head_dim=128,
        ffn=11008,
        vocab=151936,
        tied=True,
    )


def odd_heads() -> ModelSpec:
    """InternViT-6B's blocks: 25 heads, which others pad to 32 at degree 8.  A small vocabulary stands for patches."""
    return decoder(
        "25 heads",
        hidden=3200,
        layers=45,
        heads=25,
        kv_heads=25,
        head_dim=128,
        ffn=12800,
        vocab=1024,
        gated=False,
    )


def four_kv_heads() -> ModelSpec:
    """Qwen2.5-7B: 28 query heads over 4 KV heads; also the language model of Qwen2.5-VL-7B."""
    return decoder(
        "qwen2.5-7b",
        hidden=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        ffn=18944,
        vocab=152064,
    )


def qwen_72b() -> ModelSpec:
    """Qwen2.5-72B: the language model of Qwen2.5-VL-72B and of InternVL2.5-78B."""
    return decoder(
        "qwen2.5-72b",
        hidden=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        head_dim=128,
        ffn=29568,
        vocab=152064,
    )


def qwen_vision(ffn: int = 3420) -> ModelSpec:
    """Encoder of Qwen2.5-VL (`vision_config` of Qwen2.5-VL-7B-Instruct): patches of 14 x 14 x 3 values in two frames,
    windows of 112 pixels (64 patches) in all but every eighth layer.

    The table holds as many weights as the patch embedding, 1,176 x 1,280.  A head of 8,704 rows does as many operations
    as the merger, which takes four patches at once: (5,120 x 5,120 + 5,120 x 3,584) / 4 = 8,704 x 1,280.
    """
    width = 1280

    def layers(window: int | None, repeat: int) -> Layer:
        attention = Attention(
            hidden=width,
            num_heads=16,
            num_kv_heads=16,
            head_dim=80,
            qkv_bias=True,
            output_bias=True,
            window=window,
        )
        return Layer(attention=attention, feed_forward=Mlp(hidden=width, ffn=ffn, bias=True), repeat=repeat)

    return ModelSpec(
        name="qwen2.5-vl encoder",
        embedding=Embedding(hidden=width, vocab=1176),
        layers=(layers(64, 7), layers(None, 1)) * 4,
        head=Head(hidden=width, vocab=8704),
    )
