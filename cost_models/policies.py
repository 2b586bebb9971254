"""What a damaged cluster delivers under each policy: from the survivors of every group to a share of full speed.

    domain    scale-up domain: devices that are neighbours, of one host or several; a host fails as a whole
    group     the ranks of one stage of one replica, inside a domain
    level     surviving ranks of a group
    replica   num_stages groups; it goes at the speed of its lowest level

A replica at a lower level is slower, so it takes fewer micro-batches of a step and keeps the step time; a share of
the batch is an integer.  "Packed": groups are dealt to replicas by level, so that the damage sits in few of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cost_models.reduced import Reduction, StageWork, slowdown

Damage = Literal["wait", "drop", "ntp", "composed"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a running plan: `num_replicas` replicas of `num_stages` groups of `group_size` ranks each.

    `micro_batches` is a replica's share of a step; `layers_per_stage` is for re-splitting stages.
    """

    num_replicas: int
    num_stages: int
    group_size: int
    domain_size: int
    micro_batches: int
    layers_per_stage: int = 1
    devices_per_host: int = 8

    @property
    def host_size(self) -> int:
        """Devices of a domain that a failed host takes."""
        size = min(self.devices_per_host, self.devices_per_domain)
        return size if self.devices_per_domain % size == 0 else self.devices_per_domain

    @property
    def groups_per_domain(self) -> int:
        return max(self.domain_size // self.group_size, 1)

    @property
    def devices_per_domain(self) -> int:
        """Devices of a domain; a group larger than a domain counts as one."""
        return max(self.domain_size, self.group_size)

    @property
    def num_domains(self) -> int:
        return -(-self.num_replicas * self.num_stages // self.groups_per_domain)

    @property
    def num_ranks(self) -> int:
        return self.num_replicas * self.num_stages * self.group_size


@dataclass(frozen=True, slots=True)
class Policy:
    """What is done about devices that await repair.

    wait: training stops until every replica is whole again.  drop: a replica without all its ranks is left out.
    ntp, composed: it goes on with fewer ranks (see `reduced`).  `sizes` are the group sizes that are supported (None:
    all).  `boost` speeds up the devices of a damaged group.  `resplit` moves layers from damaged stages of a replica
    to whole ones.  `spare_domains` stand by.  `keep_batch`: the others take over what a replica cannot do, and the
    step gets longer; else the batch shrinks for the time being.
    """

    name: str
    damage: Damage
    packed: bool = True
    boost: float = 1.0
    sizes: tuple[int, ...] | None = None
    resplit: bool = False
    spare_domains: int = 0
    keep_batch: bool = False

    def with_spares(self, spare_domains: int) -> Policy:
        return replace(self, spare_domains=spare_domains)


# A group that lost more than this (or half) is left out: it is then too slow or does not fit anyway.
DEEPEST = 8
# Speed of a boosted device: NTP's racks allow 1.3 x the power; clock taken as its square root, an assumption.
POWER_BOOST = 1.14


def standard_policies(spare_domains: int = 0, *, keep_batch: bool = False) -> tuple[Policy, ...]:
    """Those that are compared side by side."""
    plain = (
        Policy("wait", "wait"),
        Policy("drop-in-place", "drop", packed=False),
        Policy("drop", "drop"),
        Policy("resplit", "composed", resplit=True),
        Policy("ntp", "ntp"),
        Policy("composed", "composed"),
        Policy("ntp-boost", "ntp", boost=POWER_BOOST),
        Policy("composed-boost", "composed", boost=POWER_BOOST),
    )
    return tuple(replace(policy, spare_domains=spare_domains, keep_batch=keep_batch) for policy in plain)


def slowdowns(policy: Policy, geometry: Geometry, works: Sequence[StageWork]) -> tuple[float, ...]:
    """Slowdown at every level 0 .. group_size; infinite where the policy cannot go on.

    Levels round down to the next supported size.  Stages differ: the worst one counts.
    """
    whole = geometry.group_size
    table = [math.inf] * whole + [1.0]
    if policy.damage in ("wait", "drop"):
        return tuple(table)
    how: Reduction = "ntp" if policy.damage == "ntp" else "composed"
    for level in range(max(whole // 2, whole - DEEPEST, 1), whole):
        size = level
        if policy.sizes is not None:
            size = max((s for s in policy.sizes if s <= level), default=0)
        if size:
            table[level] = max(slowdown(work, size, how, policy.boost) for work in works)
    for level in range(1, whole + 1):  # more ranks are never worse: the rest may idle
        table[level] = min(table[level], table[level - 1])
    return tuple(table)


def micro_batches_in_time(geometry: Geometry, slow: float) -> int:
    """Micro-batches that a slower replica does in a healthy step.

    # 1F1B: (m' + P - 1) slow <= m + P - 1    m healthy micro-batches, P stages
    #   leaves out: gradient sync and optimizer, which do not get slower with the share
    """
    if math.isinf(slow):
        return 0
    fill = geometry.num_stages - 1
    possible = math.floor((geometry.micro_batches + fill) / slow - fill + 1e-9)
    return min(max(possible, 0), geometry.micro_batches)


def level_shares(policy: Policy, geometry: Geometry, works: Sequence[StageWork]) -> tuple[float, ...]:
    """Share of a whole replica's work that one at each level does.

    With a single replica the step stretches instead: nobody waits for it, so it keeps its batch.
    """
    table = slowdowns(policy, geometry, works)
    if geometry.num_replicas == 1:
        return tuple(0.0 if math.isinf(slow) else 1.0 / max(slow, 1.0) for slow in table)
    return tuple(micro_batches_in_time(geometry, slow) / geometry.micro_batches for slow in table)


def domain_levels(policy: Policy, geometry: Geometry, failed: int) -> list[int]:
    """Levels of the groups that a domain with `failed` devices forms: whole ones first, then what is left."""
    left = max(geometry.devices_per_domain - failed, 0)
    levels = [geometry.group_size] * (left // geometry.group_size)
    if policy.damage in ("ntp", "composed") and left % geometry.group_size:
        levels.append(left % geometry.group_size)
    return levels


def packed_speed(
    policy: Policy, geometry: Geometry, shares: Sequence[float], slow: Sequence[float], damaged: Sequence[int]
) -> float:
    """Share of full speed with packing; `damaged` has the failed devices of each damaged domain, spares included."""
    levels: list[int] = []
    for failed in damaged:
        levels += domain_levels(policy, geometry, failed)
    healthy = (geometry.num_domains + policy.spare_domains - len(damaged)) * geometry.groups_per_domain
    partial = sorted((level for level in levels if level < geometry.group_size), reverse=True)
    whole = healthy + len(levels) - len(partial)
    needed = geometry.num_replicas * geometry.num_stages
    if whole >= needed:
        return 1.0
    if policy.damage == "wait":
        return 0.0
    stages = geometry.num_stages
    complete = whole // stages
    rest = [geometry.group_size] * (whole - complete * stages) + partial
    replicas = [rest[i : i + stages] for i in range(0, (geometry.num_replicas - complete) * stages, stages)]
    replicas = [groups for groups in replicas if len(groups) == stages]
    if policy.resplit:
        slows = [min(slow[min(groups)], resplit_slowdown(geometry, groups, slow)) for groups in replicas]
    else:
        slows = [slow[min(groups)] for groups in replicas]
    if policy.keep_batch:
        return kept_batch_speed(geometry, [1.0] * complete + slows)
    if geometry.num_replicas == 1:
        return 0.0 if not slows or math.isinf(slows[0]) else 1.0 / max(slows[0], 1.0)
    if policy.resplit:
        parts = [micro_batches_in_time(geometry, one) / geometry.micro_batches for one in slows]
    else:
        parts = [shares[min(groups)] for groups in replicas]
    return (complete + sum(parts)) / geometry.num_replicas


def fixed_speed(
    policy: Policy,
    geometry: Geometry,
    shares: Sequence[float],
    slow: Sequence[float],
    damaged: Mapping[int, Sequence[int]],
) -> float:
    """Share of full speed when every group stays where it is; `damaged` has the levels of each damaged replica."""
    if not damaged:
        return 1.0
    if policy.damage == "wait":
        return 0.0
    whole = geometry.num_replicas - len(damaged)
    if policy.keep_batch:
        return kept_batch_speed(geometry, [1.0] * whole + [slow[min(levels)] for levels in damaged.values()])
    return (whole + sum(shares[min(levels)] for levels in damaged.values())) / geometry.num_replicas


def resplit_slowdown(geometry: Geometry, levels: Sequence[int], slow: Sequence[float]) -> float:
    """Slowdown of a replica that deals its layers anew over stages of unlike levels, whole layers each.

    # min over integer layers l_i (sum l_i = layers) of max_i l_i slow(level_i), over layers per stage
    """
    if any(math.isinf(slow[level]) for level in levels):
        return math.inf
    total = geometry.layers_per_stage * len(levels)
    speeds = [1.0 / slow[level] for level in levels]
    layers = [int(total * speed / sum(speeds)) for speed in speeds]
    for _ in range(total - sum(layers)):
        index = min(range(len(levels)), key=lambda i: (layers[i] + 1) * slow[levels[i]])
        layers[index] += 1
    return max(count * slow[level] for count, level in zip(layers, levels, strict=True)) / geometry.layers_per_stage


def kept_batch_speed(geometry: Geometry, slows: Sequence[float]) -> float:
    """Share of full speed when the replicas that are left do the whole batch between them.

    # least T with sum_r floor(T / slow_r - (P - 1)) >= B;  speed = (m + P - 1) / T    B = m x replicas
    """
    alive = [slow for slow in slows if not math.isinf(slow)]
    if not alive:
        return 0.0
    fill = geometry.num_stages - 1
    batch = geometry.micro_batches * geometry.num_replicas
    counted: dict[float, int] = {}
    for slow in alive:
        counted[slow] = counted.get(slow, 0) + 1

    def done(seconds: float) -> int:
        return sum(count * max(math.floor(seconds / slow - fill + 1e-9), 0) for slow, count in counted.items())

    low = batch / sum(count / slow for slow, count in counted.items())
    high = low + (fill + 1) * max(counted)
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (low, middle) if done(middle) >= batch else (middle, high)
    return min((geometry.micro_batches + fill) / high, 1.0)
