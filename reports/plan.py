"""A plan as tables for the terminal, at most 100 columns wide."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.contingency import contingency_table
from reports.plan_record import names, runs
from reports.rate_choices import rate_choices_table
from specs.plan import MemoryTerms, Pipeline, Plan, Prediction, StepTerms
from specs.units import num_bytes, percent, rate, seconds

STEP_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "tp_communication": "communication in blocks",
    "pipeline_idle": "pipeline idle",
    "gradient_sync": "gradient sync",
    "optimizer": "optimizer",
    "data": "data",
    "other": "host and other",
}
SHARDED = (
    "optimizer sharded not at all (zero 0)",
    "optimizer sharded over copies (zero 1)",
    "optimizer and gradients sharded over copies (zero 2)",
    "optimizer, gradients and weights sharded over copies (zero 3)",
)
MEMORY_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "working": "working tensors",
    "communication": "communication buffers",
    "reserved": "reserved",
}


def render(plan: Plan) -> RenderableType:
    """Everything `plait plan` prints."""
    parts: list[RenderableType] = [Text(headline(plan)), Text(), _layout_table(plan), Text()]
    if plan.predicted is not None:
        parts += render_prediction(plan, plan.predicted, profiled="profile" in plan.made.inputs)
    if plan.ladder:
        parts += [_ladder_table(plan), Text()]
    if plan.alternatives:
        parts += [_alternatives_table(plan), Text()]
    if plan.rate_choices:
        parts += [rate_choices_table(plan), Text()]
    if plan.contingencies:
        parts += [contingency_table(plan), Text()]
    if plan.certificate is not None:
        parts.append(_certificate(plan))
    return Group(*parts)


def render_prediction(plan: Plan, predicted: Prediction, *, profiled: bool) -> list[RenderableType]:
    """Step time by term, and memory of the fullest rank by term, side by side.  `profiled`: priced with a profile."""
    both = Table.grid(padding=(0, 4, 0, 0))
    both.add_row(_step_table(predicted.step_terms, predicted), _memory_table(predicted.peak_memory_terms, predicted))
    speed = (
        f"{rate(predicted.tokens_per_second, 'tokens')}; goodput "
        f"{rate(predicted.goodput_tokens_per_second, 'tokens')} = that x {predicted.renewal_factor:.4f} (checkpoints, "
        f"restarts) x {predicted.degraded_factor:.4f} (running short); a checkpoint every "
        f"{seconds(predicted.checkpoint_interval_seconds)}"
    )
    parts: list[RenderableType] = [both, Text(), Text(speed)]
    if predicted.estimated:
        rest = "what the profile lacks (selective recompute, sizes beyond its own) is scaled from what it has"
        shipped = "no profile of this cluster; numbers rest on datasheets and published curves"
        parts.append(Text(f"estimated: {rest if profiled else shipped}"))
    cap = plan.memory_cap_bytes
    if cap is not None and predicted.peak_memory_bytes > cap:
        parts.append(Text(f"does not fit: {num_bytes(predicted.peak_memory_bytes)} over the cap of {num_bytes(cap)}"))
    parts += [Text(f"note: {note}") for note in predicted.notes]
    return [*parts, Text()]


def schedule_text(pipeline: Pipeline) -> str:
    """`1f1b`, or `interleaved with 4 virtual stages`."""
    virtual = f" with {pipeline.num_virtual} virtual stages" if pipeline.num_virtual > 1 else ""
    return f"{pipeline.schedule}{virtual}"


def headline(plan: Plan) -> str:
    """Model, cluster and shape in two lines."""
    replicas: dict[int, int] = {}
    for replica in plan.replicas:
        replicas[replica.pipeline] = replicas.get(replica.pipeline, 0) + 1
    shapes = []
    for number, count in sorted(replicas.items()):
        pipeline = plan.pipelines[number]
        sizes = sorted({stage.num_ranks for stage in pipeline.stages})
        ranks = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        shares = {replica.sequences // pipeline.micro_batch for replica in plan.replicas if replica.pipeline == number}
        uneven = f"{min(shares)} to " if len(shares) > 1 else ""
        shapes.append(
            f"{_count(count, 'replica')} of {_count(len(pipeline.stages), 'stage')} of {ranks} "
            f"{'rank' if ranks == '1' else 'ranks'}, {uneven}{_count(max(shares), 'micro-batch')} of "
            f"{_count(pipeline.micro_batch, 'sequence')}, {schedule_text(pipeline)}"
        )
    zero = {p.zero for pipeline in plan.pipelines for stage in pipeline.stages for p in stage.modules}
    sharded = SHARDED[zero.pop()] if len(zero) == 1 else f"optimizer sharded in part (zero {sorted(zero)})"
    used, usable = plan.world_size, plan.cluster.num_usable
    in_use = f"{used} ranks" if used == usable else f"{used} of {usable} usable ranks"
    return (
        f"{plan.model.name} on {plan.cluster.name} ({in_use}), global batch "
        f"{plan.training.global_batch} x {plan.training.seq_len} tokens, {plan.training.precision}\n"
        f"{'; '.join(shapes)}; {sharded}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'es' if what.endswith('ch') else 's'}" if number != 1 else f"1 {what}"


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", header_style="dim")
    return table


def _layout_table(plan: Plan) -> Table:
    """One line for every run of modules of a kind that are placed alike; equal stages are folded."""
    table = _table("Layout", "stage", "modules", "blocks of ranks", "recompute", left=4)
    for number, pipeline in enumerate(plan.pipelines):
        prefix = f"{number}." if len(plan.pipelines) > 1 else ""
        for index, stage in enumerate(pipeline.stages):
            label = f"{prefix}{index}"
            for run in runs(stage):
                redo = "" if run[0].recompute == "none" else run[0].recompute
                table.add_row(label, names(stage, run), _blocks(run[0].blocks), redo)
                label = ""
    return table


def _blocks(blocks: tuple[int, ...]) -> str:
    if len(set(blocks)) > 1:
        return " + ".join(map(str, blocks))
    return f"{_count(len(blocks), 'block')} of {blocks[0]}"


def _step_table(terms: StepTerms, predicted: Prediction) -> Table:
    table = _table("Step time", "", "predicted", "share")
    for name, value in terms.model_dump().items():
        if value:
            table.add_row(STEP_NAMES[name], seconds(value), percent(value / predicted.step_time_seconds))
    table.add_row("step", seconds(predicted.step_time_seconds), "", style="bold")
    return table


def _memory_table(terms: MemoryTerms, predicted: Prediction) -> Table:
    table = _table(f"Memory of rank {predicted.peak_memory_rank}, the fullest", "", "bytes")
    for name, value in terms.model_dump().items():
        if value:
            table.add_row(MEMORY_NAMES[name], num_bytes(value))
    table.add_row("peak", num_bytes(predicted.peak_memory_bytes), style="bold")
    return table


def _ladder_table(plan: Plan) -> Table:
    table = _table("What each freedom buys", "", "step", "gain", "layout", left=1)
    table.columns[3].justify = "left"
    for rung in plan.ladder:
        step = "-" if rung.step_time_seconds is None else seconds(rung.step_time_seconds)
        gain = "" if rung.gain_over_previous is None else f"{100.0 * rung.gain_over_previous:.2f} %"
        table.add_row(
            rung.freedom, step, gain, f"{rung.layout}{'; ' if rung.layout and rung.reason else ''}{rung.reason}"
        )
    return table


def _alternatives_table(plan: Plan) -> Table:
    table = _table("Not taken", "layout", "step", "peak memory", "why")
    table.columns[3].justify = "left"
    for other in plan.alternatives:
        step = "" if other.step_time_seconds is None else seconds(other.step_time_seconds)
        memory = "" if other.peak_memory_bytes is None else num_bytes(other.peak_memory_bytes)
        table.add_row(other.layout, step, memory, other.reason)
    return table


def _certificate(plan: Plan) -> Text:
    found = plan.certificate
    assert found is not None
    pruned = ", ".join(f"{number} by {cause}" for cause, number in found.pruned.items())
    limit = {
        "step-time": f"is faster than {seconds(found.bound)}",
        "memory": f"that is as fast needs less than {num_bytes(round(found.bound))}",
    }.get(found.objective)
    if limit is None:
        limit = f"delivers more than {rate(plan.training.tokens_per_step / found.bound, 'tokens')}"
    with_them = f" with {', '.join(found.constraints)}" if found.constraints else ""
    work = f"{found.nodes} nodes of branch and bound" if found.engine == "ilp" else f"{found.labels} stages solved"
    return Text(
        f"{found.status}: no layout of these freedoms{with_them} {limit} (gap {100.0 * found.gap:.3f} %); "
        f"{found.evaluated} layouts priced, {work}, pruned {pruned or 'nothing'}; {seconds(found.seconds)}"
    )
