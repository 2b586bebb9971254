"""The page: complete, self-contained, the same numbers as the plan, and drawn by a real browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli
from commands.sources import first_pass
from cost_models.sources import device_costs
from cost_models.step import price
from reports.plan_charts import memory_by_rank
from specs.plan import Alternative, Contingency, LadderRung, Plan
from specs.presets import cluster_preset, model_preset
from specs.runlog import CheckpointRecord, EvaluationRecord, IncidentRecord, Record, SlowRecord
from tests import plans, runs


def priced(plan: Plan) -> Plan:
    """With predictions, a ladder and alternatives, as the planner leaves it."""
    predicted = price(plan, device_costs(plan.cluster, plan.training))
    step, memory = predicted.step_time_seconds, predicted.peak_memory_bytes
    return plan.with_results(
        predicted=predicted,
        ladder=(
            LadderRung(freedom="best uniform", step_time_seconds=1.1 * step, gain_over_previous=None, layout="a"),
            LadderRung(freedom="+ degree per module", step_time_seconds=step, gain_over_previous=1 / 11, layout="b"),
        ),
        alternatives=(
            Alternative(layout="<two> & a half", step_time_seconds=1.2 * step, peak_memory_bytes=memory, reason="slow"),
            Alternative(layout="none", step_time_seconds=None, peak_memory_bytes=None, reason="does not fit"),
        ),
        contingencies=(
            Contingency(
                lost=(1,),
                equivalent=(0, 1),
                policy="drop",
                layout="the others take its share",
                sequences=tuple(0 if not index else r.sequences for index, r in enumerate(plan.replicas)),
                global_batch=plan.training.global_batch,
                predicted=predicted,
                alternatives=(
                    Alternative(layout="wait: x", step_time_seconds=None, peak_memory_bytes=None, reason="slow"),
                ),
            ),
        ),
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Four stages, MLPs in two blocks, some of them recomputed."""
    made = plans.plan(
        stages=4, ranks=8, degree=8, replicas=2, micro_batch=2, micro_batches=8,
        model=model_preset("llama-3-8b"), on=cluster_preset("h100x64"), seq_len=2048,
    )  # fmt: skip
    data = made.model_dump(mode="json")
    for stage in data["pipelines"][0]["stages"]:
        for number, placement in enumerate(stage["modules"]):
            if placement["module"].endswith("mlp"):
                placement["blocks"] = [4, 4]
                placement["recompute"] = "full" if number < 4 else "selective"
    return priced(Plan.model_validate(data))


def eventful_run() -> list[Record]:
    """Steps, a checkpoint, a lost device that comes back, a slow one, and a restart that repeats steps."""
    first = runs.steps(1005.0, range(1, 41), warm_up=2)
    second = runs.steps(1105.0, range(21, 61), warm_up=2, slower=1.2)
    common = {"policy": "reduced", "layout": "", "batch_kept": True, "source": "memory"}
    lost = IncidentRecord(
        time=1020.0, generation=1, step=10, redone_steps=0, lost={1: "killed"}, world_size=1, global_batch=8,
        seconds={"failure_detection": 1.0, "program_startup": 2.0}, **common,
    )  # fmt: skip
    back = IncidentRecord(
        time=1030.0, generation=2, step=15, redone_steps=0, lost={}, returned=(1,), world_size=2, global_batch=8,
        seconds={"program_startup": 1.0}, **common,
    )  # fmt: skip
    return [
        runs.start(1005.0),
        *first[:20],
        CheckpointRecord(time=1027.0, step=20, path="x", size_bytes=10, seconds=0.5),
        lost,
        back,
        SlowRecord(time=1035.0, step=30, rank=1, factor=1.3),
        *first[20:],
        runs.memory(),
        runs.start(1105.0, step=20),
        *second,
        EvaluationRecord(time=second[-1].time, step=60, loss=4.0, tokens=512, seconds=0.1),
        runs.end(second[-1].time, step=60, startup=5.0, in_steps=48.0),
    ]


