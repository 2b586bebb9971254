"""The degraded factor X: the mean speed, as a share of full speed, while failed devices wait for repair.

    a device is out with probability p = 1 - exp(-lambda r)        Palm: Poisson failures, mean outage r
    so is a host; a domain has whole hosts out and devices of the others, both binomial
    X = E[share of full speed of that state]                       per policy, `policies`

Exact where the share is a sum over replicas (packed: over the sorted groups; fixed places: replica by replica), else
the mean over drawn states with its standard error.
Leaves out: failures that come in clusters, failed devices of replicas that are out anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cost_models.failures import SECONDS_PER_DAY, SECONDS_PER_HOUR
from cost_models.policies import Damage, Geometry, Policy, domain_levels, fixed_speed, packed_speed
from specs.failures import FailureModel

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outages:
    """Probability that a device is out on its own, and that a whole host is."""

    device: float
    host: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error, 0 where it is exact."""

    mean: float
    standard_error: float = 0.0


def outages(model: FailureModel, *, host_size: int, num_devices: int, wait_seconds: float = 0.0) -> Outages:
    """Outage probabilities of one device and of one host of `host_size` devices.

    `wait_seconds`: mean time that a repaired device waits until training takes it back.  `num_devices` matters only
    when repairs queue.
    """
    queue = queue_seconds(model, num_devices)
    means = {"device": 0.0, "node": 0.0, "none": 0.0}
    for item in model.classes:
        seconds = item.repair_hours * SECONDS_PER_HOUR + queue + wait_seconds
        means[item.blast_radius] += item.failures_per_device_day / SECONDS_PER_DAY * seconds
    return Outages(-math.expm1(-means["device"]), -math.expm1(-means["node"] * host_size))


def hardware_failures_per_second(model: FailureModel, num_devices: int) -> float:
    """Failures that take something out until it is repaired."""
    per_day = sum(item.failures_per_device_day for item in model.classes if item.blast_radius != "none")
    return per_day * num_devices / SECONDS_PER_DAY


def queue_seconds(model: FailureModel, num_devices: int) -> float:
    """Mean wait for a repair slot; infinite when failures come faster than all slots repair them.

    # M/M/c: W = C(c, a) r / (c - a),  C = Erlang's formula of waiting,  a = lambda r    r mean repair time, c slots
    #   exact for exponential repair times of one mean
    """
    if model.repair_slots is None:
        return 0.0
    rate = hardware_failures_per_second(model, num_devices)
    if rate == 0.0:
        return 0.0
    hours = [(item.failures_per_device_day, item.repair_hours) for item in model.classes if item.repair_hours]
    mean = SECONDS_PER_HOUR * sum(a * b for a, b in hours) / sum(a for a, _ in hours)
    load, slots = rate * mean, model.repair_slots
    if load >= slots:
        return math.inf
    blocked = 1.0
    for servers in range(1, slots + 1):  # Erlang B, upwards
        blocked = load * blocked / (servers + load * blocked)
    waits = blocked / (1.0 - load / slots * (1.0 - blocked))
    return waits * mean / (slots - load)


def binomial_pmf(number: int, probability: float) -> Array:
    """Probabilities of 0 .. number successes."""
    if probability <= 0.0 or probability >= 1.0:
        pmf = np.zeros(number + 1)
        pmf[0 if probability <= 0.0 else number] = 1.0
        return pmf
    k = np.arange(1, number + 1)
    logs = np.concatenate(([0.0], np.cumsum(np.log((number - k + 1) / k))))
    ks = np.arange(number + 1)
    result: Array = np.exp(logs + ks * math.log(probability) + (number - ks) * math.log1p(-probability))
    return result


