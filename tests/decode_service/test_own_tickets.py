"""A decode worker opens the ticket of a prompt that it computes alone: in one call, in the node's line for memory."""

from __future__ import annotations

import asyncio

import pytest

from lab.testbed.conditions import until
from pillion.engine.streams import stream_session
from pillion.engine.worker import tickets, worker_epoch
from pillion.kvstore.hashing import chain_hashes
from pillion.rules.priority import Flow
from pillion.v1 import common_pb2
from pillion.v1.decode_pb2 import Sibling
from pillion.v1.kvnode_pb2 import OpenTicketReply
from tests.support.fake_backend import greedy
from tests.support.workers import (
    BLOCK,
    ROOT,
    Answer,
    Connection,
    Workers,
    connected,
    prompt,
    running_workers,
    submit_of,
)

NONE = OpenTicketReply()
SLOTS = 40
TOKENS = prompt(1, 30)
INVALID, DEADLINE, NOT_FOUND, EXHAUSTED, UNAVAILABLE = 3, 4, 5, 8, 14


async def alone(connection: Connection, key: int, tokens: list[int] = TOKENS, **other: object) -> Answer:
    """Return a stream whose ticket the worker opens."""
    hashes = chain_hashes(ROOT, tokens, BLOCK)[: (len(tokens) - 1) // BLOCK * 32]
    return await connection.submit(submit_of(key, NONE, tokens, **{"block_hashes": hashes, **other}))  # type: ignore[arg-type]


async def end_of(answer: Answer) -> int:
    """Return the code of its error; 0 on success."""
    await answer.ended()
    assert answer.last is not None
    return answer.last.error.code if answer.last.error else 0


async def fill(workers: Workers) -> OpenTicketReply:
    """Open a ticket that leaves no room for another one."""
    return await workers.node.open_ticket(workers.session.epoch, b"", SLOTS)


def calls_of(workers: Workers) -> list[str]:
    """Return the names of the ticket calls that the node gets from now on."""
    calls: list[str] = []
    pool = workers.kvnode.pool
    for name in ("open_ticket", "adopt"):
        made = getattr(pool, name)
        setattr(pool, name, lambda *args, name=name, made=made: (calls.append(name), made(*args))[1])
    return calls


async def waiting(workers: Workers, connection: Connection, key: int = 1, **other: object) -> Answer:
    """Return a stream that waits for memory, or whose wait is over."""
    line = len(workers.kvnode.pool.waiting)
    answer = await alone(connection, key, **other)  # type: ignore[arg-type]
    books = workers.kvnode.pool
    await until("the stream to wait for memory", lambda: len(books.waiting) == line + 1 or answer.over.is_set())
    return answer


async def test_a_ticket_is_opened_and_adopted_in_one_call() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        first = await alone(connection, 1)
        assert (await end_of(first), first.pinned, first.token_ids) == (0, [0], greedy(TOKENS, 8))
        await workers.quiet()
        calls = calls_of(workers)
        second = await alone(connection, 2, expected_blocks=7)
        assert (await end_of(second), second.pinned, second.token_ids) == (0, [7], first.token_ids)
        assert calls == ["open_ticket"]
        await workers.quiet()


async def test_a_shorter_hit_than_expected_allocates_nothing() -> None:
    """No block is evicted for slots that the stream does not use."""
    async with running_workers(slots=SLOTS) as workers, connected(workers) as connection:
        assert await end_of(await alone(connection, 1)) == 0
        await workers.quiet()
        whole = prompt(2, (SLOTS - 2) * BLOCK)
        answer = await alone(connection, 2, whole, expected_blocks=1)
        assert (await end_of(answer), answer.pinned) == (NOT_FOUND, [])
        assert not workers.kvnode.pool.ledger.evicted_ever
        assert answer.last is not None
        assert answer.last.error is not None
        assert answer.last.error.retryable
        await workers.quiet()


async def test_a_stream_reports_that_it_waits_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_epoch, "QUEUE_HEARTBEAT_MS", 20)
    async with running_workers(slots=SLOTS) as workers, connected(workers) as connection:
        full = await fill(workers)
        answer = await waiting(workers, connection, siblings=[Sibling(key=9, seed=1)])
        connection.answers[9] = Answer()
        await until("a sign of life", lambda: answer.queued)
        assert (set(answer.queued), answer.pinned) == ({1}, [])
        await workers.release(full)
        assert await end_of(answer) == await end_of(connection.answers[9]) == 0
        assert answer.token_ids == connection.answers[9].token_ids == greedy(TOKENS, 8)
        await workers.quiet()