def report(source: Path, out: Path, *options: str) -> str:
    result = CliRunner().invoke(cli.app, ["report", str(source), "-o", str(out), "--trials", "2", *options])
    assert result.exit_code == 0, result.output
    return out.read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Headings, charts with their words, and whatever a browser would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.charts: list[str] = []
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self._in_heading = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.add(tag)
        self._in_heading = tag == "h2"
        if tag == "svg":
            assert found["role"] == "img"
            self.charts.append(found["aria-label"] or "")
        for name in ("src", "href", "xlink:href"):
            value = found.get(name)
            if value and not value.startswith(("#", "data:")):
                self.loads.append(value)

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.headings.append(data)
            self._in_heading = False


OF_A_PLAN = [
    "How is the model cut?",
    "Does it fit?",
    "Where does a step's time go?",
    "What does the pipeline do?",
    "What does each freedom buy?",
    "What is left after failures?",
]


def test_a_page_of_a_plan(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    html = report(tmp_path / "plan.json", tmp_path / "report.html")
    outline = Outline(html)
    assert outline.headings == [
        *OF_A_PLAN,
        "What was not taken?",
        "What happens when a device is lost?",
        "The layout in full",
    ]
    assert "is left out: the others take its share" in html
    assert len(outline.charts) == 2 * 8
    assert all(outline.charts)
    assert outline.loads == []
    assert not outline.tags & {"script", "link"} - {"link"}
    assert not re.search(r"@import|url\((?!#)", html)
    assert "&lt;two&gt; &amp; a half" in html
    assert not re.search(r"#(010203|8a8b8c|fdfcfb)", html), "a stand-in colour is left"


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run in which much happened."""
    folder = tmp_path_factory.mktemp("page")
    runs.write(folder / "run", eventful_run(), of=priced(runs.plan()))
    return report(folder / "run", folder / "report.html")


def test_a_page_of_a_run(run_page: str) -> None:
    outline = Outline(run_page)
    assert outline.headings[6:9] == ["What happened?", "What did it learn?", "Where did the run's time go?"]
    said = " ".join(outline.charts)
    assert "2 starts, 1 checkpoints, 2 incidents" in said
    assert "wasted_progress" in said


@pytest.mark.parametrize("steps", [0, 2])
def test_a_page_of_a_run_that_broke_off(steps: int, tmp_path: Path) -> None:
    records: list[Record] = [runs.start(1005.0), *runs.steps(1005.0, range(1, steps + 1), warm_up=steps)]
    runs.write(tmp_path / "run", records, of=priced(runs.plan()))
    html = report(tmp_path / "run", tmp_path / "report.html")
    headings = Outline(html).headings
    assert "What is not shown" in headings
    assert "Measured beside predicted: " in html
    assert ("What happened?" in headings) == (steps > 0)


def test_a_page_without_predictions_is_refused(tmp_path: Path) -> None:
    plans.plan().save(tmp_path / "plan.json")
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "out.html")])
    assert "no predicted numbers" in str(result.exception)
    assert not (tmp_path / "out.html").exists()


def test_costs_that_are_not_the_plans_are_said(tmp_path: Path) -> None:
    planned = priced(runs.plan())
    made = planned.made.model_copy(update={"inputs": {"profile": "0" * 64}})
    planned.model_copy(update={"made": made}).save(tmp_path / "plan.json")
    html = report(tmp_path / "plan.json", tmp_path / "report.html")
    assert "made with a profile; passes are drawn from shipped device data" in html


def test_memory_by_rank_holds_the_predicted_peak(plan: Plan) -> None:
    assert plan.predicted is not None
    ranks = memory_by_rank(plan)
    assert list(ranks.terms) == [str(rank) for replica in plan.replicas for rank in replica.ranks]
    assert (ranks.words, ranks.starts) == ("rank", (32,))
    assert max(terms.total() for terms in ranks.terms.values()) == plan.predicted.peak_memory_bytes


def test_memory_of_many_ranks_is_that_of_each_kind_of_replica() -> None:
    """Two kinds that differ in their blocks; all hold to the fullest rank."""
    one, other = (
        plans.plan(stages=2, ranks=8, degree=degree, replicas=16, model=model_preset("gpt2"), seq_len=512,
                   on=cluster_preset("h100x256"))
        for degree in (1, 8)
    )  # fmt: skip
    replicas = [replica.model_copy(update={"pipeline": number % 2}) for number, replica in enumerate(one.replicas)]
    both = one.model_copy(update={"pipelines": one.pipelines + other.pipelines, "replicas": tuple(replicas)})
    predicted = price(both, device_costs(both.cluster, both.training))
    found = memory_by_rank(both.with_results(predicted=predicted))
    assert len(found.terms) == 2 * 16
    assert found.starts == (16,)
    assert "each kind" in found.words
    assert max(terms.total() for terms in found.terms.values()) == predicted.peak_memory_bytes


def test_the_passes_are_those_of_the_prediction(plan: Plan) -> None:
    """Every action once, none before its stage is free, and as long as the simulated pipeline."""
    found = first_pass(plan, device_costs(plan.cluster, plan.training))
    spans = found.spans()
    assert len(spans) == 2 * 4 * 8
    assert max(span.stop for span in spans) == pytest.approx(found.timing.makespan_seconds)
    for stage in range(4):
        own = sorted((span for span in spans if span.stage == stage), key=lambda span: span.start)
        assert all(before.stop <= after.start + 1e-9 for before, after in pairwise(own))
    in_passes = found.timing.makespan_seconds
    assert plan.predicted is not None
    assert in_passes <= plan.predicted.step_time_seconds


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS = (1280, 400)
# Looks at the page in a frame of each width, and leaves what it saw in the title.
LOOK = """<!doctype html>%s<script>
const seen = {};
const look = (frame) => {
  const page = frame.contentDocument, root = page.documentElement;
  const charts = [...page.querySelectorAll("svg")].map((svg) => {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
    const shapes = svg.querySelectorAll("path, use").length;
    return {width: box.width, height: box.height, shapes, texts: texts.length,
            outside: texts.filter((t) => t.width && (t.left < box.left - 4 || t.right > box.right + 12)).length};
  }).filter((chart) => chart.width);
  const style = page.defaultView.getComputedStyle(page.body);
  seen[frame.width] = {overflow: root.scrollWidth - root.clientWidth, charts, paper: style.backgroundColor};
  document.title = JSON.stringify(seen);
};
for (const frame of document.querySelectorAll("iframe")) frame.onload = () => look(frame);
</script>"""
FRAME = '<iframe src="report.html" width="%d" height="900"></iframe>'


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_draws_every_chart(dark: bool, run_page: str, tmp_path: Path) -> None:
    """Wide and narrow, with nothing in the console and nothing wider than its window."""
    assert BROWSER is not None
    (tmp_path / "report.html").write_text(run_page, encoding="utf-8")
    (tmp_path / "look.html").write_text(LOOK % "".join(FRAME % width for width in WIDTHS))
    result = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--window-size=1400,1000",
            "--virtual-time-budget=20000",
            "--dump-dom",
            f"file://{tmp_path}/look.html",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "CONSOLE" not in result.stderr
    title = re.search(r"<title>(.*?)</title>", result.stdout)
    assert title is not None, result.stdout[:500]
    found = json.loads(title[1])
    assert set(found) == {str(width) for width in WIDTHS}
    for width in WIDTHS:
        view = found[str(width)]
        assert view["overflow"] <= 0, "the page is wider than its window"
        assert len(view["charts"]) == run_page.count("<svg") / 2
        for chart in view["charts"]:
            assert chart["width"] > 0.8 * min(width, 1120) - 32
            assert chart["height"] > 60
            assert chart["shapes"] > 5
            assert chart["texts"] > 3
            assert chart["outside"] == 0
        assert view["paper"] == ("rgb(21, 24, 27)" if dark else "rgb(255, 255, 255)")
