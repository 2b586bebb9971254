"""The best plan at every point of a sweep: clusters x global batches x sequence lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from cost_models.sweep_point import SweepPoint, cluster_dollars_per_hour
from planner.search import Freedom
from planner.start import start_plan
from specs.cluster import ClusterSpec, Precision
from specs.errors import BadInputError, PlaitError
from specs.presets import load_cluster, load_model


@dataclass(frozen=True)
class Sweep:
    """What is varied; the model and all options of the search are the same everywhere.

    `prices`: dollars per device and hour by device name in lower case, before those in cluster files.
    """

    model: str
    clusters: Sequence[str]
    global_batches: Sequence[int]
    seq_lens: Sequence[int]
    profile_path: Path | None
    precision: Precision | None
    memory_cap: str | None
    freedom: Freedom
    time_limit_seconds: float
    prices: Mapping[str, float]
    command: str


def run_sweep(sweep: Sweep) -> Iterator[SweepPoint]:
    """Plan point by point, clusters slowest.  A point without a plan carries the sentence that says why.

    Raises `BadInputError` for what is wrong everywhere: the model, a cluster, a price of an absent device.
    """
    load_model(sweep.model)
    clusters = [(text, load_cluster(text)) for text in sweep.clusters]
    _check_prices(sweep.prices, [cluster for _, cluster in clusters])
    return (_point(sweep, *point) for point in product(clusters, sweep.global_batches, sweep.seq_lens))


def _point(sweep: Sweep, named: tuple[str, ClusterSpec], global_batch: int, seq_len: int) -> SweepPoint:
    text, cluster = named
    plan, problem = None, ""
    try:
        plan = start_plan(
            model=sweep.model,
            cluster=text,
            profile_path=sweep.profile_path,
            global_batch=global_batch,
            seq_len=seq_len,
            precision=sweep.precision,
            memory_cap=sweep.memory_cap,
            objective="goodput",
            freedom=sweep.freedom,
            time_limit_seconds=sweep.time_limit_seconds,
            top_k=0,
            command=sweep.command,
        )
    except PlaitError as error:
        problem = str(error)
    return SweepPoint(
        cluster=cluster.name,
        device=" + ".join(sorted({group.device for group in cluster.nodes})),
        num_devices=cluster.num_usable,
        global_batch=global_batch,
        seq_len=seq_len,
        plan=plan,
        problem=problem,
        dollars_per_hour=cluster_dollars_per_hour(cluster, sweep.prices),
    )


def _check_prices(prices: Mapping[str, float], clusters: Sequence[ClusterSpec]) -> None:
    devices = sorted({group.device for cluster in clusters for group in cluster.nodes})
    for name in prices:
        if name not in {device.lower() for device in devices}:
            raise BadInputError(
                f"a price is given for {name}, which none of the clusters has. Their devices are: {', '.join(devices)}."
            )


def parse_prices(text: str) -> dict[str, float]:
    """`H100=2.5,H200=3.2` as dollars per device and hour, names in lower case.  Raises `BadInputError`."""
    prices: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sign, amount = part.partition("=")
        try:
            price = float(amount)
        except ValueError:
            price = 0.0
        if not (sign and name.strip() and 0.0 < price < 1e6):
            raise BadInputError(f"the price {part!r} is not DEVICE=DOLLARS, e.g. H100=2.5 per device and hour.")
        prices[name.strip().lower()] = price
    return prices
