"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gloo import GlooPool


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Up to eight gloo ranks, kept for the whole session."""
    from tests.gloo import GlooPool

    pool = GlooPool(8)
    yield pool
    pool.close()
