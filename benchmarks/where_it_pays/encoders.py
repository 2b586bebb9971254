"""A vision encoder beside a language model: one degree for both parts, a degree for each, degrees per module.

A plan is one chain of modules of one width and one number of tokens, so the two parts are planned apart, as they run
one after the other on the same GPUs: every sample's patches pass the encoder, its tokens the language model, and the
step takes the sum.  Memory is divided between the parts beforehand.

    step = encoder(patches) + language(tokens)      with caps  encoder + language = the device's memory

Not covered: a pipeline with stages of both parts, encoder and language model on GPUs of their own, samples of unlike
numbers of patches, a frozen encoder.  Attention counts as causal, half of the scores of whole-image layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.where_it_pays.cases import GIB, MADE
from benchmarks.where_it_pays.shapes import four_kv_heads, odd_heads, qwen_72b, qwen_vision
from cost_models.sources import device_costs
from planner.constraints import Constraints
from planner.make import Problem, make_plan
from planner.search import Freedom
from specs.errors import NoPlanFitsError
from specs.model import ModelSpec
from specs.plan import TrainingSpec
from specs.presets import cluster_preset

DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Part:
    """An encoder or a language model: sequences of each sample, tokens of each."""

    model: Callable[[], ModelSpec]
    sequences: int
    seq_len: int


@dataclass(frozen=True)
class Pair:
    """Both parts on one cluster; the encoder may fill `encoder_gib` of the device's memory."""

    name: str
    encoder: Part
    language: Part
    cluster: str
    samples: int
    encoder_gib: float


PAIRS = (
    # an image of 896 x 896: 4,096 patches, 1,024 tokens after merging, as many of text
    Pair("encoder-7b", Part(qwen_vision, 1, 4096), Part(four_kv_heads, 1, 2048), "a100-40gx8", 256, 8),
    Pair("encoder-72b", Part(qwen_vision, 1, 4096), Part(qwen_72b, 1, 2048), "h100x64", 256, 12),
    # four tiles of 448 x 448: 1,024 patches each, 256 tokens of each after merging, as many of text
    Pair("encoder-6b-72b", Part(odd_heads, 4, 1024), Part(qwen_72b, 1, 2048), "h100x64", 256, 16),
)


@dataclass(frozen=True)
class Found:
    """Step seconds of both parts and the layouts."""

    encoder: float
    language: float
    layouts: str

    @property
    def seconds(self) -> float:
        return self.encoder + self.language


def plan_pair(pair: Pair, freedom: Freedom, time_limit_seconds: float, degree: int | None = None) -> Found | None:
    """The fastest plans of both parts, with one degree for all their modules where given; None if a part does not
    fit.
    """
    cluster = cluster_preset(pair.cluster)
    (device,) = cluster.devices.values()
    mine = round(pair.encoder_gib * GIB)
    seconds, layouts = [], []
    for part, cap in ((pair.encoder, mine), (pair.language, device.memory_bytes - mine)):
        problem = Problem(
            model=part.model(),
            cluster=cluster,
            training=TrainingSpec(global_batch=pair.samples * part.sequences, seq_len=part.seq_len),
            provenance=MADE,
            memory_cap_bytes=cap,
            constraints=Constraints(pins=() if degree is None else (f"*.tp={degree}",)),
        )
        try:
            plan = make_plan(
                problem,
                device_costs,
                objective="step-time",
                freedom=freedom,
                time_limit_seconds=time_limit_seconds,
                top_k=0,
            )
        except NoPlanFitsError:
            return None
        assert plan.predicted is not None
        seconds.append(plan.predicted.step_time_seconds)
        layouts.append(plan.ladder[-1].layout)
    return Found(*seconds, " | ".join(layouts))


def show_pair(pair: Pair, time_limit_seconds: float) -> None:
    encoder, language = pair.encoder.model().name, pair.language.model().name
    print(
        f"{pair.name}: {encoder} ({pair.encoder.sequences} x {pair.encoder.seq_len} patches, {pair.encoder_gib:g} GiB) "
        f"beside {language} ({pair.language.seq_len} tokens) on {pair.cluster}, {pair.samples} samples"
    )
    one: list[float] = []
    rows: list[tuple[str, Freedom, int | None]] = [
        (f"degree {degree} for both", "layers", degree) for degree in DEGREES
    ]
    rows += [("a degree for each", "layers", None), ("degrees per module", "modules", None)]
    for name, freedom, degree in rows:
        found = plan_pair(pair, freedom, time_limit_seconds, degree)
        if found is None:
            print(f"  {name:20} does not fit")
            continue
        if degree is not None:
            one.append(found.seconds)
        saved = "" if degree is not None else f", saves {100 * (1 - found.seconds / min(one)):.2f} % of the best degree"
        seconds = f"{found.encoder:7.3f} + {found.language:7.3f} = {found.seconds:7.3f} s"
        print(f"  {name:20} {seconds}{saved}: {found.layouts}", flush=True)
    print()
