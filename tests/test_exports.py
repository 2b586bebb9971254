"""Exports: what is written stands for the plan, engines read it, and what they cannot run is refused with an offer."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import cli
from cost_models.sources import device_costs
from cost_models.step import price
from exports.engine import as_it_is, nearest
from exports.launch import write_slurm, write_torchrun
from exports.megatron import MEGATRON, read_arguments
from exports.megatron_ntp import reduced_of
from exports.pipeline_layout import format_layout, layers_per_stage, parse_layout
from exports.shape import Shape, loose_shape_of, plan_of, shape_of
from exports.torchtitan import TORCHTITAN, module_names
from specs.cluster import ClusterSpec
from specs.errors import BadInputError
from specs.model import ModelSpec
from specs.plan import Plan
from specs.presets import cluster_preset, model_preset
from tests import plans

GOLDEN = Path(__file__).parent / "golden"
SHAPE = Shape(
    tensor=1,
    expert=1,
    data=1,
    micro_batch=1,
    num_micro_batches=4,
    layers=(4,),
    virtual=1,
    schedule="1f1b",
    zero=0,
    order="stage",
    attention="none",
    feed_forward="none",
)


def plan_with(shape: Shape, model: ModelSpec, cluster: ClusterSpec, seq_len: int = 32) -> Plan:
    """A plan of a shape on all of a cluster; the outline gives model, cluster and batch."""
    assert shape.world_size == cluster.num_devices
    outline = plans.plan(
        model=model,
        on=cluster,
        replicas=shape.data,
        micro_batch=shape.micro_batch,
        micro_batches=shape.num_micro_batches,
        seq_len=seq_len,
    )
    return plan_of(shape, outline)


def preset_plan(name: str) -> Plan:
    shapes = {
        "llama-3-70b": replace(
            SHAPE, tensor=4, data=4, num_micro_batches=256, layers=(20,) * 4, zero=1, attention="selective"
        ),
        "llama-3-405b": replace(
            SHAPE, tensor=8, data=4, num_micro_batches=256, layers=(7, *(8,) * 14, 7), zero=1, full_layers=2
        ),
        "gpt2": replace(SHAPE, data=8, micro_batch=64, num_micro_batches=1, layers=(12,)),
        "mixtral-8x7b": replace(
            SHAPE, tensor=2, expert=2, data=8, micro_batch=2, num_micro_batches=64, layers=(8,) * 4, zero=1
        ),
        "llama-3-8b": replace(
            SHAPE, data=2, num_micro_batches=8, layers=(8,) * 4, virtual=2, schedule="interleaved", tensor=2
        ),
    }
    shape = shapes[name]
    seq_len = {"gpt2": 1024, "mixtral-8x7b": 4096}.get(name, 8192)
    return plan_with(shape, model_preset(name), cluster_preset(f"h100x{shape.world_size}"), seq_len)


@pytest.mark.parametrize("name", ["llama-3-70b", "llama-3-405b", "gpt2", "mixtral-8x7b", "llama-3-8b"])
def test_megatron_golden_files(name: str) -> None:
    found = as_it_is(preset_plan(name), MEGATRON)
    text = MEGATRON.write(found.plan, found.shape)
    assert text == (GOLDEN / f"{name}.megatron.sh").read_text()
    options = read_arguments(text)
    assert options["--tensor-model-parallel-size"] == (str(found.shape.tensor),)
    if found.shape.pipeline > 1:
        assert layers_per_stage(options["--pipeline-model-parallel-layout"][0]) == found.shape.layers
    listed = ["bash", "-c", f'{text}printf "%s\\n" "${{PLAIT_ARGS[@]}}"']
    words = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    assert words == [word for option, values in options.items() for word in (option, *values)]


@pytest.mark.parametrize("name", ["llama-3-70b", "llama-3-8b"])
def test_torchtitan_golden_files(name: str) -> None:
    plan = preset_plan(name)
    shape = replace(shape_of(plan), attention="none", feed_forward="none")
    plan = plan_of(shape, plan)
    found = as_it_is(plan, TORCHTITAN)
    text = TORCHTITAN.write(found.plan, found.shape)
    assert text == (GOLDEN / f"{name}.torchtitan.py").read_text()
    stages = module_names(shape)
    space: dict[str, object] = {}
    exec(text[text.index("MODULES = [") : text.index("]\n\n")] + "]", space)
    assert space["MODULES"] == stages
    assert [len(stage) for stage in stages] == [
        layers + (index == 0) + 2 * (index == len(stages) - 1) for index, layers in enumerate(shape.layers)
    ]


@pytest.mark.parametrize(("to", "write"), [("slurm", write_slurm), ("torchrun", write_torchrun)])
def test_launch_golden_files(to: str, write) -> None:  # type: ignore[no-untyped-def]
    assert write(preset_plan("llama-3-70b"), "plan.json") == (GOLDEN / f"llama-3-70b.{to}.sh").read_text()


LAYERS = st.lists(st.integers(0, 12), min_size=1, max_size=12).map(tuple)


@given(LAYERS)
def test_pipeline_layouts_round_trip(layers: tuple[int, ...]) -> None:
    text = format_layout(layers)
    assert layers_per_stage(text) == layers
    assert layers_per_stage(text.replace("|", "|,")) == layers


@given(st.text(alphabet="EtmL|*(),0123456789x", max_size=30))
def test_pipeline_layouts_are_read_or_refused(text: str) -> None:
    try:
        stages = parse_layout(text)
    except BadInputError:
        return
    assert stages[0][0] == "E"
    assert stages[-1][-1] == "L"


def test_the_documented_pipeline_layout() -> None:
    """The example of Megatron-LM's guide: DeepSeek-V3 in 16 stages of two virtual ones."""
    stages = parse_layout("Et*3|(tt|)*29,m|L")
    assert [len(stage) for stage in stages] == [4, *[2] * 29, 1, 1]


