"""The command line: parse, call, print.  Every command imports what it needs when it runs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal


def _quit(signum: int, frame: object) -> None:  # noqa: ARG001
    os.write(2, b"plait: interrupted.\n")
    os._exit(130)


# Ctrl-C while the imports below run, before `main` can catch it.  Only in the command's own process.
if os.path.basename(sys.argv[0]) == "plait":
    signal.signal(signal.SIGINT, _quit)

import typer  # noqa: E402
import typer.core  # noqa: E402

from specs.errors import PlaitError  # noqa: E402

# A wrong option or argument.  The public name for it is that of its subclass.
USAGE_ERROR: Any = typer.BadParameter.__base__

MAIN_JOB = ("profile", "plan", "train", "compare")


class _MainJobFirst(typer.core.TyperGroup):
    """Help lists the main job in its order, then the others."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return [*(name for name in MAIN_JOB if name in names), *(name for name in names if name not in MAIN_JOB)]


app = typer.Typer(
    name="plait",
    cls=_MainJobFirst,
    help="Plan, run and keep running the parallel layout that delivers the most goodput on your cluster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"plait {version('plait')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="Preset (llama-3-8b ...), model file or Hugging Face config.json.")],
    global_batch: Annotated[int, typer.Option(min=1, help="Sequences per optimizer step.")],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")],
    cluster: Annotated[
        str | None, typer.Option(help="Preset (h100x64 ...) or cluster file; default: what the profile saw.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="profile.json of this cluster; without it shipped device data, estimated.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan here.")] = None,
    memory_cap: Annotated[str | None, typer.Option(help="Bytes a rank may fill, e.g. 64GiB.")] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp8"] | None, typer.Option(help="Default: bf16 on GPUs, fp32 on CPUs.")
    ] = None,
    objective: Annotated[
        Literal["goodput", "step-time", "tokens-per-dollar"], typer.Option(help="What to maximise (or minimise).")
    ] = "goodput",
    freedom: Annotated[
        Literal["uniform", "layers", "stages", "modules", "cuts"],
        typer.Option(help="How unlike modules may be: everything uniform ... stages that begin inside layers."),
    ] = "cuts",
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds; then the best so far, with its gap.")] = 60.0,
    top_k: Annotated[int, typer.Option(min=0, max=50, help="Other plans to list.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the layout with the most goodput, and show why: time and memory by term, and what each freedom buys."""
    import json
    import shlex

    from planner.start import start_plan
    from reports.plan import as_json as to_json
    from reports.plan import render

    found = start_plan(
        model=model,
        cluster=cluster,
        profile_path=profile,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
        memory_cap=memory_cap,
        objective=objective,
        freedom=freedom,
        time_limit_seconds=time_limit,
        top_k=top_k,
        command=shlex.join(["plait", *sys.argv[1:]]),
    )
    if out is not None:
        found.save(out)
    if as_json:
        typer.echo(json.dumps(to_json(found), indent=1))
        return
    from rich.console import Console

    Console(highlight=False).print(render(found))
    if out is not None:
        typer.echo(f"wrote {out}")


@app.command()
def sweep(
    model: Annotated[str, typer.Option(help="Preset (llama-3-8b ...), model file or Hugging Face config.json.")],
    clusters: Annotated[str, typer.Option(help="Presets or cluster files, comma-separated: h100x8,h100x16,h200x8.")],
    global_batch: Annotated[int | None, typer.Option(min=1, help="Sequences per optimizer step.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence.")] = None,
    global_batches: Annotated[str | None, typer.Option(help="Several batches, comma-separated.")] = None,
    seq_lens: Annotated[str | None, typer.Option(help="Several sequence lengths, comma-separated.")] = None,
    dollars_per_hour: Annotated[str, typer.Option(help="Price per device: H100=2.5,H200=3.2.")] = "",
    profile: Annotated[Path | None, typer.Option(help="profile.json; without it shipped device data.")] = None,
    memory_cap: Annotated[str | None, typer.Option(help="Bytes a rank may fill, e.g. 64GiB.")] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp8"] | None, typer.Option(help="Default: bf16 on GPUs, fp32 on CPUs.")
    ] = None,
    freedom: Annotated[
        Literal["uniform", "layers", "stages", "modules", "cuts"], typer.Option(help="As for `plait plan`.")
    ] = "cuts",
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds per point.")] = 20.0,
    plot: Annotated[Path | None, typer.Option(help="Also draw it into this png, svg or pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which cluster, sequence length or batch: the best plan at every point, its speed and what its tokens cost."""
    import json
    import shlex

    from planner.sweep import Sweep, parse_prices, run_sweep
    from reports.sweep import as_json as to_json
    from reports.sweep import draw, render
    from specs.errors import NoPlanFitsError

    points = list(
        run_sweep(
            Sweep(
                model=model,
                clusters=[part.strip() for part in clusters.split(",")],
                global_batches=_one_or_several("--global-batch", global_batch, global_batches),
                seq_lens=_one_or_several("--seq-len", seq_len, seq_lens),
                profile_path=profile,
                precision=precision,
                memory_cap=memory_cap,
                freedom=freedom,
                time_limit_seconds=time_limit,
                prices=parse_prices(dollars_per_hour),
                command=shlex.join(["plait", *sys.argv[1:]]),
            )
        )
    )
    if as_json:
        typer.echo(json.dumps(to_json(points), indent=1))
    else:
        from rich.console import Console

        Console(highlight=False).print(render(points))
    if all(point.plan is None for point in points):
        raise NoPlanFitsError(f"none of the {len(points)} points has a plan. The first: {points[0].problem}")
    if plot is not None:
        draw(points, plot)
        if not as_json:
            typer.echo(f"wrote {plot}")


def _one_or_several(option: str, one: int | None, several: str | None) -> list[int]:
    """`--seq-len 8192` or `--seq-lens 4096,8192`."""
    if (one is None) == (several is None):
        plural = "--global-batches" if option == "--global-batch" else f"{option}s"
        raise typer.BadParameter(f"give either {option} or {plural}")
    return [one] if one is not None else _integers(option, several or "")


@app.command()
def estimate(
    plan: Annotated[Path, typer.Argument(help="A plan file, from `plait plan` or written by hand.")],
    profile: Annotated[Path | None, typer.Option(help="profile.json; without it shipped device data.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Price any plan: step time by term, memory of the fullest rank, goodput."""
    import json

    from planner.start import estimate_plan

    layout, predicted = estimate_plan(plan, profile)
    if as_json:
        typer.echo(json.dumps(predicted.model_dump(mode="json"), indent=1))
        return
    from rich.console import Console, Group

    from reports.plan import render_prediction

    Console(highlight=False).print(Group(*render_prediction(layout, predicted, profiled=profile is not None)))


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(help="plan.json from `plait plan`.")],
    module: Annotated[str | None, typer.Option(help="One module, e.g. layer.3.mlp; default: one of each kind.")] = None,
    profile: Annotated[Path | None, typer.Option(help="The profile that the plan was made with, if any.")] = None,
) -> None:
    """Say why every module runs as it does: what each other degree and recomputation would cost in time and memory."""
    from rich.console import Console

    from planner.start import explain_plan
    from reports.explain import render_explanation

    found = explain_plan(plan, profile, module)
    rows = [(item.module, item.count, item.stage, item.neighbours) for item in found.modules]
    Console(highlight=False).print(render_explanation(found.free_bytes, rows))


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="A plan file.")],
    b: Annotated[Path, typer.Argument(help="Another plan file.")],
) -> None:
    """Show how two plans differ: shape, modules, predicted time and memory."""
    from rich.console import Console

    from reports.explain import render_difference
    from specs.base import load_document
    from specs.plan import Plan

    Console(highlight=False).print(render_difference(load_document(Plan, a, "plan"), load_document(Plan, b, "plan")))


@app.command()
def compare(
    run: Annotated[Path, typer.Argument(help="Run folder that `plait train --out` made.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the step's terms into this png, svg or pdf.")] = None,
) -> None:
    """Show predicted and measured side by side: step time by term, memory, goodput, every second of the run."""
    import json

    from reports.compare import compare_run

    comparison = compare_run(run)
    if plot is not None:
        from reports.comparison_plot import draw

        draw(comparison, plot)
    if as_json:
        typer.echo(json.dumps(comparison.as_json(), indent=1))
        return
    from rich.console import Console

    from reports.comparison_table import render

    Console(highlight=False).print(render(comparison))
    if plot is not None:
        typer.echo(f"wrote {plot}")


@app.command()
def schema(
    kind: Annotated[
        Literal["plan", "profile", "model", "cluster", "runlog"], typer.Argument(help="Which file's schema.")
    ],
) -> None:
    """Print the JSON schema of a file that Plait reads or writes."""
    import json

    from reports.schemas import schema_of

    typer.echo(json.dumps(schema_of(kind), indent=1))


@app.command()
def profile(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the profile.")] = Path("profile.json"),
    model: Annotated[
        str, typer.Option(help="Whose modules to time: preset, model file or Hugging Face config.json.")
    ] = "demo",
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 256,
    nproc: Annotated[int | None, typer.Option(min=1, help="Workers on this node; default: one per device.")] = None,
    backend: Annotated[
        Literal["gloo", "nccl"] | None, typer.Option(help="Default: nccl where a GPU is, else gloo.")
    ] = None,
    block_sequences: Annotated[
        str, typer.Option(help="Sequences that a block may hold (micro-batch x degree / ranks), comma-separated.")
    ] = "1,2,4,8",
    degrees: Annotated[
        str | None, typer.Option(help="Degrees to time, comma-separated; default: all divisors of the ranks.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per layout and round.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Times to go through all layouts.")] = 2,
) -> None:
    """Measure this cluster: modules in situ at every degree, optimizer, collectives, spread between ranks.

    On one node it starts its own workers. On several: torchrun --nnodes N --nproc-per-node 8 ... -m cli profile
    """
    from profiles.start import start_profile
    from specs.presets import load_model

    start_profile(
        load_model(model),
        out,
        seq_len=seq_len,
        num_ranks=nproc,
        backend=backend,
        block_sequences=_integers("--block-sequences", block_sequences),
        degrees=None if degrees is None else _integers("--degrees", degrees),
        steps=steps,
        rounds=rounds,
    )
    typer.echo(f"wrote {out}")


def _integers(option: str, text: str) -> list[int]:
    """`1,2,4` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option} {text!r} is not a list of positive integers such as 1,2,4")
    return [int(part) for part in parts]


@app.command()
def train(
    plan: Annotated[Path, typer.Argument(help="plan.json from `plait plan`.")],
    out: Annotated[Path, typer.Option(help="Run folder: log, checkpoints, prepared data.")],
    data: Annotated[
        str | None,
        typer.Option(help="Text file, .jsonl (key text), a folder of them, or [bold]stdlib[/bold] (the default)."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps in all (100).")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json; without one, bytes are tokens.")] = None,
    initial_weights: Annotated[
        Path | None, typer.Option("--from", help="Hugging Face folder to start from; its tokenizer is the default.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of weights and sample order (0).")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=1e-9, max=1e3, help="Peak rate, reached after warm-up (3e-3).")
    ] = None,
    warmup_steps: Annotated[int | None, typer.Option(min=0, help="Steps of linear warm-up (10).")] = None,
    max_gradient_norm: Annotated[
        float | None, typer.Option(min=1e-9, max=1e9, help="Clip the global norm to this (1.0).")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(min=0, help="Steps; 0: only at the end (50).")] = None,
    keep_checkpoints: Annotated[int | None, typer.Option(min=1, help="Newest checkpoints to keep (2).")] = None,
    evaluate_every: Annotated[int | None, typer.Option(min=0, help="Steps; 0: only at the end (0).")] = None,
    backend: Annotated[
        Literal["gloo", "nccl"] | None, typer.Option(help="Default: nccl where a GPU is, else gloo.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest sound checkpoint in --out.")] = False,
) -> None:
    """Train a model with a plan, on this node or as one worker of torchrun.

    Ctrl-C finishes the step, saves a checkpoint and ends; the same command with --resume continues the same losses.
    On several nodes: torchrun --nnodes N --nproc-per-node 8 ... -m cli train plan.json --out RUN
    """
    from executor.start import start_run

    given = {
        "data": data,
        "num_steps": steps,
        "tokenizer": tokenizer,
        "initial_weights": initial_weights,
        "seed": seed,
        "learning_rate": learning_rate,
        "warmup_steps": warmup_steps,
        "max_gradient_norm": max_gradient_norm,
        "checkpoint_every": checkpoint_every,
        "keep_checkpoints": keep_checkpoints,
        "evaluate_every": evaluate_every,
        "backend": backend,
    }
    start_run(plan, out, given, resume=resume)


@app.command(name="export-weights")
def export_weights(
    run: Annotated[Path, typer.Argument(help="Run folder that `plait train --out` made.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write config.json and safetensors into.")],
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="Default: the plan's precision.")
    ] = None,
) -> None:
    """Write a run's newest sound weights as a Hugging Face folder that transformers loads."""
    from executor.huggingface_export import export_run

    typer.echo(export_run(run, out, dtype))


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="Run folder, or a plan file together with --from.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    initial_weights: Annotated[
        Path | None, typer.Option("--from", help="Hugging Face folder to take weights of.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json; default: the run's or the folder's.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, max=1e3, help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws at a temperature above 0.")] = 0,
    backend: Annotated[
        Literal["gloo", "nccl"] | None, typer.Option(help="Default: nccl where a GPU is, else gloo.")
    ] = None,
) -> None:
    """Continue a text with a trained or imported model, under its plan (its first replica)."""
    from executor.generate import GenerateOptions, start_generate

    if not prompt:
        raise typer.BadParameter("--prompt is empty, at least one token is needed to begin with")
    start_generate(
        GenerateOptions(
            run=run,
            weights=initial_weights,
            tokenizer=tokenizer,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            backend=backend,
        )
    )


@app.command(name="eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder, or a plan file together with --from.")],
    data: Annotated[
        str | None, typer.Option(help="Text to evaluate on, as for `plait train`; default: the run's held-out part.")
    ] = None,
    initial_weights: Annotated[
        Path | None, typer.Option("--from", help="Hugging Face folder to take weights of.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json; default: the run's or the folder's.")] = None,
    backend: Annotated[
        Literal["gloo", "nccl"] | None, typer.Option(help="Default: nccl where a GPU is, else gloo.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Loss and perplexity of a trained or imported model on held-out text, under its plan."""
    from executor.evaluate import EvaluateOptions, start_evaluate

    found = start_evaluate(
        EvaluateOptions(run=run, weights=initial_weights, data=data, tokenizer=tokenizer, backend=backend)
    )
    if as_json:
        typer.echo(found.model_dump_json(indent=1))
        return
    typer.echo(
        f"loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.2f}, {found.origin}, over "
        f"{found.tokens:,} of {found.text_tokens:,} tokens ({found.data})"
    )


@app.command()
def simulate(
    plan: Annotated[Path, typer.Argument(help="plan.json from `plait plan`.")],
    days: Annotated[float, typer.Option(min=0.01, max=3650.0, help="Length of the run.")] = 30.0,
    policy: Annotated[
        Literal[
            "drop",
            "drop-in-place",
            "wait",
            "resplit",
            "ntp",
            "composed",
            "ntp-boost",
            "composed-boost",
            "all",
        ],
        typer.Option(
            metavar="<policy>",
            help="For a replica that lost a device: drop, drop-in-place, wait, resplit, ntp, composed, ntp-boost, "
            "composed-boost; [bold]all[/bold] compares them.",
        ),
    ] = "drop",
    spares: Annotated[
        int | None, typer.Option(min=0, max=100_000, help="Spare nodes (default: those the plan leaves unused).")
    ] = None,
    keep_batch: Annotated[
        bool, typer.Option("--keep-batch", help="Others take over lost sequences; else the batch shrinks.")
    ] = False,
    tokens: Annotated[float | None, typer.Option(min=1.0, help="Goal, for days and device-hours to it.")] = None,
    target: Annotated[
        float, typer.Option(min=0.01, max=0.9999, help="Speed share that spares should secure while devices are out.")
    ] = 0.99,
    failures: Annotated[Path | None, typer.Option(help="Failure model, e.g. from `plait fit-failures`.")] = None,
    trials: Annotated[int, typer.Option(min=2, max=100_000, help="Histories to play.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Of the histories.")] = 0,
    profile: Annotated[Path | None, typer.Option(help="profile.json, for the spread between ranks.")] = None,
    against: Annotated[Path | None, typer.Option(help="Another plan: which one delivers more, and when.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it into this png, svg or pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play days of failures: what the plan really delivers, under each policy, and what to improve first."""
    import json

    from cost_models.simulation import compare_plans, simulate_plan
    from reports.goodput import as_json as to_json
    from reports.goodput import render

    delivery = simulate_plan(
        plan,
        failures=failures,
        policy=policy,
        days=days,
        spares=spares,
        keep_batch=keep_batch,
        trials=trials,
        seed=seed,
        target=target,
        profile=profile,
    )
    rivalry = compare_plans(plan, against, failures=failures) if against is not None else None
    if plot is not None:
        from reports.goodput_plot import draw

        draw(delivery, plot)
    if as_json:
        typer.echo(json.dumps(to_json(delivery, tokens, rivalry), indent=1))
        return
    from rich.console import Console

    Console(highlight=False).print(render(delivery, tokens, rivalry))
    if plot is not None:
        typer.echo(f"wrote {plot}")


@app.command(name="fit-failures")
def fit_failures(
    log: Annotated[Path, typer.Argument(help="CSV with a column class; repair_hours, detect_seconds, count if known.")],
    devices: Annotated[int, typer.Option(min=1, help="Devices that were watched.")],
    days: Annotated[float, typer.Option(min=0.01, help="For how long.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the failure model here.")] = None,
    base: Annotated[Path | None, typer.Option(help="Failure model with the classes and all else.")] = None,
) -> None:
    """Estimate failure rates with 95 % intervals from your own list of incidents."""
    from rich.console import Console

    from cost_models.failure_fit import fit, read_incidents
    from cost_models.failures import load_failure_model
    from reports.failures import render

    model = fit(read_incidents(log), load_failure_model(base), num_devices=devices, days=days, source=log.name)
    Console(highlight=False).print(render(model))
    if out is not None:
        model.save(out)
        typer.echo(f"wrote {out}")


@app.command()
def validate(
    runs: Annotated[Path, typer.Argument(help="Table (CSV) of published training runs, one per row.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: rows and summary.")] = False,
) -> None:
    """Predict published training runs and print the error of each, and by source, GPU and software stack."""
    import json

    from cost_models.validation import validate as validate_runs

    validation = validate_runs(runs)
    if as_json:
        typer.echo(json.dumps(validation.as_dict(), indent=1))
        return
    from rich.console import Console

    from reports.validation import render

    Console(highlight=False).print(render(validation))


def main() -> None:
    """Entry point: a user's mistake ends in one sentence and its exit code, Ctrl-C in 130, a bug in a traceback."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = app(standalone_mode=False)
        if code == 130:  # typer made an exit of an interrupt
            raise KeyboardInterrupt
        sys.exit(code)
    except PlaitError as error:
        typer.echo(f"plait: {error}", err=True)
        sys.exit(error.exit_code)
    except USAGE_ERROR as error:
        sentence = " ".join(error.format_message().replace("Value error, ", "").split())
        if sentence:  # empty: no command was given, and the help is already printed
            command = error.ctx.command_path if error.ctx else "plait"
            stop = "" if sentence.endswith((".", "?")) else "."
            typer.echo(f"plait: {sentence}{stop} See `{command} --help`.", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("plait: interrupted.", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
