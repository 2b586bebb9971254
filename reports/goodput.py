"""What a plan delivers over days of failures, as tables for the terminal and as JSON."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cost_models.case import DAY_SECONDS
from cost_models.delivery import Delivery, PolicyResult
from cost_models.simulation import Rivalry
from specs.runlog import Bucket
from specs.units import percent, rate, seconds

POLICY_NAMES = {
    "wait": "stop until repaired",
    "drop-in-place": "survivors stay",
    "drop": "survivors packed",
    "resplit": "also re-split stages",
    "ntp": "nonuniform TP",
    "composed": "blocks per module",
    "ntp-boost": "with power boost",
    "composed-boost": "with power boost",
}
# Names of the run log's buckets, so that a simulated and a real run read alike.
LOSSES: tuple[tuple[Bucket, str], ...] = (
    ("checkpoint_save", "checkpoint_save"),
    ("wasted_progress", "wasted_progress"),
    ("other", "other (detection, waiting)"),
    ("program_startup", "program_startup"),
    ("checkpoint_restore", "checkpoint_restore"),
)
# Below this, a policy that cuts replicas down is not worth having beside packed drop.
SMALL_GAIN = 0.01


def waterfall(delivery: Delivery) -> list[tuple[str, float]]:
    """From 1 down to what is delivered: (what, share of the ideal), losses negative; they add up."""
    outcome = delivery.chosen.outcome
    horizon = delivery.days * DAY_SECONDS
    rows = [("ideal", 1.0)]
    rows += [(name, -outcome.seconds[bucket] / horizon) for bucket, name in LOSSES]
    rows.append(("fewer devices until repair", -(outcome.seconds["step"] - outcome.full_speed_seconds) / horizon))
    rows.append(("delivered", outcome.full_speed_seconds / horizon))
    return rows


def verdict(delivery: Delivery) -> str | None:
    """Whether cutting replicas down beats packed drop on this cluster; None when they were not compared."""
    found = {result.policy.name: result for result in delivery.results}
    if "drop" not in found or "ntp" not in found:
        return None
    drop = found["drop"].share
    gains = {name: found[name].share / drop - 1.0 for name in ("ntp", "composed") if name in found}
    best = max(gains, key=lambda name: gains[name])
    size = delivery.case.geometry.domain_size
    told = ", ".join(f"{name} {percent(gain, signed=True)}" for name, gain in gains.items())
    still = found["ntp"].share_with_one_lost
    does = f"a replica that lost one device does {percent(still)} of its work"
    if still == 0.0:
        does = "a replica that lost one device does not fit in memory"
    if gains[best] < SMALL_GAIN:
        return f"In domains of {size}, nonuniform TP gains under 1 % over packed drop ({told}; {does}): not worth it."
    return f"In domains of {size}, nonuniform TP gains over packed drop: {told}; {does}."


def headline(delivery: Delivery, tokens: float | None) -> dict[str, float]:
    """Tokens per day with band, and what that means for a goal of `tokens`."""
    case, outcome = delivery.case, delivery.chosen.outcome
    ideal = case.ideal_tokens_per_day
    low, middle, high = outcome.quantiles()
    devices = case.geometry.num_ranks + delivery.spares * case.geometry.devices_per_domain
    numbers = {
        "tokens_per_day": ideal * outcome.mean,
        "tokens_per_day_p5": ideal * low,
        "tokens_per_day_p50": ideal * middle,
        "tokens_per_day_p95": ideal * high,
        "device_hours_per_day": devices * 24.0,
    }
    if tokens is not None and outcome.mean > 0.0:
        numbers["days_to_tokens"] = tokens / (ideal * outcome.mean)
        numbers["days_to_tokens_p5"] = tokens / (ideal * high)
        numbers["days_to_tokens_p95"] = tokens / (ideal * low) if low > 0.0 else math.inf
        numbers["device_hours_to_tokens"] = numbers["days_to_tokens"] * devices * 24.0
    return numbers


def as_json(delivery: Delivery, tokens: float | None, rivalry: Rivalry | None = None) -> dict[str, object]:
    """Everything that `render` prints, as plain data.  Infinite values (never) are null."""
    times, case = delivery.times, delivery.case
    return {
        "days": delivery.days,
        "trials": delivery.trials,
        "seed": delivery.seed,
        "target": delivery.target,
        "estimated": case.model.estimated,
        "failure_model": case.model.name,
        "headline": {name: _finite(value) for name, value in headline(delivery, tokens).items()},
        "policy": delivery.chosen.policy.name,
        "waterfall": dict(waterfall(delivery)),
        "policies": {result.policy.name: _policy_json(result) for result in delivery.results},
        "checkpoint": {
            "interval_seconds": times.interval,
            "exact_seconds": _finite(delivery.exact_seconds),
            "young_seconds": _finite(delivery.young_seconds),
            "daly_seconds": _finite(delivery.daly_seconds),
            "stall_seconds": times.stall,
            "lag_seconds": times.lag,
            "load_seconds": times.load,
            "two_tiers": None
            if delivery.two_tiers is None
            else {
                "work_seconds": delivery.two_tiers.work_seconds,
                "segments": delivery.two_tiers.segments,
                "renewal_factor": delivery.two_tiers.factor,
            },
        },
        "failures_per_day": times.rate_per_second * DAY_SECONDS,
        "restart_seconds": times.mean_downtime,
        "sensitivity": {change.name: change.gain for change in delivery.sensitivity},
        "improvements": {change.name: change.gain for change in delivery.improvements},
        "stragglers": {
            "spread": delivery.stragglers.spread,
            "links": delivery.stragglers.links,
            "episodes": delivery.stragglers.episodes,
            "persistent": delivery.stragglers.persistent,
            "cull_nodes": delivery.cull_nodes,
            "cull_gain": delivery.cull_gain,
        },
        "verdict": verdict(delivery),
        "against": None if rivalry is None else _rivalry_json(rivalry),
        "notes": list(case.notes),
    }


def _rivalry_json(rivalry: Rivalry) -> dict[str, object]:
    crossing = rivalry.crossing
    return {
        "plan": rivalry.second,
        "goodput_tokens_per_second": rivalry.second_goodput,
        "own_goodput_tokens_per_second": rivalry.first_goodput,
        "break_even_days_between_failures": None if crossing is None else crossing.days_between_failures,
        "sentence": rivalry.sentence(),
    }


def _policy_json(result: PolicyResult) -> dict[str, object]:
    low, middle, high = result.outcome.quantiles()
    return {
        "renewal_factor": result.renewal,
        "degraded_factor": result.degraded.mean,
        "degraded_standard_error": result.degraded.standard_error,
        "closed_form": result.share,
        "monte_carlo": result.outcome.mean,
        "standard_error": _finite(result.outcome.standard_error),
        "p5": low,
        "p50": middle,
        "p95": high,
        "rejoin": result.rejoin,
        "spare_domains": result.policy.spare_domains,
        "spares_needed": result.spares_needed,
        "share_with_one_lost": result.share_with_one_lost,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def render(delivery: Delivery, tokens: float | None, rivalry: Rivalry | None = None) -> RenderableType:
    """Everything `plait simulate` prints."""
    parts: list[RenderableType] = [_headline(delivery, tokens), _waterfall(delivery)]
    if len(delivery.results) > 1:
        parts.append(_policies(delivery))
    said = verdict(delivery)
    if said is not None:
        parts += [Text(said), Text()]
    if rivalry is not None:
        parts += [Text(rivalry.sentence()), Text()]
    parts += [_checkpoints(delivery), _what_ifs(delivery), _stragglers(delivery)]
    notes = list(delivery.case.notes)
    if delivery.case.model.estimated:
        notes.insert(0, f"failure rates and bandwidths are estimates ({delivery.case.model.name}); see --failures")
    parts += [Text(f"note: {note}", style="yellow") for note in notes]
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", header_style="dim", no_wrap=bool(number))
    return table


def _count(value: float) -> str:
    return rate(value, "").removesuffix(" /s")


def _headline(delivery: Delivery, tokens: float | None) -> RenderableType:
    numbers = headline(delivery, tokens)
    case = delivery.case
    per_day = delivery.times.rate_per_second * DAY_SECONDS
    policy = POLICY_NAMES[delivery.chosen.policy.name]
    title = (
        f"{delivery.days:g} days on {case.geometry.num_ranks:,} devices, {delivery.spares} spare domains; "
        f"policy {delivery.chosen.policy.name}: {policy}"
    )
    table = _table("", "", "expected", "5 %", "50 %", "95 %")
    table.title = None
    table.add_row(
        "tokens per day",
        *(_count(numbers[f"tokens_per_day{end}"]) for end in ("", "_p5", "_p50", "_p95")),
    )
    outcome = delivery.chosen.outcome
    table.add_row("share of ideal", percent(outcome.mean), *(percent(value) for value in outcome.quantiles()))
    if "days_to_tokens" in numbers and tokens is not None:
        table.add_row(
            f"days to {_count(tokens)} tokens",
            f"{numbers['days_to_tokens']:,.1f}",
            f"{numbers['days_to_tokens_p5']:,.1f}",
            "",
            f"{numbers['days_to_tokens_p95']:,.1f}",
        )
        table.add_row("device-hours for them", f"{numbers['device_hours_to_tokens']:,.0f}")
    else:
        table.add_row("device-hours per day", f"{numbers['device_hours_per_day']:,.0f}")
    every = f"one in {seconds(DAY_SECONDS / per_day)}" if per_day else "none"
    line = f"failures {per_day:.3g} per day ({every}); {delivery.trials} histories, seed {delivery.seed}"
    return Group(Text(title, style="bold"), table, Text(line, style="dim"), Text())


def _waterfall(delivery: Delivery) -> RenderableType:
    table = _table("Where it goes", "", "share", "")
    for name, share in waterfall(delivery):
        bar = "#" * round(abs(share) * 40) if name in ("ideal", "delivered") else "-" * round(abs(share) * 40)
        table.add_row(name, f"{share * 100:.2f} %", Text(bar, style="dim"))
    table.columns[2].justify = "left"
    return Group(table, Text())


def _policies(delivery: Delivery) -> RenderableType:
    table = _table("Policies side by side", "", "", "G x X", "played", "+-", "X", "spares")
    table.columns[0].no_wrap = True
    table.columns[1].justify = "left"
    for result in sorted(delivery.results, key=lambda item: -item.outcome.mean):
        error = result.outcome.standard_error
        table.add_row(
            result.policy.name,
            POLICY_NAMES[result.policy.name],
            f"{result.share:.4f}",
            f"{result.outcome.mean:.4f}",
            f"{1.96 * error:.4f}" if math.isfinite(error) else "",
            f"{result.degraded.mean:.4f}",
            "more" if result.spares_needed is None else str(result.spares_needed),
            style="bold" if result is delivery.chosen else "",
        )
    legend = (
        f"played: Monte Carlo, +- 95 % of its mean; G = {delivery.chosen.renewal:.4f}; "
        f"spare domains for X = {delivery.target:g}"
    )
    return Group(table, Text(legend, style="dim"), Text())


def _checkpoints(delivery: Delivery) -> RenderableType:
    times = delivery.times
    table = _table("Checkpoint interval and times", "", "used", "exact", "Young", "Daly", "stall", "durable", "load")
    table.add_row(
        "",
        *(
            seconds(value) if math.isfinite(value) else "never"
            for value in (
                times.interval,
                delivery.exact_seconds,
                delivery.young_seconds,
                delivery.daly_seconds,
                times.stall,
                times.lag,
                times.load,
            )
        ),
    )
    parts: list[RenderableType] = [table]
    tiers = delivery.two_tiers
    if tiers is not None:
        alone = times.renewal()
        often = "each" if tiers.segments == 1 else f"one in {tiers.segments}"
        gain = f"{100 * (tiers.factor / alone - 1):+.2f} %"
        line = f"With copies in other hosts' memory every {seconds(tiers.work_seconds)}, {often} also to storage:"
        parts.append(Text(f"{line} G {tiers.factor:.4f}, not {alone:.4f} ({gain})."))
    return Group(*parts, Text())


def _what_ifs(delivery: Delivery) -> RenderableType:
    table = _table("Improve first (points of the ideal)", "", "gain", "", "If")
    table.columns[3].justify = "left"
    table.add_column("gain", justify="right", header_style="dim")
    for index in range(max(len(delivery.improvements), len(delivery.sensitivity))):
        row: list[str] = []
        for changes in (delivery.improvements, delivery.sensitivity):
            if index < len(changes):
                row += [changes[index].name, f"{changes[index].gain * 100:+.2f}", ""]
            else:
                row += ["", "", ""]
        table.add_row(*row[:5])
    return Group(table, Text())


def _stragglers(delivery: Delivery) -> RenderableType:
    slow = delivery.stragglers
    losses = ", ".join(
        f"{name} {percent(value - 1.0)}"
        for name, value in (("spread", slow.spread), ("links", slow.links), ("episodes", slow.episodes))
    )
    text = f"Stragglers (not in the figures above) would make a step longer: {losses}"
    if slow.persistent > 1.0005:
        text += f"; slow nodes {percent(slow.persistent - 1.0)}"
        if delivery.cull_nodes:
            text += f", taking out the {delivery.cull_nodes} slowest gains {percent(delivery.cull_gain)}"
    together = percent(slow.total(culled=delivery.cull_nodes > 0) - 1.0)
    text += f". With those out, together {together}" if delivery.cull_nodes else f". Together {together}"
    return Group(Text(text + "."), Text())
