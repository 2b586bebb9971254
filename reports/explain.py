"""Why a plan is as it is, and how two plans differ, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.plan import schedule_text
from reports.plan_record import as_json
from specs.plan import Plan, Recompute
from specs.units import num_bytes, percent, seconds

# Gains below this fraction of a step are called nothing: searches stop when they are that close.
NOTHING = 2e-4


class _Neighbour(Protocol):
    @property
    def blocks(self) -> tuple[int, ...]: ...
    @property
    def recompute(self) -> Recompute: ...
    @property
    def step_change_seconds(self) -> float | None: ...
    @property
    def memory_change_bytes(self) -> int | None: ...
    @property
    def reason(self) -> str | None: ...


class _Schedule(Protocol):
    @property
    def schedule(self) -> str: ...
    @property
    def step_change_seconds(self) -> float: ...
    @property
    def memory_change_bytes(self) -> int: ...
    @property
    def reason(self) -> str | None: ...


class _Price(Protocol):
    @property
    def change(self) -> str: ...
    @property
    def gain(self) -> float: ...
    @property
    def least_gain(self) -> float: ...
    @property
    def most_gain(self) -> float: ...
    @property
    def layout(self) -> str | None: ...


def render_explanation(
    free_bytes: Sequence[int],
    modules: Sequence[tuple[str, int, int, Sequence[_Neighbour]]],
    prices: Sequence[_Price] = (),
    schedules: Sequence[_Schedule] = (),
) -> RenderableType:
    """`modules`: name, how many are alike in the stage, stage, neighbours with the plan's own way first."""
    tightest = min(range(len(free_bytes)), key=lambda stage: free_bytes[stage])
    parts: list[RenderableType] = [
        Text(
            f"Memory is tightest on stage {tightest}: {num_bytes(free_bytes[tightest])} left on its fullest rank. "
            "One module changed at a time; the rest of the plan stays."
        )
    ]
    if prices:
        parts += [Text(), _prices(prices)]
    if schedules:
        parts += [Text(), _schedules(schedules)]
    for name, count, stage, neighbours in modules:
        more = f" and {count - 1} more like it" if count > 1 else ""
        table = Table(
            title=f"{name}{more}, stage {stage}",
            title_justify="left",
            title_style="bold",
            box=None,
            padding=(0, 2, 0, 0),
        )
        for column in ("blocks", "recompute", "step", "memory", ""):
            table.add_column(column, justify="right" if column in ("step", "memory") else "left", header_style="dim")
        for row in neighbours:
            table.add_row(
                blocks_text(row.blocks),
                row.recompute,
                "" if row.step_change_seconds is None else _signed(row.step_change_seconds, seconds),
                "" if row.memory_change_bytes is None else _signed(row.memory_change_bytes, num_bytes),
                "taken" if row.reason is None else row.reason,
                style="bold" if row.reason is None else "",
            )
        parts += [Text(), table]
    return Group(*parts)


def _schedules(schedules: Sequence[_Schedule]) -> Table:
    """The plan under each schedule, its own first."""
    table = Table(
        title="Schedule, all else as it is", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
    )
    for column in ("schedule", "step", "memory", ""):
        table.add_column(column, justify="right" if column in ("step", "memory") else "left", header_style="dim")
    for row in schedules:
        table.add_row(
            row.schedule,
            _signed(row.step_change_seconds, seconds),
            _signed(row.memory_change_bytes, num_bytes),
            "taken" if row.reason is None else row.reason,
            style="bold" if row.reason is None else "",
        )
    return table


def _prices(prices: Sequence[_Price]) -> Table:
    """What each change would buy; the range is what bounds leave open."""
    table = Table(
        title="What would make a step shorter", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
    )
    for column in ("", "saves", "proven", ""):
        table.add_column(column, justify="right" if column else "left", header_style="dim")
    for price in prices:
        saves = f"{100.0 * price.gain:.2f} %" if price.gain > NOTHING else "nothing"
        proven = f"{100.0 * price.least_gain:.2f} to {100.0 * price.most_gain:.2f} %"
        table.add_row(price.change, saves, proven, price.layout or "")
    return table


def blocks_text(blocks: tuple[int, ...]) -> str:
    """`4 x 2` for four blocks of two ranks, `4 + 3` for unequal ones."""
    return f"{len(blocks)} x {blocks[0]}" if len(set(blocks)) == 1 else " + ".join(map(str, blocks))


