"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gloo import GlooPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers (`-n 2 --dist loadgroup`): a file stays together, for the sake of its fixtures, and
    everything that starts processes of its own runs one after the other.
    """
    for item in items:
        group = "gloo" if item.get_closest_marker("gloo") else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Up to eight gloo ranks, kept for the whole session."""
    from tests.gloo import GlooPool

    pool = GlooPool(8)
    yield pool
    pool.close()
