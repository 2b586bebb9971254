"""Histories of a cluster: when which device fails, and when it is back.  Drawn once, played under every policy."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models.failures import SECONDS_PER_DAY, SECONDS_PER_HOUR
from specs.failures import FailureModel

# Earlier history that is drawn so that day 0 finds the usual number of devices in repair, in mean repair times.
WARM_UP_REPAIRS = 10.0


@dataclass(frozen=True, slots=True)
class History:
    """Events in time order, seconds; time 0 is the start of the run, earlier ones only shape its state.

    `kinds` 0: a failure, 1: a repair.  `classes` the failure class, `devices` the device (of a node failure: any of
    the node), `interrupts` whether training used it.
    """

    times: npt.NDArray[np.float64]
    kinds: npt.NDArray[np.int8]
    classes: npt.NDArray[np.int16]
    devices: npt.NDArray[np.int32]
    interrupts: npt.NDArray[np.bool_]


def draw_history(
    model: FailureModel, *, num_ranks: int, num_devices: int, seconds: float, rng: np.random.Generator
) -> History:
    """A history of `num_devices` installed devices of which training uses `num_ranks`, the others being spares."""
    repairs = np.array([item.repair_hours * SECONDS_PER_HOUR for item in model.classes])
    start = -WARM_UP_REPAIRS * float(repairs.max(initial=0.0))
    times, classes = [], []
    for index, item in enumerate(model.classes):
        begin = start if item.blast_radius != "none" else 0.0
        mean = item.failures_per_device_day * num_devices * (seconds - begin) / SECONDS_PER_DAY
        times.append(rng.uniform(begin, seconds, rng.poisson(mean)))
        classes.append(np.full(times[-1].size, index, dtype=np.int16))
    time = np.concatenate(times) if times else np.empty(0)
    kind = np.concatenate(classes) if classes else np.empty(0, dtype=np.int16)
    order = np.argsort(time, kind="stable")
    time, kind = time[order], kind[order]
    device = rng.integers(0, num_devices, time.size, dtype=np.int32)
    interrupts = rng.random(time.size) < num_ranks / num_devices
    mean_repair = repairs[kind] if kind.size else np.empty(0)
    spread = rng.exponential(1.0, time.size) if model.repair_time == "exponential" else np.ones(time.size)
    back = _repair_times(time, mean_repair * spread, model.repair_slots)
    broken = mean_repair > 0.0
    all_times = np.concatenate((time, back[broken]))
    order = np.argsort(all_times, kind="stable")
    order = order[all_times[order] < seconds]
    return History(
        times=all_times[order],
        kinds=np.concatenate((np.zeros(time.size, np.int8), np.ones(int(broken.sum()), np.int8)))[order],
        classes=np.concatenate((kind, kind[broken]))[order],
        devices=np.concatenate((device, device[broken]))[order],
        interrupts=np.concatenate((interrupts, np.zeros(int(broken.sum()), np.bool_)))[order],
    )


def _repair_times(
    failed: npt.NDArray[np.float64], durations: npt.NDArray[np.float64], slots: int | None
) -> npt.NDArray[np.float64]:
    """When each failed device is back; with `slots` repairs at a time, first come first served."""
    if slots is None:
        at_once: npt.NDArray[np.float64] = failed + durations
        return at_once
    free = [-np.inf] * slots
    back: npt.NDArray[np.float64] = failed.copy()
    for index in np.flatnonzero(durations > 0.0).tolist():
        begin = max(heapq.heappop(free), float(failed[index]))
        back[index] = begin + durations[index]
        heapq.heappush(free, float(back[index]))
    return back