async def test_a_tenant_without_memory_does_not_queue_behind_another() -> None:
    """The stream of the tenant that holds memory came first, and gets memory last."""
    flood, lone = common_pb2.Flow(key=b"flood"), common_pb2.Flow(key=b"lone", weight=0.5)
    half = (SLOTS // 2 - 1) * BLOCK
    async with running_workers(slots=SLOTS) as workers, connected(workers) as connection:
        node, epoch = workers.node, workers.session.epoch
        full = [await node.open_ticket(epoch, b"", blocks, flow=Flow(b"flood")) for blocks in (SLOTS // 2, SLOTS // 4)]
        workers.decode_backend.gate.clear()
        again = await waiting(workers, connection, 1, tokens=prompt(1, half), flow=flood)
        other = await waiting(workers, connection, 2, tokens=prompt(2, half), flow=lone)
        await workers.release(full[0])
        await until("one to have its memory", lambda: again.pinned or other.pinned)
        assert (again.pinned, other.pinned) == ([], [0])
        workers.decode_backend.gate.set()
        await workers.release(full[1])
        assert await end_of(other) == await end_of(again) == 0
        await workers.quiet()


@pytest.mark.parametrize("how", ["cancel", "close", "time", "epoch", "worker"])
async def test_a_cancelled_stream_leaves_the_queue(how: str) -> None:
    async with running_workers(slots=SLOTS) as workers, connected(workers) as connection:
        full = await fill(workers)
        answer = await waiting(workers, connection, timeout_ms=300 if how == "time" else 0)
        pool, worker = workers.kvnode.pool, workers.decode.worker
        if how == "close":
            await connection.close()
        elif how == "worker":
            await workers.decode.stop(0.0)
        elif how == "epoch":
            pool.fence(worker.epoch.number)
            assert await end_of(answer) == UNAVAILABLE
        elif how == "time":
            assert await end_of(answer) == DEADLINE
        else:
            await connection.cancel(1)
        await until("the line to be empty", lambda: not len(pool.waiting))
        await workers.release(full)
        await workers.quiet()
        await until("no ticket in use", lambda: not worker.epoch.tickets._in_use)


async def test_a_cancel_right_after_the_submit_leaks_nothing() -> None:
    async with running_workers(slots=SLOTS) as workers, connected(workers) as connection:
        for key in range(20):
            await alone(connection, key + 1, prompt(key, 40))
            await connection.cancel(key + 1)
        assert await end_of(await alone(connection, 99)) == 0
        await workers.quiet()
        await until("no ticket in use", lambda: not workers.decode.worker.epoch.tickets._in_use)


async def test_a_failed_wait_for_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry would fail as well."""
    spans: list[str] = []
    monkeypatch.setattr(stream_session, "record", lambda name, *_: spans.append(name))
    async with running_workers(slots=SLOTS) as workers, connected(workers) as connection:
        workers.kvnode.pool.waiting.max_waiting = 1
        full = await fill(workers)
        # A waiting stream must not time out before the next one comes.
        await waiting(workers, connection)
        one_more = await alone(connection, 2)
        assert await end_of(one_more) == EXHAUSTED
        await connection.cancel(1)
        await until("nobody to wait", lambda: not workers.kvnode.pool.waiting)
        monkeypatch.setattr(tickets, "MEMORY_WAIT_S", 0.5)
        monkeypatch.setattr(stream_session, "MEMORY_WAIT_S", 0.5)
        late = await alone(connection, 3)
        told = (one_more, "1 requests wait for KV memory already"), (late, "no KV memory came free at kvnode-0 within")
        for answer, text in told:
            assert await end_of(answer) == EXHAUSTED
            assert answer.last is not None
            assert answer.last.error is not None
            assert text in answer.last.error.message
            assert (answer.last.error.retryable, answer.last.error.retry_after_ms) == (False, 1000)
        assert spans == ["kv.pin"] * 3
        await workers.release(full)
        await workers.quiet()


async def test_a_stream_is_queued_once_its_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.decode_service.assemble.MAX_WAITING_SEQS", 0)
    async with running_workers(slots=SLOTS, decode={"max_num_seqs": 1}) as workers, connected(workers) as connection:
        full = await fill(workers)
        first, second = await waiting(workers, connection), await waiting(workers, connection, 2)
        workers.decode_backend.gate.clear()
        await workers.release(full)
        assert await end_of(second) == EXHAUSTED
        workers.decode_backend.gate.set()
        assert (await end_of(first), first.token_ids) == (0, greedy(TOKENS, 8))
        await workers.quiet()


async def test_a_stream_beyond_the_queue_limit_allocates_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots could be those of blocks still in use."""
    monkeypatch.setattr("pillion.decode_service.assemble.MAX_WAITING_SEQS", 0)
    async with (
        running_workers(decode={"max_num_seqs": 1}) as workers,
        connected(workers) as line,
    ):
        workers.decode_backend.gate.clear()
        first = await alone(line, 1)
        await until("the first stream to have its ticket", lambda: first.pinned)
        calls = calls_of(workers)
        assert await end_of(await alone(line, 2, prompt(2, 30))) == EXHAUSTED
        assert not calls
        workers.decode_backend.gate.set()
        assert (await end_of(first), first.token_ids) == (0, greedy(TOKENS, 8))
        await workers.quiet()


async def test_a_ticket_request_with_unknown_outcome_ends_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a granted ticket are recovered even if its call is cancelled and its release unanswered."""
    async with running_workers(slots=SLOTS) as workers, connected(workers) as connection:
        worker = workers.decode.worker
        old, open_ticket, granted = worker.epoch, worker.node.open_ticket, asyncio.Event()

        async def held_back(*args: object, **named: object) -> OpenTicketReply:
            reply = await open_ticket(*args, **named)  # type: ignore[arg-type]
            granted.set()
            try:
                await asyncio.Event().wait()
            finally:
                named["on_unreleased"](tickets.Unavailable("cut off"))  # type: ignore[operator]
            return reply

        monkeypatch.setattr(worker.node, "open_ticket", held_back)
        await alone(connection, 1)
        await granted.wait()
        await connection.cancel(1)
        await until("a new epoch", lambda: worker.epoch is not old and not worker.epoch.over)
        await workers.quiet()


BAD = {
    "half a hash": {"block_hashes": b"\1" * 31},
    "the last token's block": {"block_hashes": b"\1" * 32 * 8},
    "awaited": {"awaited_blocks": 1},
}


@pytest.mark.parametrize("how", BAD)
async def test_contradictory_submits_are_refused(how: str) -> None:
    async with running_workers() as workers, connected(workers) as connection:
        assert await end_of(await alone(connection, 1, **BAD[how])) == INVALID  # type: ignore[arg-type]
        assert not workers.decode.worker.failed
        await workers.quiet()
