"""What a measurement of a cluster covers."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt

from specs.base import Document
from specs.cluster import Precision
from specs.model import ModelSpec
from specs.options import Backend


class ProfileOptions(Document):
    """Every distinct module of `model` at every degree, for each number of sequences that a block may hold."""

    out: Path
    model: ModelSpec
    seq_len: PositiveInt
    block_sequences: tuple[PositiveInt, ...] = (1, 2, 4, 8)
    degrees: tuple[PositiveInt, ...] = Field(min_length=1)
    precision: Precision
    backend: Backend
    num_steps: PositiveInt = 8  # timed steps of each layout and round
    num_rounds: PositiveInt = 2  # layouts are gone through this often, so that a slow spell hits none alone
    largest_payload_bytes: PositiveInt = 32 * 2**20  # or the model's weights, if those are fewer
    timeout_seconds: PositiveFloat = 600.0
    command: str = ""
    created_at: str
