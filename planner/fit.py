"""Does anything fit, and if not: what is the least memory any layout needs, and the smallest change that helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cost_models.interface import CostModel
from planner.blocks import stage_degrees
from planner.chain import NO_CONTENT, Chain
from planner.menu import Menu, OptionTable
from planner.options import OptionSource
from planner.restriction import Restriction
from planner.space import Grid, Topology, enumerate_grids
from specs.cluster import ClusterSpec
from specs.errors import BadInputError
from specs.plan import TrainingSpec

GIB = 2.0**30
IMPOSSIBLE = 1e30  # bytes; a number that may be multiplied by a count of 0
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LeastMemory:
    """The layout that needs least: bytes of its fullest stage (with what is reserved), and where they go."""

    total_bytes: float
    grid: Grid
    stage: int
    static_bytes: float
    activation_bytes: float
    working_bytes: float
    degree: int


def least_memory(chain: Chain, grid: Grid, source: OptionSource) -> LeastMemory | None:
    """Least possible memory of the fullest stage of a grid point, over all partitions and options.

    None when the grid point is not divisible or has more stages than places to cut.
    """
    restrictions = [Restriction()]
    if source.tied and grid.num_stages == 1:
        restrictions += [Restriction(tied=degree) for degree in stage_degrees(grid.num_ranks)]
    menus = (source.menu(grid, restriction) for restriction in restrictions)
    found = (_least_with(menu, chain, grid, source) for menu in menus if menu is not None)
    return min((item for item in found if item is not None), key=lambda item: item.total_bytes, default=None)


def _least_with(menu: Menu, chain: Chain, grid: Grid, source: OptionSource) -> LeastMemory | None:
    reach = np.full(chain.num_positions, np.inf)
    reach[0] = 0.0
    origins, limits = [], []
    for stage in range(grid.num_stages):
        needs, limit = _least_bytes(menu, chain.counts, grid.flights(stage)[0].kept)
        limits.append(limit)
        matrix = np.where(chain.contents == NO_CONTENT, np.inf, needs[chain.contents])
        worse = np.maximum(reach[:, None], matrix)
        origins.append(worse.argmin(axis=0))
        reach = worse.min(axis=0)
    if not np.isfinite(reach[-1]):
        return None
    path = [chain.num_positions - 1]
    for origin in reversed(origins):
        path.insert(0, int(origin[path[0]]))
    contents = [int(chain.contents[start, stop]) for start, stop in pairwise(path)]
    reserved = source.costs.reserved_bytes + source.edge_bytes(grid)
    stages = [
        _terms(chain.counts[content], grid, stage, menu, float(limits[stage][content]), reserved)
        for stage, content in enumerate(contents)
    ]
    return max(stages, key=lambda stage: stage.total_bytes)


def _least_bytes(menu: Menu, counts: npt.NDArray[np.int64], in_flight: int) -> tuple[Floats, Floats]:
    """Least bytes of every content, and the largest working memory at which they are reached."""
    limits = np.array(sorted({working for table in menu.tables for working in table.working.tolist()}))
    held = np.full((len(menu.tables), limits.size), IMPOSSIBLE)
    for least, table in zip(held, menu.tables, strict=True):
        order = np.argsort(table.working)
        falling = np.minimum.accumulate((table.static + in_flight * table.activation)[order])
        allowed = np.searchsorted(table.working[order], limits, side="right")
        least[allowed > 0] = falling[allowed[allowed > 0] - 1]
    needs = counts @ held + limits
    chosen = needs.argmin(axis=1)
    best = needs[np.arange(len(counts)), chosen]
    best[best >= IMPOSSIBLE] = np.inf
    return best, limits[chosen]


def _held(table: OptionTable, in_flight: int, limit: float) -> Floats:
    """Bytes of each option that stay; `inf` for those that work with more than `limit`."""
    held: Floats = np.where(table.working <= limit, table.static + in_flight * table.activation, np.inf)
    return held


def _terms(
    counts: npt.NDArray[np.int64], grid: Grid, stage: int, menu: Menu, limit: float, reserved: float
) -> LeastMemory:
    static = activation = 0.0
    degree, kept = 1, grid.flights(stage)[0].kept
    for kind in np.flatnonzero(counts).tolist():
        table = menu.tables[kind]
        option = int(_held(table, kept, limit).argmin())
        static += counts[kind] * table.static[option]
        activation += counts[kind] * kept * table.activation[option]
        degree = max(degree, menu.options[kind][option].degree)
    return LeastMemory(
        static + activation + limit + reserved, grid, stage, static, activation, limit + reserved, degree
    )


def least_of_all(chain: Chain, grids: list[Grid], source: OptionSource) -> LeastMemory | None:
    """The grid point that needs least memory: one of 1f1b, which holds no more than any other schedule."""
    found = (least_memory(chain, grid, source) for grid in grids if grid.schedule == "1f1b")
    return min((item for item in found if item is not None), key=lambda item: item.total_bytes, default=None)


def changes_that_fit(
    cluster: ClusterSpec,
    training: TrainingSpec,
    make_costs: Callable[[ClusterSpec, TrainingSpec], CostModel],
    chain: Chain,
    capacity_bytes: float,
) -> list[str]:
    """The smallest number of nodes (doubled) and the largest sequence length (halved) that would fit."""

    def fits(cluster: ClusterSpec, training: TrainingSpec) -> bool:
        topology = Topology(cluster)
        stages = min(topology.num_ranks, chain.num_positions - 1)
        grids = enumerate_grids(topology, training, max_stages=stages, max_ranks_per_stage=topology.domain)
        try:
            source = OptionSource(chain, training, make_costs(cluster, training), topology)
            least = least_of_all(chain, list(grids), source)
        except BadInputError:
            return False  # a profile that does not reach so far: what it cannot price is not proposed
        return least is not None and least.total_bytes <= capacity_bytes

    found = []
    if not cluster.missing and not cluster.slow:
        for factor in (2, 4, 8, 16, 32):
            larger = _times(cluster, factor)
            if fits(larger, training):
                found.append(f"{larger.num_devices} devices")
                break
    seq_len = training.seq_len // 2
    while seq_len >= 128:
        if fits(cluster, training.model_copy(update={"seq_len": seq_len})):
            found.append(f"--seq-len {seq_len}")
            break
        seq_len //= 2
    return found


def _times(cluster: ClusterSpec, factor: int) -> ClusterSpec:
    """The same nodes, `factor` times as many; one node's links serve between nodes where none are named."""
    nodes = tuple(group.model_copy(update={"count": group.count * factor}) for group in cluster.nodes)
    links = dict(cluster.links)
    links.setdefault("scale_out", links["scale_up"])
    return cluster.model_copy(update={"nodes": nodes, "links": links})
