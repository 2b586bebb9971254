"""Waits that end although gloo does not end them: two ranks in threads, of which one does not take part."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from executor import waiting
from executor.waiting import PeersLostError, may_leave, wait, wait_transfer

pytestmark = pytest.mark.gloo
_LIMIT = timedelta(seconds=2)  # gloo's own


def _groups(limit: timedelta) -> list[dist.ProcessGroupGloo]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit), range(2)))


@pytest.fixture
def pair() -> list[dist.ProcessGroupGloo]:
    return _groups(_LIMIT)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(waiting, "_waiter", None)
    monkeypatch.setattr(waiting, "_left", None)
    event = threading.Event()
    may_leave(event)
    yield event
    event.set()


def test_waits_end_when_peers_take_part(pair: list[dist.ProcessGroupGloo], left: threading.Event) -> None:
    values = [torch.ones(3), 2 * torch.ones(3)]
    works = [group.allreduce(value) for group, value in zip(pair, values, strict=True)]
    for work in works:
        wait(work)
    assert [value.tolist() for value in values] == [[3.0] * 3] * 2
    received = torch.empty(3)
    coming, going = pair[1].recv([received], 0, 0), pair[0].send([values[0]], 1, 0)
    wait_transfer(going)
    wait_transfer(coming)
    assert received.tolist() == [3.0] * 3
    assert not left.is_set()


def test_a_wait_is_given_up_once_told_to_leave(pair: list[dist.ProcessGroupGloo], left: threading.Event) -> None:
    sum_, transfer = pair[0].allreduce(torch.ones(3)), pair[0].recv([torch.empty(3)], 1, 0)
    timer = threading.Timer(0.7, left.set)
    timer.start()
    with pytest.raises(PeersLostError, match="transfer"):
        wait_transfer(transfer)
    with pytest.raises(PeersLostError, match="collective"):
        wait(sum_)
    assert not sum_.is_completed()
    time.sleep(_LIMIT.total_seconds())  # its threads end before the group does


def test_what_failed_raises_its_own_error(left: threading.Event) -> None:
    groups = _groups(timedelta(seconds=0.8))
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        wait(groups[0].allreduce(torch.ones(3)))  # gloo's own limit
    assert not left.is_set()
