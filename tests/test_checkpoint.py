"""Checkpoints: saved under one plan, continued under another, verified, never torn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from specs.errors import BadInputError
from specs.plan import Plan
from tests.checkpoints import HELD_SECONDS, agreed, largest_read, save_on_a_full_disk, train_part, train_while_writing
from tests.layouts import ReplicaShape, StageShape, build, small_model
from tests.parity import run_reference

if TYPE_CHECKING:
    from tests.gloo import GlooPool

MODEL = small_model(tied=True)
MIXED = {"attention": (2, 2), "mlp": (4,), "embedding": (1, 1, 1, 1), "head": (2, 2)}


def chain_of_plans() -> list[Plan]:
    """Plans for a global batch of 8: every kind of layout once, every level of sharding."""
    return [
        build(MODEL, [ReplicaShape([StageShape(4, MIXED)], 2, 8)]),
        build(MODEL, [ReplicaShape([StageShape(4)], 1, 5), ReplicaShape([StageShape(3)], 1, 3)], zero=1),
        build(MODEL, [ReplicaShape([StageShape(2), StageShape(1)], 1, 8)]),
        build(MODEL, [ReplicaShape([StageShape(4, MIXED)], 2, 8)], zero=3),
        build(MODEL, [ReplicaShape([StageShape(1)], 2, 4), ReplicaShape([StageShape(1)], 2, 4)], zero=1),
        build(MODEL, [ReplicaShape([StageShape(3)], 1, 5), ReplicaShape([StageShape(2)], 1, 3)], zero=2),
        build(MODEL, [ReplicaShape([StageShape(5)], 1, 8)]),
        build(MODEL, [ReplicaShape([StageShape(1)], 4, 8)]),
    ]


@pytest.mark.gloo
def test_training_continues_through_a_chain_of_plans(gloo_pool: GlooPool, tmp_path: Path) -> None:
    losses: list[float] = []
    for index, plan in enumerate(chain_of_plans()):
        ranks = gloo_pool.run(train_part, plan.world_size, plan.model_dump_json(), str(tmp_path), 2 * (index + 1))
        losses += ranks[0]
    whole = run_reference(MODEL, 8, 8, torch.float64, 2 * len(chain_of_plans()))
    assert losses == pytest.approx(whole.losses, rel=1e-9)


@pytest.fixture
def two_checkpoints(gloo_pool: GlooPool, tmp_path: Path) -> Path:
    """Steps 1 and 2 of a run on two ranks, each of which wrote a file."""
    plan = build(MODEL, [ReplicaShape([StageShape(2)], 1, 2)])
    for step in (1, 2):
        gloo_pool.run(train_part, 2, plan.model_dump_json(), str(tmp_path), step)
    return tmp_path


def _flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("damage", "word"),
    [(_flip_bit, "sha256"), (_truncate, "bytes"), (Path.unlink, "cannot be read")],
    ids=["bit flipped", "truncated", "missing"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(two_checkpoints: Path, damage, word: str) -> None:
    from executor.checkpoint import find_checkpoint

    damage(two_checkpoints / "step-00000002" / "rank-00001.safetensors")
    found = find_checkpoint(two_checkpoints)
    assert found is not None
    place, manifest, refused = found
    assert (place.name, manifest.step) == ("step-00000001", 1)
    assert len(refused) == 1
    assert "step-00000002" in refused[0]
    assert word in refused[0]


@pytest.mark.gloo
def test_a_changed_manifest_is_refused(two_checkpoints: Path) -> None:
    """Still valid JSON of the right form: only its sum tells."""
    from executor.checkpoint import find_checkpoint

    manifest = two_checkpoints / "step-00000002" / "manifest.json"
    changed = manifest.read_text().replace('"seed": 7', '"seed": 8')
    assert changed != manifest.read_text()
    manifest.write_text(changed)
    found = find_checkpoint(two_checkpoints)
    assert found is not None
    assert found[0].name == "step-00000001"
    assert "step-00000002: manifest.json was changed" in found[2][0]


@pytest.mark.gloo
def test_all_ranks_agree_though_only_one_reads_the_damaged_file(gloo_pool: GlooPool, two_checkpoints: Path) -> None:
    _flip_bit(two_checkpoints / "step-00000002" / "rank-00001.safetensors")
    answers = gloo_pool.run(agreed, 3, str(two_checkpoints))
    assert len(set(answers)) == 1
    assert answers[0][0] == "step-00000001"
    assert "rank-00001.safetensors was changed" in answers[0][1]


@pytest.mark.gloo
def test_latest_is_where_training_resumes(two_checkpoints: Path) -> None:
    from executor.checkpoint import find_checkpoint

    latest = two_checkpoints / "LATEST"
    assert latest.read_text() == "step-00000002\n"
    latest.write_text("step-00000001\n")
    found = find_checkpoint(two_checkpoints)
    assert found is not None
    assert (found[0].name, found[2]) == ("step-00000001", [])
    latest.write_text("step-99\n")
    found = find_checkpoint(two_checkpoints)
    assert found is not None
    assert found[0].name == "step-00000002"
    assert "LATEST names 'step-99'" in found[2][0]


@pytest.mark.gloo
def test_going_back_does_not_cost_the_checkpoints_that_come_next(gloo_pool: GlooPool, two_checkpoints: Path) -> None:
    """LATEST set back to step 1: step 2 is saved anew, and neither it nor step 1 counts as old."""
    (two_checkpoints / "LATEST").write_text("step-00000001\n")
    plan = build(MODEL, [ReplicaShape([StageShape(2)], 1, 2)])
    (two_checkpoints / "step-00000002").rename(two_checkpoints / "step-00000009")
    gloo_pool.run(train_part, 2, plan.model_dump_json(), str(two_checkpoints), 2, 2)
    names = sorted(p.name for p in two_checkpoints.iterdir())
    assert names == ["LATEST", "step-00000001", "step-00000002", "step-00000009"]


@pytest.mark.gloo
def test_training_goes_on_while_a_checkpoint_is_written(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Writers are held up: steps after the save change the weights, but not what is saved."""
    plan = build(MODEL, [ReplicaShape([StageShape(2)], 1, 2)])
    ranks = gloo_pool.run(train_while_writing, 2, plan.model_dump_json(), str(tmp_path))
    straight = gloo_pool.run(train_part, 2, plan.model_dump_json(), str(tmp_path / "straight"), 4)
    for losses, seen, stall, lag in ranks:
        assert losses == pytest.approx(straight[0][:3], rel=1e-12)
        assert seen == [], "a checkpoint that is not finished must not be found"
        assert stall < HELD_SECONDS <= lag
    resumed = gloo_pool.run(train_part, 2, plan.model_dump_json(), str(tmp_path), 4)
    assert resumed[0] == pytest.approx(straight[0][1:], rel=1e-12)