def failed_pmf(num_devices: int, host_size: int, out: Outages) -> Array:
    """Probabilities of 0 .. `num_devices` devices out in a domain of whole hosts."""
    pmf = np.zeros(num_devices + 1)
    for hosts, probability in enumerate(binomial_pmf(num_devices // host_size, out.host)):
        gone = hosts * host_size
        pmf[gone:] += probability * binomial_pmf(num_devices - gone, out.device)
    return pmf


@lru_cache(maxsize=1024)
def exact_factor(policy: Policy, geometry: Geometry, shares: tuple[float, ...], out: Outages) -> float:
    """X in closed form.  Raises `ValueError` for a policy whose share is not a sum over replicas.

    # X = sum_l (share_l - share_{l-1}) E[replicas whose groups are all at level >= l] / R
    #   packed: E[min(R, floor(G_l / P))], G_l = groups at level >= l, a sum over independent domains
    #   fixed: R times the probability of one replica
    """
    if policy.keep_batch or policy.resplit or (policy.spare_domains and not policy.packed):
        raise ValueError(f"{policy.name}: no closed form")
    total, below = 0.0, 0.0
    for level in range(1, geometry.group_size + 1):
        gain = shares[level] - below
        if gain > 0.0:
            below = shares[level]
            if policy.packed:
                total += gain * _packed_replicas(policy, geometry, out, level)
            else:
                total += gain * _fixed_replicas(policy, geometry, out, level)
    return min(total, 1.0)


@lru_cache(maxsize=1024)
def _lost_groups(damage: Damage, group_size: int, domain_size: int, host_size: int, out: Outages, level: int) -> Array:
    """Probabilities of 0 .. k groups of a domain below `level`, as seen by a packing policy."""
    shape = Geometry(1, 1, group_size, domain_size, 1)
    rule = Policy("", damage)
    pmf = np.zeros(shape.groups_per_domain + 1)
    for failed, probability in enumerate(failed_pmf(shape.devices_per_domain, host_size, out)):
        kept = sum(item >= level for item in domain_levels(rule, shape, failed))
        pmf[shape.groups_per_domain - kept] += probability
    return pmf


def _packed_replicas(policy: Policy, geometry: Geometry, out: Outages, level: int) -> float:
    """Share of replicas that can be formed from groups at `level` or above.

    The sum over domains is a power in Fourier space, cut off 12 standard deviations above its mean.
    """
    pmf = _lost_groups(policy.damage, geometry.group_size, geometry.domain_size, geometry.host_size, out, level)
    number = geometry.num_domains + policy.spare_domains
    ks = np.arange(pmf.size)
    mean = number * float(pmf @ ks)
    spread = math.sqrt(max(number * float(pmf @ ks**2) - mean * mean / number, 0.0))
    size = number * geometry.groups_per_domain
    longest = min(int(mean + 12.0 * spread) + 16 * pmf.size, size)
    length = 1 << longest.bit_length()
    lost = np.clip(np.fft.irfft(np.fft.rfft(pmf, length) ** number, length)[: longest + 1], 0.0, None)
    groups = size - np.arange(longest + 1)
    formed = np.minimum(groups // geometry.num_stages, geometry.num_replicas)
    if policy.damage == "wait":
        formed = np.where(formed == geometry.num_replicas, formed, 0)
    return float(lost @ formed) / geometry.num_replicas


def _fixed_replicas(policy: Policy, geometry: Geometry, out: Outages, level: int) -> float:
    """Probability that all groups of a replica (all replicas, when training waits) are at `level` or above."""
    size, host = geometry.group_size, geometry.host_size
    groups = geometry.num_stages * (geometry.num_replicas if policy.damage == "wait" else 1)
    if size % host == 0:
        return float(failed_pmf(size, host, out)[: size - level + 1].sum()) ** groups
    tail = float(binomial_pmf(size, out.device)[: size - level + 1].sum())
    hosts = max(-(-groups * size // host), 1)  # the groups lie inside hosts, which take them along
    return float(tail**groups * (1.0 - out.host) ** hosts)


def drawn_factor(
    policy: Policy,
    geometry: Geometry,
    shares: Sequence[float],
    slow: Sequence[float],
    out: Outages,
    *,
    draws: int = 2000,
    seed: int = 0,
) -> Estimate:
    """X for any policy: mean over independent states of the cluster."""
    rng = np.random.default_rng(seed)
    pmf = failed_pmf(geometry.devices_per_domain, geometry.host_size, out)
    domains = geometry.num_domains + policy.spare_domains
    counts = rng.multinomial(domains, pmf / pmf.sum(), size=draws)
    known: dict[bytes, float] = {}
    speeds = np.empty(draws)
    for index, histogram in enumerate(counts):
        damaged = np.repeat(np.arange(pmf.size), histogram)[histogram[0] :].tolist()
        if policy.packed:
            key = histogram[1:].tobytes()
            if key not in known:
                known[key] = packed_speed(policy, geometry, shares, slow, damaged)
            speeds[index] = known[key]
        else:
            places = rng.choice(domains, size=len(damaged), replace=False)
            used = [(d, f) for d, f in zip(places.tolist(), damaged, strict=True) if d < geometry.num_domains]
            idle = policy.spare_domains - (len(damaged) - len(used))
            speeds[index] = fixed_speed(policy, geometry, shares, slow, _replica_levels(geometry, used[idle:], rng))
    return Estimate(float(speeds.mean()), float(speeds.std(ddof=1)) / math.sqrt(draws))


def _replica_levels(
    geometry: Geometry, damaged: Sequence[tuple[int, int]], rng: np.random.Generator
) -> dict[int, list[int]]:
    """Levels of the damaged groups by replica, for domains with so many devices out at random places."""
    found: dict[int, list[int]] = {}
    for domain, failed in damaged:
        size = geometry.group_size
        places = rng.choice(geometry.devices_per_domain, size=failed, replace=False)
        lost = np.bincount(places // size, minlength=geometry.groups_per_domain)
        for slot, number in enumerate(lost.tolist()):
            replica = (domain * geometry.groups_per_domain + slot) // geometry.num_stages
            if number and replica < geometry.num_replicas:
                found.setdefault(replica, []).append(max(size - number, 0))
    return found


def factor(
    policy: Policy,
    geometry: Geometry,
    shares: tuple[float, ...],
    slow: Sequence[float],
    out: Outages,
    *,
    draws: int = 2000,
    seed: int = 0,
) -> Estimate:
    """X, exact where there is a closed form, else drawn."""
    if policy.keep_batch or policy.resplit or (policy.spare_domains and not policy.packed):
        return drawn_factor(policy, geometry, shares, slow, out, draws=draws, seed=seed)
    return Estimate(exact_factor(policy, geometry, shares, out))


def spares_needed(
    policy: Policy,
    geometry: Geometry,
    shares: tuple[float, ...],
    slow: Sequence[float],
    out: Outages,
    *,
    target: float,
    most: int = 4096,
) -> int | None:
    """Fewest spare domains with X >= target, None when `most` are not enough."""

    def reaches(spares: int) -> bool:
        return factor(policy.with_spares(spares), geometry, shares, slow, out, draws=500).mean >= target

    if reaches(0):
        return 0
    high = 1
    while not reaches(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
