"""Logits of every family equal those of `transformers`, under plans of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from executor.engine import Engine
from executor.huggingface import HuggingFaceWeights
from specs.plan import Plan
from specs.presets import load_model
from tests.hf_models import CONFIGS, plans, save_random
from tests.layouts import SEQ_LEN
from tests.parity import OPTIONS

if TYPE_CHECKING:
    from tests.gloo import GlooPool

SEQUENCES = 3


def ids_of(vocab: int) -> torch.Tensor:
    return torch.randint(vocab, (SEQUENCES, SEQ_LEN), generator=torch.Generator().manual_seed(5))


def rank_logits(plan_json: str, folder: str) -> tuple[int, int, object] | None:
    """(first sequence, first token of the micro-batch, logits) of this rank's head block."""
    plan = Plan.model_validate_json(plan_json)
    engine = Engine(plan, OPTIONS, device=torch.device("cpu"), seed=0, dtype=torch.float32)
    engine.set_weights(HuggingFaceWeights(Path(folder)).read_elements)
    layout = engine.layout
    first = layout.first_sequence
    ids = ids_of(plan.model.vocab)[first : first + layout.pipeline.micro_batch].reshape(-1)
    out = engine.runner.logits(ids if layout.is_first_stage else None)
    if not layout.is_last_stage:
        return None
    return first, layout.modules[-1].block_tokens.start, out.numpy()


@pytest.mark.gloo
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_transformers(gloo_pool: GlooPool, family: str, tmp_path: Path) -> None:
    reference = save_random(family, tmp_path)
    with torch.no_grad():
        expected = reference(ids_of(reference.config.vocab_size)).logits
    assert float(expected.std()) > 0.1
    for name, plan in plans(load_model(str(tmp_path))).items():
        ranks = gloo_pool.run(rank_logits, plan.world_size, plan.model_dump_json(), str(tmp_path))
        found = [rank for rank in ranks if rank is not None]
        assert len(found) >= 1
        for first, token, logits in found:
            part = expected[first : first + 2].reshape(-1, expected.shape[-1])[token : token + len(logits)]
            assert float((torch.from_numpy(logits) - part).abs().max()) < 1e-4, name
