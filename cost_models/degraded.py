"""The degraded factor X: the mean speed, as a share of full speed, while failed devices wait for repair."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models.failures import SECONDS_PER_DAY, SECONDS_PER_HOUR
from specs.failures import FailureModel

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Mean number of unrepaired failures at a random time, by what each takes away.

    # Palm: with Poisson arrivals at rate lambda and any repair time of mean r, the number outstanding is
    # Poisson with mean lambda r.     leaves out: queues for repair, failed devices that cannot fail again
    """

    devices: float
    nodes: float

    @property
    def total(self) -> float:
        return self.devices + self.nodes


def outstanding_failures(model: FailureModel, num_ranks: int) -> Outstanding:
    """Mean unrepaired failures on that many ranks."""
    means = {"none": 0.0, "device": 0.0, "node": 0.0}
    for item in model.classes:
        hours = item.failures_per_device_day * num_ranks * SECONDS_PER_HOUR / SECONDS_PER_DAY
        means[item.blast_radius] += hours * item.repair_hours
    return Outstanding(devices=means["device"], nodes=means["node"])


def poisson_pmf(mean: float, largest: int | None = None) -> Array:
    """Probabilities of 0, 1, ... up to `largest` (None: until what is left out is below 1e-15)."""
    if largest is None:
        largest = int(mean + 10.0 * math.sqrt(mean) + 20.0)
    if mean == 0.0:
        return np.concatenate(([1.0], np.zeros(largest)))
    logs = np.full(largest + 1, math.log(mean))
    logs[0] = -mean
    logs[1:] -= np.log(np.arange(1, largest + 1))
    pmf: Array = np.exp(np.cumsum(logs))
    return pmf


def dropped_replicas_factor(
    *, failed: Outstanding, num_ranks: int, num_replicas: int, devices_per_node: int, spare_nodes: int = 0
) -> float:
    """X when a replica that lost a device stands still until the repair and the others take its sequences.

    # unpacked drop: X = sum_n Poisson(n; a) (1 - h)^max(0, n - S)    (= exp(-a h) without spares)
    #   a mean unrepaired failures, S spare nodes (each replaces one), h share of the replicas that one failure
    #   takes out: 1/R for a device, max(1/R, node/N) for a node of that many of the N ranks, weighted
    #   leaves out: replicas that straddle nodes unevenly, integer shares of the batch
    With one replica this is the probability that it is whole: training waits.
    """
    if failed.total == 0.0:
        return 1.0
    by_device = 1.0 / num_replicas
    by_node = min(max(by_device, devices_per_node / num_ranks), 1.0)
    hit = (failed.devices * by_device + failed.nodes * by_node) / failed.total
    if spare_nodes == 0:
        return math.exp(-failed.total * hit)
    pmf = poisson_pmf(failed.total)
    unreplaced = np.maximum(np.arange(pmf.size) - spare_nodes, 0)
    return min(float(pmf @ (1.0 - hit) ** unreplaced), 1.0)