@pytest.mark.gloo
@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_writer_could_not_write_is_told_to_all(gloo_pool: GlooPool, tmp_path: Path, failing: int) -> None:
    plan = build(MODEL, [ReplicaShape([StageShape(2)], 1, 2)])
    gloo_pool.run(train_part, 2, plan.model_dump_json(), str(tmp_path), 1)
    messages = gloo_pool.run(save_on_a_full_disk, 2, plan.model_dump_json(), str(tmp_path), failing)
    assert len(set(messages)) == 1
    assert "checkpoint of step 7 was not saved" in messages[0]
    assert f"rank-0000{failing}" in messages[0]
    assert "No space left" in messages[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step-00000001"]


@pytest.mark.gloo
def test_loading_reads_no_more_than_a_bucket_at_once(gloo_pool: GlooPool, two_checkpoints: Path) -> None:
    plan = build(MODEL, [ReplicaShape([StageShape(1)], 2, 2)], zero=0)
    largest = gloo_pool.run(largest_read, 1, plan.model_dump_json(), str(two_checkpoints), 100)
    assert largest == [100]


@pytest.mark.gloo
def test_when_every_checkpoint_is_damaged_the_run_does_not_start_over(two_checkpoints: Path) -> None:
    from executor.checkpoint import find_checkpoint

    for place in two_checkpoints.glob("step-*"):
        (place / "manifest.json").write_text("{")
    with pytest.raises(BadInputError, match="no sound checkpoint"):
        find_checkpoint(two_checkpoints)


@pytest.mark.gloo
def test_an_unfinished_checkpoint_is_not_seen(two_checkpoints: Path) -> None:
    from executor.checkpoint import find_checkpoint

    (two_checkpoints / "step-00000002").rename(two_checkpoints / ".writing-step-00000003")
    found = find_checkpoint(two_checkpoints)
    assert found is not None
    assert found[1].step == 1


@pytest.mark.gloo
def test_only_the_newest_are_kept(gloo_pool: GlooPool, tmp_path: Path) -> None:
    plan = build(MODEL, [ReplicaShape([StageShape(1)], 2, 2)])
    for step in range(1, 5):
        gloo_pool.run(train_part, 1, plan.model_dump_json(), str(tmp_path), step, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step-00000003", "step-00000004"]


@pytest.mark.gloo
def test_a_checkpoint_of_another_model_is_refused(gloo_pool: GlooPool, two_checkpoints: Path) -> None:
    plan = build(small_model(), [ReplicaShape([StageShape(1)], 2, 2)])
    with pytest.raises(AssertionError, match=r"lacks .* elements of head.weight"):
        gloo_pool.run(train_part, 1, plan.model_dump_json(), str(two_checkpoints), 3)
