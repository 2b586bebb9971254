"""Where unlike degrees pay and where they do not: one planned example for each case, with what its ladder says.

    python benchmarks/where_it_pays.py [--time-limit 30] [NAME ...]

For every case: the best uniform layout, the best with uneven stages and recomputation per module, and the best with
degrees per stage and per module, all from one search and one cost model.  Only what comes on top of uneven stages and
recomputation is credited to unlike degrees.  Costs are those of shipped device data (estimates).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cost_models.sources import device_costs
from cost_models.step import price
from planner.make import Problem, make_plan
from specs.cluster import ClusterSpec
from specs.errors import PlaitError
from specs.layout import sequence_token_cuts
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec, Norm
from specs.plan import ModulePlacement, Pipeline, Plan, Provenance, Replica, Stage, TrainingSpec
from specs.presets import cluster_preset, model_preset

GIB = 2**30
MADE = Provenance(created_by="benchmarks/where_it_pays.py", created_at="-")


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


@dataclass(frozen=True)
class Case:
    """A job to plan; `cap_gib` None: the device's memory."""

    name: str
    model: Callable[[], ModelSpec]
    cluster: str
    global_batch: int
    seq_len: int
    cap_gib: float | None = None

    def problem(self) -> Problem:
        return Problem(
            model=self.model(),
            cluster=cluster_preset(self.cluster),
            training=TrainingSpec(global_batch=self.global_batch, seq_len=self.seq_len),
            provenance=MADE,
            memory_cap_bytes=None if self.cap_gib is None else round(self.cap_gib * GIB),
        )


def preset(name: str) -> Callable[[], ModelSpec]:
    return lambda: model_preset(name)


CASES = (
    Case("plain-8b", preset("llama-3-8b"), "h200x8", 128, 4096),
    Case("plain-70b", preset("llama-3-70b"), "h200x64", 256, 4096),
    Case("tight-8b", preset("llama-3-8b"), "h100x8", 128, 8192),
    Case("tight-70b", preset("llama-3-70b"), "h100x64", 256, 8192),
    Case("openelm-roomy", preset("openelm-3b"), "h100x8", 256, 2048),
    Case("openelm-tight", preset("openelm-3b"), "h100x8", 256, 2048, 14),
    Case("nemotron-super", preset("nemotron-super-49b"), "h100x64", 256, 4096),
    Case("nemotron-ultra", preset("nemotron-ultra-253b"), "h100x1024", 1024, 4096),
    Case("two-kv-heads", two_kv_heads, "a100-40gx8", 128, 4096, 24),
    Case("odd-heads", odd_heads, "a100-40gx8", 256, 1024),
    Case("experts-mixtral", preset("mixtral-8x7b"), "h100x64", 512, 4096),
    Case("experts-qwen3", preset("qwen3-30b-a3b"), "h100x64", 512, 4096),
    Case("large-vocabulary", gemma_shape, "a100-40gx8", 128, 4096),
)


@dataclass(frozen=True)
class Ladder:
    """Step seconds under each freedom; None where nothing fits."""

    uniform: float | None
    layers: float | None
    modules: float | None
    layout: str
    gap: float

    @property
    def degrees_save(self) -> float | None:
        """What unlike degrees save beyond uneven stages and recomputation, as a part of the step."""
        if self.layers is None or self.modules is None:
            return None
        return 1.0 - self.modules / self.layers


def ladder_of(problem: Problem, time_limit_seconds: float) -> Ladder:
    plan = make_plan(
        problem, device_costs, objective="step-time", freedom="modules", time_limit_seconds=time_limit_seconds, top_k=0
    )
    seconds = [rung.step_time_seconds for rung in plan.ladder]
    assert plan.certificate is not None
    return Ladder(seconds[0], seconds[1], seconds[-1], plan.ladder[-1].layout, plan.certificate.gap)


def show_case(case: Case, time_limit_seconds: float) -> None:
    try:
        found = ladder_of(case.problem(), time_limit_seconds)
    except PlaitError as error:
        print(f"{case.name}: {error}\n", flush=True)
        return
    cap = "" if case.cap_gib is None else f", {case.cap_gib:g} GiB"
    print(f"{case.name}: {case.model().name} on {case.cluster}{cap}, batch {case.global_batch} x {case.seq_len}")

    def text(seconds: float | None) -> str:
        return "nothing fits" if seconds is None else f"{seconds:.3f} s"

    saved = found.degrees_save
    credit = "the first that fits" if saved is None else f"unlike degrees save {100 * saved:.2f} %"
    print(
        f"  uniform {text(found.uniform)}; uneven stages, recompute per module {text(found.layers)}; unlike degrees "
        f"{text(found.modules)}: {credit} (gap {100 * found.gap:.2f} %)\n  {found.layout}\n",
        flush=True,
    )


# a domain that lost one of eight


def damaged(cluster: str = "h100x8", lost: int = 7) -> ClusterSpec:
    return cluster_preset(cluster).model_copy(update={"missing": (lost,), "name": f"{cluster} without rank {lost}"})