def _signed(value: float, form: object) -> str:
    assert callable(form)
    return "0" if value == 0 else f"{'+' if value > 0 else '-'}{form(abs(value))}"


def render_difference(a: Plan, b: Plan) -> RenderableType:
    """Two plans side by side: shape, modules that are placed otherwise, predicted terms."""
    parts: list[RenderableType] = [_shapes(a, b), Text(), _modules(a, b)]
    if a.predicted is not None and b.predicted is not None:
        parts += [Text(), _predictions(a, b)]
    return Group(*parts)


def difference_json(a: Plan, b: Plan) -> dict[str, object]:
    """Both plans as `plait plan --json` prints them, and the modules that are placed otherwise."""
    left, right = _placements(a), _placements(b)
    names = [name for name in dict.fromkeys([*left, *right]) if left.get(name) != right.get(name)]
    modules = {name: {"a": left.get(name), "b": right.get(name)} for name in names}
    return {"a": as_json(a), "b": as_json(b), "modules_placed_otherwise": modules}


def _two_columns(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for column in ("", "A", "B", "difference"):
        table.add_column(column, justify="left" if not column else "right", header_style="dim")
    return table


def _shapes(a: Plan, b: Plan) -> Table:
    table = _two_columns("Shape")
    for name, of in (
        ("model", lambda p: p.model.name),
        ("cluster", lambda p: p.cluster.name),
        ("ranks", lambda p: str(p.world_size)),
        ("global batch x tokens", lambda p: f"{p.training.global_batch} x {p.training.seq_len}"),
        ("replicas", lambda p: str(len(p.replicas))),
        ("stages", lambda p: str(len(p.pipelines[0].stages))),
        ("ranks per stage", lambda p: " ".join(map(str, sorted({s.num_ranks for s in p.pipelines[0].stages})))),
        ("micro-batch", lambda p: str(p.pipelines[0].micro_batch)),
        ("schedule", lambda p: schedule_text(p.pipelines[0])),
    ):
        left, right = of(a), of(b)
        table.add_row(name, left, right, "" if left == right else "*")
    return table


def _modules(a: Plan, b: Plan) -> Table:
    table = _two_columns("Modules placed otherwise (stage: blocks, recompute, zero)")
    left, right = _placements(a), _placements(b)
    same, shown = 0, 0
    for name in dict.fromkeys([*left, *right]):
        if left.get(name) == right.get(name):
            same += 1
        elif shown < 24:
            shown += 1
            table.add_row(name, left.get(name, "-"), right.get(name, "-"), "*")
    others = len(dict.fromkeys([*left, *right])) - same - shown
    if others:
        table.add_row(f"{others} more", "", "", "*")
    table.add_row("alike", str(same), str(same), "")
    return table


def _placements(plan: Plan) -> dict[str, str]:
    return {
        p.module: f"{index}: {blocks_text(p.blocks)}, {p.recompute}, {p.zero}"
        for index, stage in enumerate(plan.pipelines[0].stages)
        for p in stage.modules
    }


def _predictions(a: Plan, b: Plan) -> Table:
    assert a.predicted is not None
    assert b.predicted is not None
    table = _two_columns("Predicted")
    left, right = a.predicted.step_terms.model_dump(), b.predicted.step_terms.model_dump()
    for name, value in left.items():
        if value or right[name]:
            table.add_row(
                name.replace("_", " "), seconds(value), seconds(right[name]), _signed(right[name] - value, seconds)
            )
    before, after = a.predicted.step_time_seconds, b.predicted.step_time_seconds
    table.add_row("step", seconds(before), seconds(after), percent(after / before - 1.0, signed=True), style="bold")
    table.add_row(
        "peak memory",
        num_bytes(a.predicted.peak_memory_bytes),
        num_bytes(b.predicted.peak_memory_bytes),
        _signed(b.predicted.peak_memory_bytes - a.predicted.peak_memory_bytes, num_bytes),
    )
    goodput = b.predicted.goodput_tokens_per_second / a.predicted.goodput_tokens_per_second - 1.0
    table.add_row(
        "goodput, tokens/s",
        f"{a.predicted.goodput_tokens_per_second:,.0f}",
        f"{b.predicted.goodput_tokens_per_second:,.0f}",
        percent(goodput, signed=True),
    )
    return table