@settings(deadline=None)
@given(LAYERS)
def test_megatron_reads_our_layouts(layers: tuple[int, ...]) -> None:
    ours = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout", exc_type=ImportError)
    text = format_layout(layers)
    theirs = ours.PipelineParallelLayerLayout.parse_str_to_list(text)
    names = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
    assert [[kind.name for kind in stage] for stage in theirs] == [
        [names[letter] for letter in stage] for stage in parse_layout(text)
    ]


@pytest.mark.parametrize("name", ["llama-3-70b", "llama-3-405b", "gpt2", "mixtral-8x7b", "llama-3-8b"])
@pytest.mark.filterwarnings("ignore")
def test_megatron_takes_our_arguments(name: str) -> None:
    """Arguments that are fields of its configuration, set as its argument parser would; it checks them itself."""
    theirs = pytest.importorskip("megatron.core.transformer.transformer_config", exc_type=ImportError)
    import dataclasses

    plan = preset_plan(name)
    options = read_arguments(MEGATRON.write(plan, shape_of(plan)))
    fields = {field.name for field in dataclasses.fields(theirs.TransformerConfig)}
    given = {option[2:].replace("-", "_"): values for option, values in options.items()}
    if "num_experts" in given:
        given["num_moe_experts"] = given.pop("num_experts")
    settings = {key: _value(key, values) if values else True for key, values in given.items() if key in fields}
    if settings["pipeline_model_parallel_size"] > 1:
        import torch

        settings["pipeline_dtype"] = torch.bfloat16
    if "swiglu" in given:
        settings["gated_linear_unit"] = True
    config = theirs.TransformerConfig(**settings)
    if plan.pipelines[0].num_virtual > 1 or len(plan.pipelines[0].stages) > 1:
        layout = config.pipeline_model_parallel_layout
        assert layout.pipeline_model_parallel_size == len(plan.pipelines[0].stages)
        assert layout.virtual_pipeline_model_parallel_size == plan.pipelines[0].num_virtual


def _value(key: str, values: tuple[str, ...]) -> object:
    if key == "recompute_modules":
        return list(values)
    (text,) = values
    return int(text) if text.isdigit() else float(text) if re.fullmatch(r"[\d.e+-]+", text) else text


