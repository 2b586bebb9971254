"""Shipped models and clusters, and what a mistyped name is answered with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specs.cluster import ClusterSpec
from specs.errors import BadInputError
from specs.model import ModelSpec
from specs.presets import MODEL_NAMES, cluster_preset, load_cluster, load_model, machines, model_preset
from specs.tensors import num_parameters

# Sizes printed on the models' cards; the small two are ours.
PARAMETERS = {
    "deepseek-v3": 671_026_404_352,
    "gpt2": 124_439_808,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "nemotron-super-49b": 49_867_145_216,
    "nemotron-ultra-253b": 253_401_268_224,
    "openelm-3b": 3_037_040_640,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "demo": 5_121_792,
    "tiny": 123_712,
}


def test_every_model_has_its_published_size() -> None:
    assert {name: num_parameters(model_preset(name).modules()) for name in MODEL_NAMES} == PARAMETERS


def test_demo_layers_grow_and_are_not_powers_of_two() -> None:
    widths = [layer.feed_forward.ffn for layer in model_preset("demo").layers]
    assert widths == sorted(set(widths))
    assert len(widths) >= 3
    assert any(width & (width - 1) for width in widths)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_saved_preset_loads_as_itself(name: str, tmp_path: Path) -> None:
    model = model_preset(name)
    model.save(tmp_path / "model.json")
    assert load_model(str(tmp_path / "model.json")) == model


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llama-3-80b", ["unknown model 'llama-3-80b'", "did you mean llama-3-8", "gpt2", "config.json"]),
        ("zzz", ["unknown model 'zzz'", "llama-3-405b"]),
        ("no/such.json", ["does not exist"]),
    ],
)
def test_unknown_model(text: str, expected: list[str]) -> None:
    with pytest.raises(BadInputError) as caught:
        load_model(text)
    for part in expected:
        assert part in str(caught.value)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"holds no config\.json"):
        load_model(str(tmp_path))


def test_model_of_another_schema_version(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**model_preset("tiny").model_dump(mode="json"), "schema_version": 9}))
    with pytest.raises(BadInputError, match="schema_version is 9"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("name", "nodes", "device"),
    [
        ("h100x64", [(8, 8)], "H100"),
        ("h100x16384", [(2048, 8)], "H100"),
        ("h100x3", [(1, 3)], "H100"),
        ("a100x8", [(1, 8)], "A100-80G"),
        ("a100-40gx16", [(2, 8)], "A100-40G"),
        ("gb200x72", [(1, 72)], "GB200"),
        ("gb300x100", [(1, 72), (1, 28)], "GB300"),
        ("mi300xx8", [(1, 8)], "MI300X"),
    ],
)
def test_cluster_shape(name: str, nodes: list[tuple[int, int]], device: str) -> None:
    cluster = cluster_preset(name)
    assert [(group.count, group.devices_per_node) for group in cluster.nodes] == nodes
    assert {group.device for group in cluster.nodes} == {device}
    assert cluster.name == name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100x0", ["has no devices", "h100x8"]),
        ("h100x-8", ["has no devices"]),
        ("h100x12", ["not a multiple of the node size 8", "h100x8 or h100x16"]),
        ("h10x8", ["unknown device 'h10'", "did you mean"]),
        ("h100", ["unknown cluster 'h100'", "h100x64", "gb200"]),
        ("", ["unknown cluster ''"]),
        ("h100x9999999999999999999999", ["more than 1,048,576"]),
        ("no/such.json", ["does not exist"]),
    ],
)
def test_bad_cluster(name: str, expected: list[str]) -> None:
    with pytest.raises(BadInputError) as caught:
        load_cluster(name)
    for part in expected:
        assert part in str(caught.value)


@given(st.sampled_from(sorted(machines())), st.integers(1, 300))
def test_a_count_is_kept_or_two_good_ones_are_named(kind: str, count: int) -> None:
    try:
        assert cluster_preset(f"{kind}x{count}").num_devices == count
    except BadInputError as error:
        lower, upper = (word.rstrip(".") for word in str(error).split("Use ")[1].split(" or "))
        assert cluster_preset(lower).num_devices < count < cluster_preset(upper).num_devices


def test_a_saved_cluster_loads_as_itself(tmp_path: Path) -> None:
    cluster = cluster_preset("gb200x100")
    cluster.save(tmp_path / "cluster.json")
    assert load_cluster(str(tmp_path / "cluster.json")) == cluster


@pytest.mark.parametrize("content", ["", "[1, 2]", "{}", '{"name": 3}', "null", "\x00"])
def test_files_that_are_neither(content: str, tmp_path: Path) -> None:
    path = tmp_path / "thing.json"
    path.write_text(content)
    for load in (load_model, load_cluster):
        with pytest.raises(BadInputError, match=r"thing\.json"):
            load(str(path))


def test_every_figure_of_a_machine_has_a_source() -> None:
    for machine in machines().values():
        for part in (machine.device, machine.scale_up, machine.scale_out):
            assert len(part.source) > 20
        assert machine.scale_up.bytes_per_second > machine.scale_out.bytes_per_second


def test_presets_are_what_the_contracts_say() -> None:
    assert isinstance(load_model("gpt2"), ModelSpec)
    assert isinstance(load_cluster("h200x8"), ClusterSpec)
