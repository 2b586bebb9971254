"""What waiting for the slowest costs: ordinary spread, devices that are slow all the time, episodes, network tails.

A step ends when its last rank does, so its expected time is that of a maximum over ranks.  All factors are >= 1 and
multiply the step time; they come from a failure model's `SlowDevices`, whose spread a profile can replace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from specs.failures import SlowDevices
from specs.profile import Profile


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Factors on the step time.  `persistent` is what slow nodes cost when nobody takes them out."""

    spread: float
    links: float
    episodes: float
    persistent: float

    def total(self, *, culled: bool) -> float:
        """All of them; `culled`: slow nodes were taken out."""
        return self.spread * self.links * self.episodes * (1.0 if culled else self.persistent)


@lru_cache(maxsize=1)
def _normal() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Points and the standard normal's distribution function there."""
    x = np.linspace(-9.0, 9.0, 7201)
    return x, np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in x.tolist()])


@lru_cache(maxsize=256)
def expected_maximum(number: int) -> float:
    """Expected maximum of that many standard normal variables.

    # E[max] = integral of x d(Phi(x)^n), by parts: integral_0^inf (1 - Phi^n) dx - integral_-inf^0 Phi^n dx
    """
    x, phi = _normal()
    power = phi**number
    integrand = np.where(x >= 0.0, 1.0 - power, -power)
    integrand[3600] = 0.5 - power[3600]  # the jump at 0 belongs half to each side
    return float(integrand.sum() * (x[1] - x[0]))


@lru_cache(maxsize=256)
def expected_range(number: int) -> float:
    """Expected largest minus smallest of that many standard normal variables (d2 of control charts)."""
    return 2.0 * expected_maximum(number)


def stragglers(slow: SlowDevices, *, num_ranks: int, num_nodes: int, between_hosts_share: float) -> Stragglers:
    """Factors for a job; `between_hosts_share` is the part of its step that collectives between hosts take.

    # spread:     1 + cv E[max of N normals]
    # links:      1 + share cv_link E[max of nodes normals]
    # episodes:   1 + (1 - exp(-rate N d)) (slow - 1)     d duration, so rate N d are under way on average
    # persistent: 1 + (1 - (1 - f)^nodes) (slow - 1)      f fraction of nodes that are slow
    #   leaves out: spread that averages out over the micro-batches of a step; two slow things at once
    """
    under_way = slow.episodes_per_device_day * num_ranks * slow.episode_minutes / 1440.0
    return Stragglers(
        spread=1.0 + slow.step_time_spread * expected_maximum(num_ranks),
        links=1.0 + between_hosts_share * slow.link_time_spread * expected_maximum(num_nodes),
        episodes=1.0 - math.expm1(-under_way) * (slow.episode_slowdown - 1.0),
        persistent=1.0 + (1.0 - (1.0 - slow.node_fraction) ** num_nodes) * (slow.slowdown - 1.0),
    )


def culling_gain(slow: SlowDevices, *, num_nodes: int, culled: int) -> float:
    """Fraction of speed gained by taking the `culled` slowest nodes out (negative: a loss).

    # speed = (1 - k / nodes) / (1 + P(K > k) (slow - 1)),   K ~ Binomial(nodes, f) nodes are slow
    """

    def speed(k: int) -> float:
        terms = (math.exp(_log_binomial(num_nodes, i, slow.node_fraction)) for i in range(k + 1))
        still_slow = max(1.0 - sum(terms), 0.0)
        return (1.0 - k / num_nodes) / (1.0 + still_slow * (slow.slowdown - 1.0))

    return speed(culled) / speed(0) - 1.0


def best_culling(slow: SlowDevices, *, num_nodes: int) -> tuple[int, float]:
    """(nodes to take out, gain) for the best number; (0, 0) when leaving all in is best."""
    mean = num_nodes * slow.node_fraction
    most = min(int(mean + 6.0 * math.sqrt(mean) + 2.0), num_nodes - 1)
    gains = {k: culling_gain(slow, num_nodes=num_nodes, culled=k) for k in range(most + 1)}
    best = max(gains, key=lambda k: gains[k])
    return best, gains[best]


def with_profile(slow: SlowDevices, profile: Profile) -> SlowDevices:
    """The same with the step-time spread that a profile measured between its ranks.

    # cv = mean over modules of (rank spread / d2(ranks))    d2 expected range of that many normals
    """
    if profile.world_size < 2:
        return slow
    spreads = [timing.forward.rank_spread for timing in profile.modules]
    cv = sum(spreads) / len(spreads) / expected_range(profile.world_size)
    source = f"spread from a profile of {profile.world_size} ranks made {profile.made.created_at}; rest: {slow.source}"
    return slow.model_copy(update={"step_time_spread": cv, "source": source})


def _log_binomial(number: int, k: int, probability: float) -> float:
    if probability <= 0.0:
        return 0.0 if k == 0 else -math.inf
    choose = math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1)
    return choose + k * math.log(probability) + (number - k) * math.log1p(-probability)