def test_torchtitan_takes_our_configuration() -> None:
    pytest.importorskip("torchtitan.trainer", exc_type=ImportError)
    plan = preset_plan("llama-3-8b")
    space: dict[str, object] = {}
    exec(TORCHTITAN.write(plan, shape_of(plan)), space)
    config = space["llama3_8b_plait"]()  # type: ignore[operator]
    assert config.parallelism.module_fqns_per_model_part == module_names(shape_of(plan))
    assert config.parallelism.tensor_parallel_degree == 2
    assert config.training.local_batch_size == 8


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Shapes of the tiny model on up to 64 ranks."""
    stages = draw(st.integers(1, 4))
    virtual = draw(st.sampled_from([1, 1, 2])) if stages > 1 else 1
    layers = draw(st.lists(st.integers(1, 3), min_size=stages * virtual, max_size=stages * virtual))
    data = draw(st.sampled_from([1, 2, 4]))
    modes = st.sampled_from(["none", "selective", "full"])
    return replace(
        SHAPE,
        tensor=draw(st.sampled_from([1, 2, 4])),
        data=data,
        micro_batch=draw(st.sampled_from([1, 2])),
        num_micro_batches=draw(st.sampled_from([4, 8])),
        layers=tuple(layers),
        virtual=virtual,
        schedule="interleaved" if virtual > 1 else draw(st.sampled_from(["1f1b", "gpipe"])),
        zero=draw(st.sampled_from([0, 1] if stages > 1 or data == 1 else [0, 1, 2, 3])),
        order=draw(st.sampled_from(["stage", "replica"])) if stages > 1 and data > 1 else "stage",
        attention=draw(modes),
        feed_forward=draw(modes),
    )


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(0, 3))
def test_a_shape_is_that_of_its_plan(shape: Shape, full_layers: int) -> None:
    if full_layers and full_layers < max(shape.layers):
        shape = replace(shape, attention="none", feed_forward="none", full_layers=full_layers)
    model = plans.tiny_model(num_layers=sum(shape.layers))
    plan = plan_with(shape, model, plans.cluster(shape.world_size, per_node=shape.world_size))
    assert shape_of(plan) == shape
    loose = loose_shape_of(plan)
    assert loose is not None
    assert replace(shape, attention="none", feed_forward="none", full_layers=0, order="stage") == loose


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_what_megatron_is_told_is_the_shape(shape: Shape) -> None:
    """Its arguments say everything that a shape says."""
    model = plans.tiny_model(num_layers=sum(shape.layers))
    plan = plan_with(shape, model, plans.cluster(shape.world_size, per_node=shape.world_size))
    try:
        found = as_it_is(plan, MEGATRON)
    except BadInputError:
        assume(False)
    options = read_arguments(MEGATRON.write(plan, found.shape))
    stages = int(options["--pipeline-model-parallel-size"][0])
    layers = layers_per_stage(options.get("--pipeline-model-parallel-layout", (f"Et*{shape.layers[0]}L",))[0])
    assert stages == shape.pipeline
    assert layers == shape.layers
    assert int(options["--micro-batch-size"][0]) == shape.micro_batch
    assert int(options["--global-batch-size"][0]) == plan.training.global_batch
    assert ("--use-distributed-optimizer" in options) == (shape.zero > 0)
    sharded = options.get("--data-parallel-sharding-strategy", ("optim",))[0]
    assert sharded == ("optim", "optim", "optim_grads", "optim_grads_params")[shape.zero]
    assert ("--use-megatron-fsdp" in options) == (shape.zero > 1)
    assert ("--use-tp-pp-dp-mapping" in options) == (shape.order == "replica")


def test_blocks_of_a_stage_are_copies() -> None:
    """Two blocks of one rank are data parallelism by another name, at the same price."""
    plan = plans.plan(ranks=2, degree=1, replicas=4, model=model_preset("gpt2"), on=cluster_preset("h100x8"))
    shape = shape_of(plan)
    assert (shape.tensor, shape.data, shape.micro_batch) == (1, 8, 1)
    costs = device_costs(plan.cluster, plan.training)
    same = price(plan_of(shape, plan), costs)
    assert same.step_time_seconds == pytest.approx(price(plan, costs).step_time_seconds, rel=0.02)


def mixed_plan() -> Plan:
    """MLPs in two blocks of four ranks, all else in one of eight."""
    plan = plans.plan(
        ranks=8, degree=8, replicas=2, micro_batch=2, model=model_preset("llama-3-8b"), on=cluster_preset("h100x16")
    )
    pipeline = plan.pipelines[0]
    modules = tuple(
        placement.model_copy(update={"blocks": (4, 4)}) if placement.module.endswith("mlp") else placement
        for placement in pipeline.stages[0].modules
    )
    stage = pipeline.stages[0].model_copy(update={"modules": modules})
    return plan.model_copy(update={"pipelines": (pipeline.model_copy(update={"stages": (stage,)}),)})


@pytest.mark.parametrize("to", ["megatron", "torchtitan"])
def test_a_mixed_plan_is_refused_and_reoffered(to: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    mixed_plan().save(path)
    refused = CliRunner().invoke(cli.app, ["export", str(path), "--to", to])
    assert isinstance(refused.exception, BadInputError)
    said = str(refused.exception)
    assert "the plan mixes tensor-parallel degrees (embedding 8, attention 8, mlp 4, head 8), one is needed" in said
    assert re.search(
        r"The best plan that it can run takes .* a step, [\d.]+ % (more|less) than the .* of the plan", said
    )
    offered = re.search(r"`plait (.*)`", said)
    assert offered is not None
    taken = CliRunner().invoke(cli.app, [*shlex.split(offered[1]), "-o", str(tmp_path / "out")])
    assert taken.exit_code == 0, taken.output
    assert "Written instead: TP " in taken.stderr
    text = (tmp_path / "out").read_text()
    if to == "megatron":
        read_arguments(text)
    else:
        compile(text, "out", "exec")


def test_the_nearest_plan_fits_and_is_the_fastest() -> None:
    """Against every way of recomputation tried one by one."""
    plan = preset_plan("llama-3-70b")
    costs = device_costs(plan.cluster, plan.training)
    found = nearest([plan], MEGATRON, costs)
    assert found is not None
    best = found[1].step_time_seconds
    loose = loose_shape_of(plan)
    assert loose is not None
    for full_layers in range(21):
        prediction = price(plan_of(replace(loose, full_layers=full_layers), plan), costs)
        if prediction.peak_memory_bytes <= 80 * 2**30 and prediction.peak_memory_bytes <= _memory(plan):
            assert prediction.step_time_seconds >= best - 1e-9


def _memory(plan: Plan) -> int:
    return plan.cluster.device_of(0).memory_bytes


REFUSED = [
    ({"schedule": "gpipe"}, MEGATRON, "the plan has gpipe"),
    ({"zero": 2}, MEGATRON, "ZeRO level 2 is written for one pipeline stage"),
    ({"tensor": 8, "data": 1}, MEGATRON, ""),
    ({"attention": "full", "feed_forward": "none"}, MEGATRON, "the plan recomputes attention in full"),
    ({"order": "replica"}, TORCHTITAN, "numbers ranks stage by stage"),
    ({"feed_forward": "keep"}, MEGATRON, "keeps gathered inputs of 32 modules for backward"),
    ({"full_layers": 3}, TORCHTITAN, "recomputes some layers and not others"),
]


@pytest.mark.parametrize(("change", "engine", "expected"), REFUSED)
def test_refusals(change, engine, expected: str) -> None:  # type: ignore[no-untyped-def]
    base = replace(SHAPE, tensor=4, data=2, layers=(16, 16), num_micro_batches=4)
    plan = plan_with(replace(base, **change), model_preset("llama-3-8b"), cluster_preset("h100x16"))
    if not expected:
        assert as_it_is(plan, engine).shape.tensor == 8
        return
    with pytest.raises(BadInputError, match=re.escape(expected)):
        as_it_is(plan, engine)


@pytest.mark.parametrize("change", ["cuts", "tokens", "replicas", "inside a layer"])
def test_what_has_no_place_in_a_shape(change: str) -> None:
    plan = plans.plan(stages=2, ranks=2, replicas=2, micro_batch=2, degree=2)
    data = plan.model_dump(mode="json")
    stage = data["pipelines"][0]["stages"][0]
    if change == "cuts":
        stage["modules"][0]["cuts"] = [[0, 100, 256]]
        expected = "embedding is cut unevenly"
    elif change == "tokens":
        stage["token_cuts"] = [0, 20, 64]
        expected = "the tokens of stage 0 are cut unevenly"
    elif change == "replicas":
        data["replicas"][0]["sequences"] += 2
        data["replicas"][1]["sequences"] -= 2
        expected = "replicas differ"
    else:
        expected = "the plan begins a stage at layer.1.mlp"
        moved = data["pipelines"][0]["stages"][1]["modules"]
        while len(stage["modules"]) > 4:
            moved.insert(0, stage["modules"].pop())
        while len(stage["modules"]) < 4:
            stage["modules"].append(moved.pop(0))
    with pytest.raises(BadInputError, match=re.escape(expected)):
        shape_of(Plan.model_validate(data))


def damaged_plan() -> Plan:
    """Two nodes of four, of which the second lost its second device; three ranks on each are used."""
    cluster = plans.cluster(8, per_node=4).model_copy(update={"missing": (3, 5)})
    plan = plans.plan(
        ranks=3, replicas=2, degree=3, model=plans.tiny_model(num_heads=8), on=plans.cluster(6, per_node=3)
    )
    replicas = tuple(
        replica.model_copy(update={"ranks": ranks})
        for replica, ranks in zip(plan.replicas, ((0, 1, 2), (4, 6, 7)), strict=True)
    )
    return plan.model_copy(update={"cluster": cluster, "replicas": replicas})


def reduced_plan(num_lost: int = 2, **update: object) -> Plan:
    """Three replicas of four ranks, of which the second lost its last ones."""
    healthy = plans.plan(
        ranks=4, replicas=3, micro_batch=1, model=plans.tiny_model(num_kv_heads=8), on=plans.cluster(12, per_node=4)
    )
    fewer = plans.plan(ranks=4 - num_lost, micro_batch=1, model=healthy.model).pipelines[0]
    ranks = ((0, 1, 2, 3), tuple(range(4, 8 - num_lost)), (8, 9, 10, 11))
    replicas = tuple(
        replica.model_copy(update={"ranks": own, "pipeline": int(len(own) < 4)})
        for replica, own in zip(healthy.replicas, ranks, strict=True)
    )
    cluster = plans.cluster(12, per_node=4).model_copy(update={"missing": tuple(range(8 - num_lost, 8))})
    changed = {"pipelines": (*healthy.pipelines, fewer), "replicas": replicas, "cluster": cluster, **update}
    return healthy.model_copy(update=changed)


def test_reduced_replicas_become_nonuniform_tensor_parallelism(tmp_path: Path) -> None:
    reduced_plan().save(tmp_path / "plan.json")
    result = CliRunner().invoke(cli.app, ["export", str(tmp_path / "plan.json"), "--to", "megatron"])
    assert result.exit_code == 0, result.exception
    assert (
        "NonuniformTPConfig(tp_base=4, tp_spares=2, num_reduced_tp_dp_ranks=1, "
        "non_active_ranks_per_dp={(1, 0, 0): [2, 3]})"
    ) in result.stdout
    assert read_arguments(result.stdout)["--tensor-model-parallel-size"] == ("4",)


def test_what_nonuniform_tensor_parallelism_cannot_state() -> None:
    with pytest.raises(BadInputError, match="8 query heads are not a multiple of tensor-parallel degree 3"):
        reduced_of(reduced_plan(num_lost=1))
    plan = reduced_plan()
    shares = tuple(r.model_copy(update={"sequences": 1 + r.pipeline}) for r in plan.replicas)
    with pytest.raises(BadInputError, match="unlike shares of the batch"):
        reduced_of(plan.model_copy(update={"replicas": shares}))
    composed = plans.plan(ranks=2, degree=1, model=plan.model).pipelines[0]
    with pytest.raises(BadInputError, match="composes its 2 ranks by module"):
        reduced_of(plan.model_copy(update={"pipelines": (plan.pipelines[0], composed)}))


def programs(folder: Path) -> dict[str, str]:
    """Stand-ins that print how they were called, first in the path."""
    scripts = {"torchrun": 'echo "$CUDA_VISIBLE_DEVICES: $*"', "srun": 'printf "%s\\n" "$@"'}
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755 | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("resume", [False, True])
def test_slurm_starts_one_agent_per_node(resume: bool, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(write_slurm(damaged_plan(), "plan.json"))
    if resume:
        (tmp_path / "runs" / "job").mkdir(parents=True)
        (tmp_path / "runs" / "job" / "log.jsonl").touch()
    environment = {**programs(tmp_path / "bin"), "SLURM_JOB_NAME": "job"}
    result = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    words = result.stdout.splitlines()
    assert words[:4] == ["--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    assert words[4:] == ["plait", "train", "plan.json", "--out", "runs/job", *(["--resume"] if resume else [])]
    text = (tmp_path / "job.sh").read_text()
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --gpus-per-node=4\n" in text  # missing ones are there too: agents know which they are


def test_torchrun_lines_start_the_ranks_of_the_plan(tmp_path: Path) -> None:
    text = write_torchrun(damaged_plan(), "plan.json")
    environment = {**programs(tmp_path / "bin"), "HEAD": "first", "NODE": "7"}
    result = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, check=True)
    first, second = result.stdout.splitlines()
    assert first.startswith("0,1,2: --nnodes 2 --nproc-per-node 3 --node-rank 7 --master-addr first")
    assert second.startswith("0,2,3: ")


@pytest.mark.gloo
def test_the_torchrun_line_trains(tmp_path: Path) -> None:
    plan = plans.plan(ranks=2, on=plans.cluster(2, kind="cpu"), micro_batches=1)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"precision": "fp32"})})
    plan.save(tmp_path / "plan.json")
    line = write_torchrun(plan, "plan.json").splitlines()[-1]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", "-c", f"{line} --steps 2"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs" / "first" / "log.jsonl").is_file()
