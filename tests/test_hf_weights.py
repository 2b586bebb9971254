"""Weights come from Hugging Face folders into any plan and go back, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.engine import Engine
from executor.huggingface import CONFIG, INDEX, WEIGHTS, HuggingFaceWeights
from executor.huggingface_config import config_of
from executor.huggingface_export import write_weights
from specs.errors import BadInputError
from specs.huggingface import model_from_config
from specs.layout import Interval
from specs.model import Mlp
from specs.plan import Plan
from specs.presets import MODEL_NAMES, load_model, model_preset
from tests.hf_models import CONFIGS, plans, save_random
from tests.layouts import small_model
from tests.parity import OPTIONS

if TYPE_CHECKING:
    from tests.gloo import GlooPool


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved model of each family."""
    root = tmp_path_factory.mktemp("families")
    for family in CONFIGS:
        save_random(family, root / family)
    return {family: root / family for family in CONFIGS}


def import_pieces(plan_json: str, folder: str) -> list[tuple[str, int, int, object]]:
    """Import on one rank; (name, start, stop, values) of every local parameter."""
    plan = Plan.model_validate_json(plan_json)
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=0, dtype=torch.float32)
    engine.set_weights(HuggingFaceWeights(Path(folder)).read_elements)
    return [
        (name, t.elements.start, t.elements.stop, t.parameter.detach().reshape(-1).numpy())
        for name, tensors in engine.local.items()
        for t in tensors
    ]


@pytest.mark.gloo
@pytest.mark.parametrize("family", CONFIGS)
def test_import_under_any_plan_then_export_is_bit_for_bit(
    gloo_pool: GlooPool, folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    folder = folders[family]
    model = load_model(str(folder))
    for name, plan in plans(model).items():
        ranks = gloo_pool.run(import_pieces, plan.world_size, plan.model_dump_json(), str(folder))
        whole: dict[str, dict[int, torch.Tensor]] = {}
        for tensor, start, _, values in (piece for rank in ranks for piece in rank):
            whole.setdefault(tensor, {})[start] = torch.from_numpy(values)

        def read(tensor: str, elements, whole=whole) -> torch.Tensor:  # type: ignore[no-untyped-def]
            result = torch.full((elements.stop,), torch.nan)
            for start, values in whole[tensor].items():
                part = values[: max(0, elements.stop - start)]
                result[start : start + part.numel()] = part
            return result[elements.start :]

        write_weights(model, family, read, tmp_path / name, torch.float32)
        before, after = load_file(folder / WEIGHTS), load_file(tmp_path / name / WEIGHTS)
        assert before.keys() == after.keys()
        for key, values in before.items():
            assert torch.equal(values.view(torch.int32), after[key].view(torch.int32)), (name, key)


@pytest.mark.parametrize("family", CONFIGS)
def test_written_config_describes_the_same_model(folders: dict[str, Path], family: str) -> None:
    model = load_model(str(folders[family]))
    written = config_of(model)
    assert written["model_type"] == family
    assert model_from_config(written, name=model.name, where="test") == model


def dense_and_alike(name: str) -> bool:
    """What the families that are written have: equal layers without experts."""
    layers = model_preset(name).layers
    return len(layers) == 1 and isinstance(layers[0].feed_forward, Mlp)


@pytest.mark.parametrize("name", [name for name in MODEL_NAMES if dense_and_alike(name)])
def test_every_preset_can_be_exported(name: str) -> None:
    model = model_preset(name)
    assert model_from_config(config_of(model), name=model.name, where="test") == model


def test_openelm_layers_of_unlike_widths(tmp_path: Path) -> None:
    """Names and fused tensors as published checkpoints have them; `transformers` has no class to compare with."""
    config = {
        "model_type": "openelm",
        "vocab_size": 61,
        "model_dim": 24,
        "num_transformer_layers": 2,
        "head_dim": 4,
        "num_query_heads": [6, 8],
        "num_kv_heads": [3, 4],
        "ffn_multipliers": [0.5, 1.9],
        "ffn_dim_divisor": 8,
        "normalize_qk_projections": True,
    }
    (tmp_path / CONFIG).write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {"transformer.token_embeddings.weight": torch.randn(61, 24), "transformer.norm.weight": torch.randn(24)}
    for layer, heads, kv_heads, ffn in ((0, 6, 3, 16), (1, 8, 4, 48)):
        for name, shape in {
            "attn_norm.weight": (24,),
            "attn.qkv_proj.weight": ((heads + 2 * kv_heads) * 4, 24),
            "attn.q_norm.weight": (4,),
            "attn.k_norm.weight": (4,),
            "attn.out_proj.weight": (24, heads * 4),
            "ffn_norm.weight": (24,),
            "ffn.proj_1.weight": (2 * ffn, 24),
            "ffn.proj_2.weight": (24, ffn),
        }.items():
            tensors[f"transformer.layers.{layer}.{name}"] = torch.randn(shape)
    save_file(tensors, tmp_path / WEIGHTS)
    weights = HuggingFaceWeights(tmp_path)
    assert config_of(weights.model)["model_type"] == "openelm"
    key = weights.read("layer.1.attention.key", Interval(4, 16))
    assert torch.equal(key, tensors["transformer.layers.1.attn.qkv_proj.weight"][36:48])
    up = weights.read("layer.0.mlp.up", Interval(0, 16))
    assert torch.equal(up, tensors["transformer.layers.0.ffn.proj_1.weight"][16:])
    write_weights(weights.model, "openelm", weights.read_elements, tmp_path / "back", torch.float32)
    after = load_file(tmp_path / "back" / WEIGHTS)
    assert tensors.keys() == after.keys()
    assert all(torch.equal(tensors[name], after[name]) for name in tensors)


def test_a_model_that_no_family_has_is_refused() -> None:
    with pytest.raises(BadInputError, match="small cannot be written as a Hugging Face model"):
        config_of(small_model())


def test_several_files_with_an_index_in_half_precision(tmp_path: Path) -> None:
    save_random("llama", tmp_path / "a", dtype=torch.bfloat16)
    weights = HuggingFaceWeights(tmp_path / "a")
    write_weights(weights.model, "llama", weights.read_elements, tmp_path / "b", torch.bfloat16, file_bytes=8000)
    (tmp_path / "b" / CONFIG).write_bytes((tmp_path / "a" / CONFIG).read_bytes())
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 3
    again = HuggingFaceWeights(tmp_path / "b")
    write_weights(again.model, "llama", again.read_elements, tmp_path / "c", torch.bfloat16)
    before, after = load_file(tmp_path / "a" / WEIGHTS), load_file(tmp_path / "c" / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key].view(torch.int16), after[key].view(torch.int16)) for key in before)