def short_llama() -> ModelSpec:
    """Llama-3-70B's layers, eight of them, so that one domain holds them."""
    return decoder(
        "8 layers of llama-3-70b",
        hidden=8192,
        layers=8,
        heads=64,
        kv_heads=8,
        head_dim=128,
        ffn=28672,
        vocab=128256,
    )


def domain_plan(
    cluster: ClusterSpec, attention: tuple[int, ...], rest: tuple[int, ...], training: TrainingSpec
) -> Plan:
    """One stage on all usable ranks, one micro-batch of the whole batch; sequences stay whole in attention's blocks."""
    model, ranks = short_llama(), cluster.ranks()
    placements = tuple(
        ModulePlacement(module=name, blocks=attention if module.kind == "attention" else rest, zero=1, recompute=again)
        for name, module in model.modules()
        for again in ("full" if name.startswith("layer.") else "none",)
    )
    cuts = sequence_token_cuts(attention, training.global_batch, training.seq_len) if len(attention) > 1 else None
    return Plan(
        made=MADE,
        model=model,
        cluster=cluster,
        training=training,
        pipelines=(
            Pipeline(
                micro_batch=training.global_batch,
                stages=(Stage(num_ranks=len(ranks), modules=placements, token_cuts=cuts),),
            ),
        ),
        replicas=(Replica(pipeline=0, ranks=ranks, sequences=training.global_batch),),
    )


DOMAIN_SEQUENCES = 56  # divides by 8 and by 7, so that no layout suffers from the batch


def damaged_layouts(seq_len: int = 4096) -> Iterator[tuple[str, float]]:
    """(layout, step seconds) of the same sequences on 8 and on 7 ranks.  Raises `ValueError` where one does not fit."""
    training = TrainingSpec(global_batch=DOMAIN_SEQUENCES, seq_len=seq_len)
    healthy, short = cluster_preset("h100x8"), damaged()
    for name, cluster, attention, rest in (
        ("8 ranks, degree 8 for everything", healthy, (8,), (8,)),
        ("8 ranks, attention alone on each, the rest 8", healthy, (1,) * 8, (8,)),
        ("7 ranks, degree 7 for everything", short, (7,), (7,)),
        ("7 ranks, attention 4 + 3, the rest 7", short, (4, 3), (7,)),
        ("7 ranks, attention 2 + 2 + 3, the rest 7", short, (2, 2, 3), (7,)),
        ("7 ranks, attention alone on each, the rest 7", short, (1,) * 7, (7,)),
    ):
        found = price(domain_plan(cluster, attention, rest, training), device_costs(cluster, training))
        (device,) = cluster.devices.values()
        if found.peak_memory_bytes > device.memory_bytes:
            raise ValueError(f"{name} needs {found.peak_memory_bytes / GIB:.1f} GiB")
        yield name, found.step_time_seconds


def show_damaged() -> None:
    print(
        f"damaged-domain: 8 layers of llama-3-70b, {DOMAIN_SEQUENCES} sequences of 4096 tokens in one domain of H100; "
        "8 / 7 = 1.143"
    )
    rows = list(damaged_layouts())
    uniform, best = rows[0][1], rows[1][1]
    for name, seconds in rows:
        print(f"  {name:45} {seconds:7.3f} s  {seconds / uniform:.3f} x degree 8  {seconds / best:.3f} x the best on 8")
    print(flush=True)


# memory caps between uniform degrees


def show_caps(time_limit_seconds: float) -> None:
    """What unlike degrees save as the memory that a rank may fill shrinks."""
    for name, cluster, batch, seq_len, caps in (
        ("llama-3-8b", "h100x8", 64, 8192, (24, 28, 32, 40, 48, 56, 64, 72)),
        ("openelm-3b", "h100x8", 256, 2048, (9, 10, 12, 14, 16, 20, 24, 32)),
    ):
        saved = []
        print(f"caps: {name} on {cluster}, batch {batch} x {seq_len}")
        for cap in caps:
            case = Case("", preset(name), cluster, batch, seq_len, cap)
            try:
                found = ladder_of(case.problem(), time_limit_seconds)
            except PlaitError:
                print(f"  {cap:3} GiB  nothing fits")
                continue
            if found.degrees_save is None:
                print(f"  {cap:3} GiB  only unlike degrees fit")
                continue
            saved.append(found.degrees_save)
            print(f"  {cap:3} GiB  {100 * saved[-1]:6.2f} %  (gap {100 * found.gap:.2f} %)  {found.layout}", flush=True)
        if saved:
            print(f"  mean {100 * sum(saved) / len(saved):.2f} %, most {100 * max(saved):.2f} %\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {case.name: case for case in CASES}
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join([*known, 'damaged-domain', 'caps'])}")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds per search")
    given = parser.parse_args()
    names = given.names or [*known, "damaged-domain", "caps"]
    unknown = sorted(set(names) - {*known, "damaged-domain", "caps"})
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}")
    for name in names:
        if name == "damaged-domain":
            show_damaged()
        elif name == "caps":
            show_caps(given.time_limit)
        else:
            show_case(known[name], given.time_limit)


if __name__ == "__main__":
    main()
