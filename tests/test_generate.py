"""Generation and evaluation under a plan: the cache changes nothing, the commands work on runs and on imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from executor.decoder import Decoder, first_replica
from executor.generate import Text
from executor.huggingface import HuggingFaceWeights
from specs.plan import Plan
from specs.presets import load_model, model_preset
from tests.hf_models import CONFIGS, plans, save_random
from tests.layouts import ReplicaShape, StageShape, build

if TYPE_CHECKING:
    from tests.gloo import GlooPool

pytestmark = pytest.mark.gloo
PROMPT = [3, 1, 4, 1, 5]
NEW = 12


def continue_prompt(plan_json: str, folder: str, use_cache: bool, temperature: float = 0.0) -> list[int]:
    """The tokens that this rank saw chosen."""
    plan = first_replica(Plan.model_validate_json(plan_json))
    decoder = Decoder(
        plan,
        HuggingFaceWeights(Path(folder)).read_elements,
        max_tokens=len(PROMPT) + NEW,
        dtype=torch.float32,
        device=torch.device("cpu"),
        use_cache=use_cache,
    )
    generator = torch.Generator().manual_seed(dist.get_rank())  # only one rank draws
    tokens, fed = [], torch.tensor(PROMPT)
    for _ in range(NEW):
        token = decoder.choose(
            decoder.next_logits(fed), temperature=temperature, generator=generator, num_ids=plan.model.vocab
        )
        tokens.append(token)
        fed = torch.tensor([token])
    return tokens


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_with_and_without_cache_equals_transformers(gloo_pool: GlooPool, family: str, tmp_path: Path) -> None:
    reference = save_random(family, tmp_path)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(NEW):
            ids = torch.cat((ids, reference(ids).logits[:, -1:].argmax(-1)), dim=1)
    expected = ids[0, len(PROMPT) :].tolist()
    assert len(set(expected)) > 1
    for name, plan in plans(load_model(str(tmp_path))).items():
        size = len(plan.replicas[0].ranks)
        for use_cache in (True, False):
            for tokens in gloo_pool.run(continue_prompt, size, plan.model_dump_json(), str(tmp_path), use_cache):
                assert tokens == expected, (name, use_cache)


def test_all_ranks_see_the_same_draws(gloo_pool: GlooPool, tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    plan = plans(load_model(str(tmp_path)))["pp 3"]
    tokens = gloo_pool.run(continue_prompt, 4, plan.model_dump_json(), str(tmp_path), True, 5.0)
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]
    assert tokens != gloo_pool.run(continue_prompt, 4, plan.model_dump_json(), str(tmp_path), True, 0.0)


def test_characters_are_written_whole() -> None:
    written: list[str] = []
    put = Text(None).printer(written.append)
    for i, byte in enumerate("aé€".encode() + b"\xe2"):
        put(byte, i == 6)
    assert [text for text in written if text] == ["a", "é", "€", "\N{REPLACEMENT CHARACTER}"]


def byte_pairs(path: Path) -> Path:
    """A small byte-level BPE tokenizer, saved as tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps. "], trainer)
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_goes_there_and_back(tmp_path: Path) -> None:
    text = Text(byte_pairs(tmp_path / "tokenizer.json"))
    assert 256 < text.num_ids <= 270
    sentence = "the quick brown fôx€ jumps. "
    ids, written = text.ids(sentence), []
    assert len(ids) < len(sentence.encode())
    put = text.printer(written.append)
    for i, token in enumerate(ids):
        put(token, i == len(ids) - 1)
    assert "".join(written) == sentence
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in written)


def test_an_imported_model_brings_its_tokenizer(tmp_path: Path) -> None:
    """Import, train, generate, evaluate, export: nobody names a tokenizer, nothing is lost on the way."""
    import transformers

    config = transformers.LlamaConfig.from_dict({**CONFIGS["llama"].to_dict(), "vocab_size": 270, "eos_token_id": 0})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_pairs(tmp_path / "model" / "tokenizer.json")
    plans(load_model(str(tmp_path / "model")))["tp 4"].save(tmp_path / "plan.json")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps. " * 200)
    data = ("--data", tmp_path / "text.txt")
    run, source = tmp_path / "run", ("--from", tmp_path / "model")
    for command in (
        ("train", tmp_path / "plan.json", "--out", run, *source, *data, "--steps", 40, "--learning-rate", 1e-2),
        ("generate", run, "--prompt", "the quick ", "--max-tokens", 5),
        ("generate", tmp_path / "plan.json", *source, "--prompt", "the", "--max-tokens", 5, "--temperature", 1.0),
        ("eval", tmp_path / "plan.json", *source, *data),
        ("export-weights", run, "-o", tmp_path / "back"),
    ):
        done = _plait(*command)
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout or command[0] == "train"
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (tmp_path / "model" / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == 0


def _plait(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, trained until it knows its one line by heart; two replicas, one of two stages."""
    folder = tmp_path_factory.mktemp("generate")
    shapes = [
        ReplicaShape([StageShape(2, {"attention": (1, 1)})], 2, 6),
        ReplicaShape([StageShape(1)], 1, 2),
    ]
    build(model_preset("tiny"), shapes, seq_len=32).save(folder / "plan.json")
    (folder / "text.txt").write_text("the quick brown fox jumps. " * 400)
    arguments = ("--data", folder / "text.txt", "--steps", 60, "--learning-rate", 1e-2)
    done = _plait("train", folder / "plan.json", "--out", folder / "run", *arguments)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_generate_continues_what_was_trained(run: Path) -> None:
    done = _plait("generate", run, "--prompt", "the quick ", "--max-tokens", 17)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "brown fox jumps. \n"


def test_eval_is_the_loss_of_the_log_and_of_other_text(run: Path, tmp_path: Path) -> None:
    own = _plait("eval", run, "--json")
    assert own.returncode == 0, own.stderr
    found = json.loads(own.stdout)
    assert found["loss"] < 0.5
    assert found["tokens"] <= found["text_tokens"] < found["tokens"] + 3 * 32
    (tmp_path / "other.txt").write_text("Pack my box with five dozen liquor jugs! " * 8)
    other = _plait("eval", run, "--data", tmp_path / "other.txt", "--json")
    assert json.loads(other.stdout)["loss"] > 3.0, other.stderr
    (tmp_path / "other.txt").write_text("short")
    short = _plait("eval", run, "--data", tmp_path / "other.txt")
    assert short.returncode == 2
    assert "the text has 5 tokens, one batch of this plan needs 97 (3 sequences of 32)" in short.stderr


def test_bad_requests_end_in_a_sentence(run: Path, tmp_path: Path) -> None:
    plan = run / "plan.json"
    for arguments, sentence in (
        (("generate", tmp_path / "none", "--prompt", "x"), "run folder"),
        (("generate", run, "--prompt", ""), "--prompt is empty"),
        (("generate", plan, "--prompt", "x"), "give the weights too, with --from"),
        (("generate", plan, "--prompt", "x", "--from", tmp_path / "none"), "model folder"),
        (("eval", plan), "give the weights too"),
    ):
        done = _plait(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert sentence in done.stderr
        assert done.stderr.count("plait: ") == 1
