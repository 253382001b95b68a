"""Threads are assigned to tenants in turn, and small jobs do not wait for another tenant's megabytes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lab.testbed.conditions import WITHIN_S, until
from pillion.errors import Overloaded
from pillion.gateway.admission.tenants import OPEN, Tenant
from pillion.gateway.admission.turns import SMALL_JOB_BYTES, ThreadTurns
from pillion.gateway.tokens.tokenizer import JobAbandoned, TokenizerPool, check_wanted

A, B = Tenant(name="a"), Tenant(name="b")
LARGE = SMALL_JOB_BYTES + 1


def test_large_jobs_leave_a_thread_to_small_ones() -> None:
    for tenants in ((OPEN, OPEN), (A, A), (A, B)):
        turns = ThreadTurns(2, 100)
        large = [turns.wait(tenants[0], LARGE) for _ in range(4)]
        assert turns.grant() == large[:1]
        small = [turns.wait(tenants[1], 1) for _ in range(2)]
        assert turns.grant() == small[:1]
        turns.end(small[0])
        assert turns.grant() == small[1:]
        turns.end(large[0])
        assert turns.grant() == large[1:2]


def test_small_jobs_leave_a_thread_to_large_ones() -> None:
    turns = ThreadTurns(2, 100)
    small = [turns.wait(A, 1) for _ in range(9)]
    assert turns.grant() == small[:2]
    large = turns.wait(A, LARGE)
    turns.end(small[0])
    assert turns.grant() == [large]


@pytest.mark.parametrize("size_bytes", [1, LARGE])
def test_a_flood_waits_and_another_tenant_is_next(size_bytes: int) -> None:
    turns = ThreadTurns(2, 100)
    flood = [turns.wait(A, size_bytes) for _ in range(20)]
    first = turns.grant()
    late = turns.wait(B, size_bytes)
    turns.end(first[0])
    assert turns.grant() == [late]
    turns.end(flood[len(first)])
    turns.end(late)
    assert turns.grant() == [flood[len(first) + 1]]


def test_a_tenant_is_limited_to_its_share_of_the_queue() -> None:
    turns = ThreadTurns(2, 8)
    for _ in range(4):
        turns.wait(A, 1)
    with pytest.raises(Overloaded, match="wait to be tokenized"):
        turns.wait(A, 1)
    kept = [turns.wait(B, 1) for _ in range(2)]
    turns.end(kept[0])
    assert turns.jobs == 5
    turns = ThreadTurns(2, 8)
    for _ in range(8):
        turns.wait(OPEN, 1)
    with pytest.raises(Overloaded):
        turns.wait(OPEN, 1)


async def test_a_job_ends_with_its_caller() -> None:
    """It stops at the current item, and a queued job never begins."""
    pool, begun, gate, seen = TokenizerPool(), threading.Event(), threading.Event(), list[object]()

    def job() -> None:
        begun.set()
        try:
            while True:
                assert gate.wait(WITHIN_S)
                check_wanted()
        except JobAbandoned as error:
            seen.append(error)
            raise

    try:
        working = asyncio.create_task(pool.run(job, size_bytes=LARGE))
        waiting = asyncio.create_task(pool.run(seen.append, "begun", size_bytes=LARGE))
        await until("the job to begin", begun.is_set)
        for task in (waiting, working):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
        gate.set()
        await until("both jobs to be over", lambda: pool.jobs == 0)
        assert [type(one) for one in seen] == [JobAbandoned]
        # Outside of the pool's threads the caller is always waiting.
        check_wanted()
        assert await pool.run(str, 5) == "5"
    finally:
        gate.set()
        pool.close()
