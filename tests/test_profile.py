"""`plait profile` measures what it says: every module, degree and size, operations and bytes right, the rest sane."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from cost_models.activations import activation_bytes
from cost_models.share import Share
from profiles.collectives import group_layouts, payloads
from profiles.modules import distinct_model
from profiles.statistics import undisturbed
from specs.base import load_document
from specs.errors import BadInputError
from specs.layout import Interval
from specs.model import num_units
from specs.presets import model_preset
from specs.profile import Profile
from specs.tensors import tensors_of

pytestmark = pytest.mark.gloo


def _profile(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", "profile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    out = tmp_path_factory.mktemp("profile") / "profile.json"
    sizes = ("--seq-len", 32, "--block-sequences", "1,2", "--steps", 2, "--rounds", 1)
    done = _profile("-o", out, "--model", "tiny", "--nproc", 2, *sizes)
    assert done.returncode == 0, done.stderr
    return load_document(Profile, out, "profile")


def test_every_distinct_module_at_every_degree_and_size(measured: Profile) -> None:
    distinct = {module for _, module in model_preset("tiny").modules()}
    found = {(t.module, t.degree, t.block_tokens) for t in measured.modules}
    assert found == {(m, t, tokens) for m in distinct for t in (1, 2) for tokens in (32, 64)}


def test_operations_and_bytes(measured: Profile) -> None:
    for timing in measured.modules:
        assert timing.flop_counted == pytest.approx(timing.flop_formula, rel=0.01)
        whole = 4 * sum(tensor.num_elements for tensor in tensors_of(timing.module))
        assert whole / timing.degree <= timing.weight_bytes <= whole
        units = Interval(0, num_units(timing.module) // timing.degree)
        share = Share(timing.degree, timing.block_tokens // timing.degree, timing.block_tokens, units, timing.seq_len)
        kept = activation_bytes(timing.module, share, "fp32")
        # What the formula leaves out, large beside so small a model: the rotary table, norm statistics, and for the
        # embedding the token ids of the whole micro-batch, of which a block's are a view.
        slack = 4 * 32 * 16 + 8 * timing.block_tokens
        assert timing.activation_bytes == pytest.approx(kept, rel=0.05, abs=slack)


def test_times_and_spread(measured: Profile) -> None:
    for timing in measured.modules:
        for whole, communication in (
            (timing.forward, timing.forward_communication),
            (timing.backward, timing.backward_communication),
        ):
            assert 0 <= whole.min_seconds <= whole.mean_seconds <= whole.max_seconds
            assert communication <= whole.mean_seconds
            assert (communication > 0) <= (timing.degree > 1)
            assert whole.repetitions == 2
    ops = {timing.op for timing in measured.collectives}
    assert ops == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point"}
    assert all(timing.timing.mean_seconds > 0 for timing in measured.collectives)
    assert [timing.num_elements for timing in measured.optimizer]
    assert measured.overhead.other_seconds_per_step >= 0


def test_gradient_sync_after_and_beside_backward(measured: Profile) -> None:
    assert [overlap.sharded for overlap in measured.overlaps] == [False, True]
    for overlap in measured.overlaps:
        assert 0 < overlap.sync_seconds < overlap.apart.mean_seconds
        assert overlap.backward_seconds < overlap.apart.mean_seconds
        assert overlap.overlapped.repetitions == 2
    assert measured.reserved_bytes == 0  # a CPU has no context


def test_what_split_backward_passes_add(measured: Profile) -> None:
    assert 0.0 <= measured.overhead.split_backward_overhead < 2.0


def test_a_profile_of_an_earlier_version_is_to_be_measured_again(measured: Profile, tmp_path: Path) -> None:
    old = measured.model_dump(mode="json")
    del old["overhead"]["split_backward_overhead"]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(old))
    with pytest.raises(BadInputError, match=r"split_backward_overhead is missing.*measure it again"):
        load_document(Profile, path, "profile")


def test_skew_is_between_ranks(measured: Profile) -> None:
    for timing in measured.modules:
        skew = timing.forward.skew_seconds
        assert skew is not None
        # of two ranks and means of two micro-batches: half their difference times the root of two
        assert 0 <= skew <= (timing.forward.max_seconds - timing.forward.min_seconds) / 2 * 1.4143


def test_it_says_who_measured_what_and_how(measured: Profile) -> None:
    assert measured.made.versions["torch"]
    assert measured.made.inputs["model"] == model_preset("tiny").sha256()
    assert measured.made.command.startswith("plait profile")
    assert measured.method
    device = measured.cluster.device_of(0)
    assert device.kind == "cpu"
    assert device.memory_bytes > 0
    assert measured.cluster.num_devices == 2


def test_distinct_modules_once() -> None:
    demo = model_preset("demo")
    short = distinct_model(demo)
    assert {m for _, m in short.modules()} == {m for _, m in demo.modules()}
    assert len(short.modules()) < len(demo.modules())
    assert len(set(short.modules())) == len(short.modules())


def test_groups_by_level() -> None:
    inside = [(size, level) for size, level, _ in group_layouts(8, 4)]
    assert inside == [(2, "scale_up"), (4, "scale_up"), (2, "scale_out"), (8, "scale_out")]
    for _, _, groups in group_layouts(8, 4):
        assert sorted(rank for group in groups for rank in group) == list(range(8))
    assert group_layouts(1, 1) == []
    across = next(groups for size, level, groups in group_layouts(8, 4) if (size, level) == (2, "scale_out"))
    assert all(a // 4 != b // 4 for a, b in across)


def test_payloads_span_the_range() -> None:
    assert payloads(100_000) == [4096, 16384, 65536]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--degrees", "3", "--nproc", 2), "degree 3 does not divide the 2 ranks"),
        (("--model", "gpt2", "--seq-len", 4096), "longer than the 1024 positions"),
        (("--backend", "nccl", "--nproc", 1), "has no GPU of its own"),
        (("--model", "no-such-model"), "no-such-model"),
        (("--nproc", 0), "nproc"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: tuple[object, ...], message: str) -> None:
    done = _profile("-o", tmp_path / "profile.json", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "profile.json").exists()


def test_disturbed_repetitions_are_left_out_whole() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        kept = undisturbed([1.0, 9.0, 1.2, 1.1, 0.1, 1.3, 8.0, 1.15])
    finally:
        dist.destroy_process_group()
    assert kept == [2, 3, 5, 7], "neither the slowest quarter nor the fastest, in order"
