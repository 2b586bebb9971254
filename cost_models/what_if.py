"""What-ifs: one thing about the cluster changed, and what goodput does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cost_models.case import Case, goodput_share
from cost_models.policies import Policy


@dataclass(frozen=True)
class Change:
    """A what-if and the goodput it gains, as a share of the ideal (closed form)."""

    name: str
    gain: float


Edit = Callable[[Case, Policy], tuple[Case, Policy]]


def _classes(**factors: float) -> Edit:
    def edit(case: Case, policy: Policy) -> tuple[Case, Policy]:
        classes = tuple(
            item.model_copy(update={name: getattr(item, name) * scale for name, scale in factors.items()})
            for item in case.model.classes
        )
        return replace(case, model=case.model.model_copy(update={"classes": classes})), policy

    return edit


def _part(part: str, **factors: float) -> Edit:
    def edit(case: Case, policy: Policy) -> tuple[Case, Policy]:
        old = getattr(case.model, part)
        new = old.model_copy(update={name: getattr(old, name) * scale for name, scale in factors.items()})
        return replace(case, model=case.model.model_copy(update={part: new})), policy

    return edit


def _spares(number: int) -> Edit:
    return lambda case, policy: (case, policy.with_spares(policy.spare_domains + number))


STORAGE = (
    "write_bytes_per_second",
    "storage_write_bytes_per_second",
    "read_bytes_per_second",
    "storage_read_bytes_per_second",
)
SENSITIVITY: dict[str, Edit] = {
    "failures x 1/2": _classes(failures_per_device_day=0.5),
    "failures x 2": _classes(failures_per_device_day=2.0),
    "failures x 4": _classes(failures_per_device_day=4.0),
    "repairs x 1/2": _classes(repair_hours=0.5),
    "repairs x 2": _classes(repair_hours=2.0),
    "storage x 1/2": _part("checkpointing", **dict.fromkeys(STORAGE, 0.5)),
    "storage x 2": _part("checkpointing", **dict.fromkeys(STORAGE, 2.0)),
}
IMPROVEMENTS: dict[str, Edit] = {
    "restart in half the time": _part("restarting", fixed_seconds=0.5, per_rank_seconds=0.5),
    "storage twice as fast": _part("checkpointing", **dict.fromkeys(STORAGE, 2.0)),
    "half the stall of a save": _part("checkpointing", stall_bytes_per_second=2.0, stall_fixed_seconds=0.5),
    "detect in half the time": _classes(detect_seconds=0.5),
    "repair in half the time": _classes(repair_hours=0.5),
    "half as many failures": _classes(failures_per_device_day=0.5),
}


def changes(case: Case, policy: Policy, edits: dict[str, Edit]) -> tuple[Change, ...]:
    """What each edit alone would gain."""
    before = goodput_share(case, policy)
    return tuple(Change(name, goodput_share(*edit(case, policy)) - before) for name, edit in edits.items())


def spare_edits(case: Case) -> dict[str, Edit]:
    """One spare domain more, and about one percent of the cluster."""
    domains = case.geometry.num_domains
    numbers = sorted({1, max(round(domains / 100), 1)})
    return {
        f"{number} spare domain{'s' * (number > 1)} more (+{number / domains:.1%})": _spares(number)
        for number in numbers
    }


def interval_edits(case: Case) -> dict[str, Edit]:
    """All rates at the ends of their 95 % intervals; nothing for a model that has no intervals."""
    if all(item.rate_interval is None for item in case.model.classes):
        return {}

    def at(end: int) -> Edit:
        def edit(case: Case, policy: Policy) -> tuple[Case, Policy]:
            classes = tuple(
                item
                if item.rate_interval is None
                else item.model_copy(update={"failures_per_device_day": item.rate_interval[end]})
                for item in case.model.classes
            )
            return replace(case, model=case.model.model_copy(update={"classes": classes})), policy

        return edit

    return {"rates at low ends": at(0), "rates at high ends": at(1)}