def test_the_bare_decoder_and_old_buffers_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(folders["gpt2"] / WEIGHTS).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_bytes((folders["gpt2"] / CONFIG).read_bytes())
    assert torch.equal(
        HuggingFaceWeights(tmp_path).read_elements("embedding.weight", Interval(0, 24)), tensors["wte.weight"][0]
    )


def _copy(folder: Path, place: Path, change) -> Path:  # type: ignore[no-untyped-def]
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    place.mkdir()
    save_file(tensors, place / WEIGHTS)
    (place / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    return place


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "1 of 42 tensors that config.json asks for are missing"),
        (lambda t: t.update({"model.layers.3.x": torch.ones(2)}), "1 tensors have no place .* is model.layers.3.x"),
        (lambda t: t.update({"lm_head.weight": torch.ones(60, 24)}), r"lm_head.weight has shape \[60, 24\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(24).int()}), "model.norm.weight has type I32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folders: dict[str, Path], tmp_path: Path, change, sentence: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadInputError, match=sentence):
        HuggingFaceWeights(_copy(folders["llama"], tmp_path / "bad", change))


def test_folders_that_cannot_be_read(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="does not exist"):
        HuggingFaceWeights(tmp_path / "none")
    (tmp_path / CONFIG).write_bytes((folders["llama"] / CONFIG).read_bytes())
    with pytest.raises(BadInputError, match="holds neither"):
        HuggingFaceWeights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(BadInputError, match="pickled weights only"):
        HuggingFaceWeights(tmp_path)
    (tmp_path / WEIGHTS).write_bytes((folders["llama"] / WEIGHTS).read_bytes()[:-100])
    with pytest.raises(BadInputError, match="cannot be read"):
        HuggingFaceWeights(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "../secret.safetensors"}}))
    with pytest.raises(BadInputError, match="no weight_map"):
        HuggingFaceWeights(tmp_path)


def test_another_model_is_refused_by_its_difference(folders: dict[str, Path]) -> None:
    weights = HuggingFaceWeights(folders["llama"])
    weights.check_model(weights.model.model_copy(update={"name": "other"}), "the plan")
    with pytest.raises(
        BadInputError, match=r"layer.0.attention: the plan has .*rope_theta null.*, the folder .*\. Make the plan"
    ):
        weights.check_model(
            load_model(str(folders["gpt2"])).model_copy(update={"embedding": weights.model.embedding}), "the plan"
        )


def _plait(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.gloo
def test_train_from_a_folder_and_export_what_transformers_loads(folders: dict[str, Path], tmp_path: Path) -> None:
    import transformers

    # A vocabulary that bytes fit into.
    config = transformers.LlamaConfig.from_pretrained(folders["llama"], vocab_size=256)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "start")
    plan = plans(load_model(str(tmp_path / "start")))["mixed"]
    plan.save(tmp_path / "plan.json")
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    common = ("--data", tmp_path / "text.txt", "--steps", 2, "--learning-rate", 1e-5)
    run = tmp_path / "run"
    done = _plait("train", tmp_path / "plan.json", "--out", run, "--from", tmp_path / "start", *common)
    assert done.returncode == 0, done.stderr
    done = _plait("export-weights", run, "-o", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    for (name, before), after in zip(model.named_parameters(), back.parameters(), strict=True):
        assert torch.allclose(before, after, atol=1e-4), name
        assert not torch.equal(before, after), f"{name} was not trained"
    done = _plait("export-weights", run, "-o", tmp_path / "back")
    assert done.returncode == 2
    assert "holds a model already" in done.stderr
    wrong = _plait("train", tmp_path / "plan.json", "--out", tmp_path / "other", "--from", folders["llama"], *common)
    assert wrong.returncode == 2
    assert "embedding: the plan has vocab 256, the folder vocab 61" in wrong.stderr
    assert not (tmp_path / "other").exists()
    both = _plait("train", tmp_path / "plan.json", "--out", run, "--resume", "--from", tmp_path / "start")
    assert both.returncode == 2
    assert "--from starts a new run" in both.stderr
