"""A decode worker waits at the node for the blocks that a prefill worker is to commit: in time, and for every end."""

from __future__ import annotations

import asyncio

import pytest

from lab.testbed.conditions import WITHIN_S, until
from pillion.engine.worker import tickets
from pillion.errors import Cancelled, NotFound, Overloaded
from pillion.kvstore.node import pool
from pillion.v1.kvnode_pb2 import OpenTicketReply
from tests.support.fake_backend import greedy
from tests.support.workers import Answer, Connection, Workers, connected, running_workers, submit_of

TOKENS = [(position * 7) % 97 for position in range(50)]
AWAITED = 10
NOT_FOUND, EXHAUSTED, DEADLINE = 5, 8, 4


async def awaiting(
    workers: Workers, connection: Connection, key: int = 1, **other: object
) -> tuple[Answer, OpenTicketReply]:
    """Return a stream that waits at the node for a prefill range that has not begun, or whose wait is over."""
    waits = workers.kvnode.pool.chain_waits
    ticket = await workers.ticket(TOKENS)
    answer = await connection.submit(submit_of(key, ticket, TOKENS, 9, awaited_blocks=AWAITED, **other))
    books = workers.kvnode.pool
    await until("the decode worker to wait", lambda: books.chain_waits == waits + 1 or answer.over.is_set())
    return answer, ticket


async def run_prefill(workers: Workers, ticket: OpenTicketReply) -> None:
    prefill_range = workers.prefill_range(ticket, TOKENS, (16, 16, 8))
    acks = [
        one
        async for one in workers.prefill_stub.RunPrefill(prefill_range, timeout=WITHIN_S)
        if not one.HasField("queued")
    ]
    assert acks[-1].end_tokens == AWAITED * 4


async def end_of(answer: Answer) -> int:
    """Return the code of its error; 0 on success."""
    await answer.ended()
    assert answer.last is not None
    return answer.last.error.code if answer.last.error else 0


async def test_a_stream_starts_when_the_node_reports_its_chain() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        answer, ticket = await awaiting(workers, connection)
        assert connection.batches == 0
        await workers.release(ticket)
        await run_prefill(workers, ticket)
        assert await end_of(answer) == 0
        assert answer.token_ids == greedy(TOKENS, 9)
        assert answer.last is not None
        assert answer.last.timings is not None
        assert answer.last.timings.tail_tokens == 10
        await workers.quiet()


async def test_a_stream_does_not_wait_for_a_complete_chain() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        ticket = await workers.ticket(TOKENS)
        await run_prefill(workers, ticket)
        answer = await connection.submit(submit_of(1, ticket, TOKENS, 9, awaited_blocks=AWAITED))
        assert await end_of(answer) == 0
        assert answer.token_ids == greedy(TOKENS, 9)
        await workers.release(ticket)
        await workers.quiet()


@pytest.mark.parametrize("how", ["cancel", "close", "time"])
async def test_a_cancelled_stream_stops_waiting(how: str) -> None:
    async with running_workers() as workers, connected(workers) as connection:
        answer, ticket = await awaiting(workers, connection, timeout_ms=300 if how == "time" else 0)
        if how == "time":
            assert await end_of(answer) == DEADLINE
        await (connection.close() if how == "close" else connection.cancel(1))
        await until("the wait to end", lambda: workers.kvnode.pool.chain_waits == 0)
        await run_prefill(workers, ticket)
        await workers.release(ticket)
        await workers.quiet()


async def test_a_cancel_right_after_the_submit_leaves_no_chain_wait() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        ticket = await workers.ticket(TOKENS)
        for key in range(20):
            await connection.submit(submit_of(key + 1, ticket, TOKENS, 9, awaited_blocks=AWAITED))
            await connection.cancel(key + 1)
        await workers.release(ticket)
        await workers.quiet()
        assert workers.kvnode.pool.chain_waits == 0


async def test_a_stalled_chain_ends_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "CHAIN_STALL_TIMEOUT_S", 0.1)
    async with running_workers() as workers, connected(workers) as connection:
        answer, ticket = await awaiting(workers, connection)
        assert await end_of(answer) == NOT_FOUND
        await workers.release(ticket)
        await workers.quiet()


async def test_a_stream_is_queued_once_its_chain_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.decode_service.assemble.MAX_WAITING_SEQS", 0)
    async with (
        running_workers(decode={"max_num_seqs": 1}) as workers,
        connected(workers) as connection,
    ):
        first, ticket = await awaiting(workers, connection)
        short = TOKENS[:9]
        other = await workers.ticket(short)
        workers.decode_backend.gate.clear()
        second = await connection.submit(submit_of(2, other, short, 9))
        await until("the second stream to begin", lambda: connection.batches)
        await run_prefill(workers, ticket)
        assert await end_of(first) == EXHAUSTED
        workers.decode_backend.gate.set()
        assert await end_of(second) == 0
        assert second.token_ids == greedy(short, 9)
        await workers.release(ticket, other)
        await workers.quiet()


async def test_chain_waits_are_limited_and_end_with_their_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_CHAIN_WAITS", 1)
    async with running_workers() as workers, connected(workers) as connection:
        _, first = await awaiting(workers, connection)
        second = await workers.ticket(TOKENS[1:])
        answer = await connection.submit(submit_of(2, second, TOKENS[1:], 9, awaited_blocks=AWAITED))
        assert await end_of(answer) == EXHAUSTED
        books = workers.kvnode.pool
        epoch = workers.decode.worker.epoch.number
        books.adopt(epoch, second.ticket_id, 0)
        with pytest.raises(Overloaded):
            await books.await_chain(epoch, second.ticket_id, AWAITED, 1.0)
        monkeypatch.setattr(pool, "MAX_CHAIN_WAITS", 2)
        waiting = asyncio.create_task(books.await_chain(epoch, second.ticket_id, AWAITED, 20.0))
        await until("the second wait", lambda: books.chain_waits == 2)
        books.check_integrity()
        books.ended(epoch)
        with pytest.raises(Cancelled):
            await waiting
        with pytest.raises(NotFound):
            await books.await_chain(epoch, first.ticket_id, AWAITED, 1.0)
        await until("all waits to end", lambda: books.chain_waits == 0)
        await workers.release(first, second)
