"""Leaving process groups, those too that were never whole."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from executor.connections import Connections, leave_groups

pytestmark = pytest.mark.gloo


@pytest.fixture(autouse=True)
def _left() -> Iterator[None]:
    yield
    leave_groups()


def _store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def test_a_group_that_was_never_whole_does_not_count() -> None:
    """Else members that did not try it would wait under other keys."""
    with pytest.raises(RuntimeError):
        dist.init_process_group("gloo", store=_store(), rank=0, world_size=2, timeout=timedelta(seconds=0.3))
    leave_groups()
    store = _store()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    total = torch.ones(1)
    dist.all_reduce(total)
    first = dist.group.WORLD
    assert first is not None
    assert first.group_name == "0"


def test_cut_reaches_what_is_being_opened() -> None:
    """A listening thread may be told to leave while groups are formed."""
    connections = Connections()
    store = _store()
    with connections.opening():
        client = dist.TCPStore("127.0.0.1", store.port, None, is_master=False, wait_for_workers=False)
        connections.cut()
        with pytest.raises(dist.DistError):
            client.get("never set")
