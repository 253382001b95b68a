"""A kept pool, the keeper and the system: a drop is final, and nothing remains of a failed one."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from lab.testbed.conditions import WITHIN_S
from pillion.errors import ConfigError
from pillion.kvstore.ledger.records import PoolShape
from pillion.kvstore.pool_survival.keeper_client import PoolKeeper
from pillion.kvstore.pool_survival.owned_segment import OwnedSegment
from pillion.kvstore.pool_survival.surviving_pool import SurvivingPool, keep_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the locks of open files are Linux's")

SHAPE = PoolShape(4, 8192, "ab" * 32)


class SlowKeeper:
    """A keeper that answers a "keep" only when it may."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.may_keep = threading.Event()

    def keep(self, name: str, memories: Sequence[int], processes: Sequence[tuple[int, int]] = ()) -> None:
        assert self.may_keep.wait(WITHIN_S)
        self.calls.append("keep")

    def drop(self, name: str) -> None:
        self.calls.append("drop")

    def lost(self) -> bool:
        return False


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_an_abandoned_pool_is_dropped_last() -> None:
    memory, pidfd = os.memfd_create("gpu"), os.pidfd_open(os.getpid())
    pool = SurvivingPool.make(OwnedSegment(mmap.PAGESIZE), SHAPE, [memory])
    assert pool is not None
    slow = SlowKeeper()
    keeper = cast("PoolKeeper", slow)
    with contextlib.closing(pool):
        # One keep is in progress and another waits when a worker makes the pool unrecoverable.
        giving = [asyncio.create_task(pool.send(keeper, "kv")) for _ in range(2)]
        await asyncio.sleep(0)
        admitting = asyncio.create_task(pool.admit(keeper, "kv", 1, 1, pidfd))
        await asyncio.sleep(0)
        pool.forsake()
        dropping = asyncio.create_task(keep_alive(keeper, "kv", pool, 0.0))
        for _ in range(3):
            await asyncio.sleep(0)
        slow.may_keep.set()
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*giving, admitting, dropping)
        assert slow.calls == ["keep", "drop"]
    for descriptor in (memory, pidfd):
        os.close(descriptor)


def owned_by_another(places: OwnedSegment) -> Any:
    other = OwnedSegment.from_descriptor(os.dup(places.fileno()))
    assert other.own()
    return other


@pytest.mark.parametrize(
    ("memories", "spoilt", "ends"),
    [
        ([1, -1], lambda places: None, contextlib.nullcontext()),
        ([1], owned_by_another, pytest.raises(ConfigError, match="another owner")),
    ],
    ids=["no descriptor", "no ownership"],
)
def test_a_pool_that_cannot_be_kept_leaves_no_descriptor(
    memories: list[int], spoilt: Callable[[OwnedSegment], Any], ends: contextlib.AbstractContextManager[Any]
) -> None:
    before = open_files()
    places = OwnedSegment(mmap.PAGESIZE)
    other = spoilt(places)
    with ends:
        assert SurvivingPool.make(places, SHAPE, memories) is None
    places.close()
    if other is not None:
        other.close()
    assert open_files() == before
