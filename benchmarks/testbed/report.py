"""Results as tables (Markdown, CSV), with the machine and the date, and what `pictures` draws of them."""

from __future__ import annotations

import csv
import io
import os
import platform
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from benchmarks.testbed import agreement, nonuniform, pictures, slow_rank
from benchmarks.testbed.measure import Measured
from executor.device import device_name
from specs.base import write_whole
from specs.units import percent, seconds


def heading(title: str) -> str:
    """Title, machine, date."""
    import torch

    machine = f"{os.cpu_count()} x {device_name(torch.device('cpu'))}, Linux {platform.release()}"
    return f"# {title}\n\n{machine}, torch {torch.__version__}, gloo; {date.today().isoformat()}.\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"


def write_agreement(found: Sequence[agreement.Agreement], results: Path) -> str:
    """Summary by case, all rows as CSV, a picture."""
    summary = [
        (
            item.case.name,
            item.measured_on,
            str(len(item.predicted)),
            percent(item.median_error),
            percent(max(map(abs, item.errors.values()))),
            f"{item.rank_correlation:.3f}",
            percent(item.regret),
            item.best,
        )
        for item in found
    ]
    header = (
        "case",
        "measured on",
        "plans",
        "median error",
        "worst",
        "rank correlation",
        "regret of the choice",
        "measured best",
    )
    text = heading("Predicted against measured on two hosts") + "\n" + _table(header, summary)
    rivals = []
    for item in found:
        chosen = item.measured[agreement.CHOSEN]
        for peer, name in item.rivals.items():
            saved = 1 - chosen.seconds / item.measured[name].seconds
            times = _spread(item.measured[name]), _spread(chosen), percent(saved, signed=True)
            rivals.append((item.case.name, peer, "" if name == peer else name, *times))
    text += "\nPeers' layouts for the same case, run in the same turns:\n\n"
    text += _table(("case", "whose", "layout", "its step", "chosen", "chosen saves"), rivals)
    buffer = io.StringIO()
    rows = csv.writer(buffer, lineterminator="\n")
    rows.writerow(["case", "plan", "predicted_s", "measured_s", "p10_s", "p90_s", "turns", "error", "activation_error"])
    for item in found:
        for name, measured in sorted(item.measured.items(), key=lambda pair: pair[1].seconds):
            times = (f"{v:.4f}" for v in (measured.seconds, measured.p10, measured.p90))
            if name in item.predicted:
                foreseen = f"{item.predicted[name]:.4f}"
                activation = item.activation_errors.get(name)
                errors = [f"{item.errors[name]:+.3f}", "" if activation is None else f"{activation:+.3f}"]
            else:
                foreseen, errors = "", ["", ""]
            rows.writerow([item.case.name, name, foreseen, *times, measured.turns, *errors])
    write_whole(results / "testbed-agreement.csv", buffer.getvalue())
    write_whole(results / "testbed-agreement.md", text)
    pictures.draw_agreement(found, results / "testbed-agreement.png")
    return text


def write_nonuniform(found: Sequence[nonuniform.Outcome], results: Path) -> str:
    """One row a case and rival: time saved by degrees per module, predicted and measured."""
    rows = []
    for item in found:
        cap = "none" if item.memory_cap_bytes is None else f"{item.memory_cap_bytes / 2**20:.0f} MiB"
        where = f"{item.case.bed.num_hosts} x {item.case.bed.ranks_per_host}"
        for rival in (nonuniform.UNIFORM, nonuniform.ONE_DEGREE):
            predicted, measured = item.predicted_saving(rival), item.measured_saving(rival)
            if measured is not None:
                times = [_spread(item.measured[name]) for name in (rival, nonuniform.CHOSEN)]
            else:
                times = ["nothing fits" if predicted is None else "a plan above or the chosen one", ""]
            savings = ["" if saving is None else percent(saving, signed=True) for saving in (predicted, measured)]
            rows.append((item.case.name, where, cap, rival, *times, *savings))
    header = ("case", "hosts x ranks", "memory cap", "rival", "rival's step", "chosen", "saved, predicted", "measured")
    text = heading("Best uniform plan against degrees per module") + "\n" + _table(header, rows)
    write_whole(results / "testbed-nonuniform.md", text)
    pictures.draw_nonuniform(found, results / "testbed-nonuniform.png")
    return text


def _spread(each: Measured) -> str:
    return f"{seconds(each.seconds)} ({1e3 * each.p10:.0f} .. {1e3 * each.p90:.0f})"


def write_slow_rank(found: slow_rank.Recovery, results: Path) -> str:
    """Three step times, the bound and what is recovered."""
    rows = [
        (
            name,
            seconds(each.seconds),
            f"{1e3 * each.p10:.0f} .. {1e3 * each.p90:.0f}",
            percent(each.seconds / found.healthy.seconds - 1, signed=True),
        )
        for name, each in (
            ("healthy", found.healthy),
            (slow_rank.EVEN, found.even),
            (slow_rank.BY_SPEED, found.by_speed),
        )
    ]
    text = heading(f"One of {found.num_ranks} ranks at {slow_rank.SHARE:.0%} speed") + "\n"
    text += _table(("cuts", "step", "10 .. 90 %, ms", "over healthy"), rows)
    text += f"\nNo cut can beat {seconds(found.bound)}; cuts by speed recover {percent(found.recovered)} of the rest.\n"
    write_whole(results / "testbed-slow-rank.md", text)
    pictures.draw_slow_rank(found, results / "testbed-slow-rank.png")
    return text
