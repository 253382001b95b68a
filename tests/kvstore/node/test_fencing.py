"""Fencing at a real node over real gRPC (I4): what it revokes at once, what stays quarantined, and until when."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.redis import RedisServer
from pillion.config import KVNodeFlags
from pillion.errors import Cancelled, Conflict, NotFound
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.attachment import Attachment, attach
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.hashing import chain_hashes
from pillion.kvstore.index.registry import Registry
from pillion.kvstore.node import pool as pool_module
from pillion.kvstore.node.kv_node import KVNode
from pillion.v1.kvnode_pb2 import CommitRun, NodeStatus
from tests.support.redis_nodes import patient

SLOTS = 20
BLOCK_BYTES = 4096
ROOT = bytes(32)


def hashes(*tokens: int) -> bytes:
    return chain_hashes(ROOT, tokens, 1)


@dataclass
class Fixture:
    """A node with a gateway's session. ``attachments`` are closed at the end."""

    node: KVNode
    client: NodeClient
    gateway: int
    folder: str
    attachments: list[Attachment]

    async def worker(self, name: str = "decode-0", role: str = "decode") -> int:
        """Attach a new worker; return its epoch."""
        made = await asyncio.to_thread(
            attach,
            f"{self.folder}/attach.sock",
            component_id=name,
            role=role,
            block_bytes=BLOCK_BYTES,
            timeout_s=WITHIN_S,
        )
        self.attachments.append(made)
        return made.epoch

    def fence(self, epoch: int) -> None:
        """Fence the worker, as the node does after a silence."""
        self.node.pool.ledger.fence(epoch)

    async def books(self) -> NodeStatus:
        """Return the node's status after an integrity check."""
        await self.client.check_integrity()
        return await self.client.status()

    async def end(self, number: int) -> None:
        """Let a worker die."""
        holders = (await self.client.status()).holders
        self.attachments[number].close()

        async def gone() -> bool:
            return (await self.client.status()).holders != holders

        await until("the worker's end to be known", gone)


@asynccontextmanager
async def running(folder: str, **more: object) -> AsyncIterator[Fixture]:
    flags = KVNodeFlags(
        node_listen=f"unix:{folder}/node.sock",
        attach_socket=f"{folder}/attach.sock",
        kv_pool_bytes=SLOTS * BLOCK_BYTES,
        # The node fences no worker by the real clock.
        heartbeat_timeout_ms=600_000,
        **more,  # type: ignore[arg-type]
    )
    node = await start_kvnode(flags)
    client = NodeClient(node.address, "gateway-0")
    session = await client.open_session()
    made = Fixture(node, client, session.epoch, folder, [])
    try:
        yield made
        await client.check_integrity()
    finally:
        for attachment in made.attachments:
            attachment.close()
        await session.aclose()
        await client.aclose()
        await node.stop(0.1)


@pytest.fixture
async def line(short_folder: str) -> AsyncIterator[Fixture]:
    async with running(short_folder) as made:
        yield made


async def hold(line: Fixture, epoch: int, *tokens: int) -> tuple[int, tuple[int, ...]]:
    """Return id and slots of a ticket that the gateway opened and the worker adopted, with its slots leased."""
    ticket = await line.client.open_ticket(line.gateway, hashes(*tokens), len(tokens) + 1)
    adopted = await line.client.adopt(epoch, ticket.ticket_id, len(tokens) + 1 - ticket.pinned_blocks)
    return ticket.ticket_id, tuple(adopted.leased_slots)


async def commit(line: Fixture, epoch: int, ticket_id: int, slots: tuple[int, ...], *tokens: int) -> None:
    [result] = await line.client.commit(
        epoch, [CommitRun(ticket_id=ticket_id, slots=slots[: len(tokens)], block_hashes=hashes(*tokens))]
    )
    assert not result.refusal


async def test_a_fenced_epochs_slots_are_quarantined_until_it_drains(line: Fixture) -> None:
    old = await line.worker()
    ticket_id, slots = await hold(line, old, 1, 2, 3)
    await commit(line, old, ticket_id, slots, 1, 2)
    stock = await line.client.lease(old, 4)
    await line.client.release(line.gateway, [ticket_id])
    before = await line.books()
    assert (before.leased_blocks, before.quarantined_blocks, tuple(before.fenced_components)) == (6, 0, ())
    line.fence(old)
    held = await line.books()
    assert (held.leased_blocks, held.quarantined_blocks, tuple(held.fenced_components)) == (0, 6, ("decode-0",))
    assert (held.pinned_blocks, held.tickets) == (2, 1), "its pins hold, too: it may still read"
    other = await line.worker("decode-1")
    assert not set(await line.client.lease(other, SLOTS)) & {*slots, *stock}
    fresh = await line.client.reattach(old)
    assert fresh != old
    after = await line.books()
    assert (after.quarantined_blocks, tuple(after.fenced_components)) == (0, ())
    assert (after.pinned_blocks, after.tickets) == (0, 0)
    assert after.committed_blocks == 2, "what it committed before is true"
    assert set(await line.client.lease(fresh, SLOTS)) >= {*slots[2:], *stock}


async def test_a_fenced_epochs_slots_are_quarantined_until_its_socket_closes(line: Fixture) -> None:
    old = await line.worker()
    ticket_id, _ = await hold(line, old, 1, 2, 3)
    line.fence(old)
    await line.client.release(line.gateway, [ticket_id])
    assert (await line.books()).quarantined_blocks == 4
    await line.end(0)
    after = await line.books()
    assert (after.quarantined_blocks, after.free_blocks, after.tickets) == (0, SLOTS, 0)
    assert tuple(after.fenced_components) == ()
    with pytest.raises(NotFound):
        await line.client.reattach(old)


async def test_a_fenced_epoch_changes_nothing(line: Fixture) -> None:
    client, old = line.client, await line.worker()
    ticket_id, slots = await hold(line, old, 1, 2, 3)
    unadopted = (await client.open_ticket(line.gateway, hashes(7), 2)).ticket_id
    line.fence(old)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: client.commit(old, [CommitRun(ticket_id=ticket_id, slots=slots[:1], block_hashes=hashes(1))]),
        lambda: client.lease(old, 1),
        lambda: client.adopt(old, unadopted, 1),
        lambda: client.return_slots(old, slots[:1]),
        lambda: client.release(old, [ticket_id]),
        lambda: client.open_ticket(old, hashes(9), 2),
        lambda: client.prefetch(old, ticket_id, hashes(1), timeout_s=WITHIN_S),
    ]
    before = await line.books()
    for call in calls:
        with pytest.raises(Conflict):
            await call()
    assert await line.books() == before
    assert (await client.heartbeat(old)).fenced, "a sign of life does not lift it"
    fresh = await client.reattach(old)
    for call in calls:
        with pytest.raises(NotFound):
            await call()
    assert not (await client.heartbeat(fresh)).fenced
    # The gateway held the ticket all the time: the new epoch may adopt it, slots and all.
    assert len((await client.adopt(fresh, ticket_id, 4)).leased_slots) == 4
    await line.books()


async def test_a_worker_may_fence_its_own_epoch(line: Fixture) -> None:
    old = await line.worker()
    ticket_id, _ = await hold(line, old, 1, 2, 3)
    await line.client.lease(old, 3)
    await line.client.release(line.gateway, [ticket_id])
    before = await line.books()
    with pytest.raises(Conflict):
        await line.client.reattach(line.gateway)
    with pytest.raises(NotFound):
        await line.client.reattach(12345)
    assert await line.books() == before
    fresh = await line.client.reattach(old)
    after = await line.books()
    assert (after.leased_blocks, after.quarantined_blocks, after.tickets) == (0, 0, 0)
    assert await line.client.reattach(old) == fresh, "the answer may have been lost"
    assert len(await line.client.lease(fresh, 2)) == 2
    with pytest.raises(NotFound):
        await line.client.reattach(old)


@pytest.mark.parametrize("used", ["lease", "ticket", "fence"])
async def test_a_repeated_call_has_no_answer_once_the_new_epoch_is_used(line: Fixture, used: str) -> None:
    old = await line.worker()
    fresh = await line.client.reattach(old)
    assert await line.client.reattach(old) == fresh
    if used == "lease":
        await line.client.lease(fresh, 1)
    elif used == "ticket":
        ticket = await line.client.open_ticket(line.gateway, hashes(1, 2, 3), 4)
        await line.client.adopt(fresh, ticket.ticket_id, 0)
    else:
        line.fence(fresh)
    with pytest.raises(NotFound):
        await line.client.reattach(old)


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_detaching_frees_the_new_epochs_slots(line: Fixture, times: int) -> None:
    epoch = await line.worker()
    for _ in range(times):
        line.fence(epoch)
        epoch = await line.client.reattach(epoch)
    ticket_id, _ = await hold(line, epoch, 1, 2, 3)
    await line.client.release(line.gateway, [ticket_id])
    await line.client.lease(epoch, 2)
    assert (await line.books()).leased_blocks == 6
    await line.end(0)
    after = await line.books()
    assert (after.free_blocks, after.tickets, after.holders) == (SLOTS, 0, 1)
    with pytest.raises(NotFound):
        await line.client.heartbeat(epoch)


async def test_a_fenced_worker_leaves_the_allocation_queue(line: Fixture) -> None:
    old, other = await line.worker(), await line.worker("decode-1")
    await line.client.lease(other, SLOTS)
    waiting = asyncio.create_task(line.client.open_ticket(old, hashes(1, 2), 3, resume=True))

    async def waits() -> int:
        return (await line.client.status()).waiting_tickets

    await until("the worker to wait", waits)
    pool = line.node.pool
    seen_s = pool.ledger.holders[old].seen_s
    assert seen_s is not None
    pool.ledger.holders[old].seen_s = seen_s - 2 * pool._timeout_s
    pool.judge_silence(60.0)
    with pytest.raises(Cancelled):
        await waiting
    books = await line.books()
    assert (books.waiting_tickets, tuple(books.fenced_components)) == (0, ("decode-0",))


async def test_only_missed_heartbeats_fence_a_worker(line: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, pool = time.monotonic(), line.node.pool
    limit_s = pool._timeout_s

    async def fenced_after(limits: float) -> tuple[str, ...]:
        """Return who is fenced after this many timeouts. A single jump would be the node's own sleep."""
        nonlocal now_s
        for _ in range(round(limits * 10)):
            now_s += limit_s / 10
            pool.judge_silence(limit_s / 10)
        return tuple((await line.books()).fenced_components)

    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    silent, lively, loading = [await line.worker(f"decode-{number}") for number in range(3)]
    for epoch in (silent, lively):
        await line.client.heartbeat(epoch)
    assert await fenced_after(0.9) == ()
    await line.client.heartbeat(lively)
    assert await fenced_after(0.2) == ("decode-0",), "who never spoke is still loading"
    assert not (await line.client.heartbeat(lively)).fenced
    assert not (await line.client.heartbeat(loading)).fenced
    # A new epoch may also start late.
    fresh = await line.client.reattach(silent)
    for _ in range(3):
        assert await fenced_after(0.9) == ()
        await line.client.heartbeat(lively)
        await line.client.heartbeat(loading)
    assert not (await line.client.heartbeat(fresh)).fenced


async def test_the_registry_lists_fenced_workers(short_folder: str, redis: RedisServer) -> None:
    async with running(short_folder, redis_url=redis.url, heartbeat_ms=20) as line:
        old = await line.worker()
        line.fence(old)
        registry = patient(Registry(redis.url, 5000))

        async def fenced_workers() -> list[tuple[str, ...]]:
            return [
                component.fenced_components for component in await registry.components() if component.role == "kvnode"
            ]

        async def is_fenced() -> bool:
            return await fenced_workers() == [("decode-0",)]

        async def is_free() -> bool:
            return await fenced_workers() == [()]

        await until("the registry to name the worker", is_fenced)
        await line.client.reattach(old)
        await until("the registry to name nobody", is_free)
        await registry.aclose()


@pytest.mark.parametrize("seed", range(3))
async def test_fences_and_returns_at_random_leak_nothing(line: Fixture, seed: int) -> None:
    draw, fresh_tokens = random.Random(seed), itertools.count(1)
    epochs = [await line.worker(f"decode-{number}") for number in range(2)]
    tickets: list[list[tuple[int, tuple[int, ...], int]]] = [[], []]
    for _ in range(60):
        number = draw.randrange(2)
        epoch, mine = epochs[number], tickets[number]
        match draw.randrange(4):
            case 0 if (await line.client.status()).free_blocks > 6:
                token = next(fresh_tokens)
                ticket_id, slots = await hold(line, epoch, token, 0)
                await line.client.release(line.gateway, [ticket_id])
                mine.append((ticket_id, slots, token))
            case 1 if mine:
                ticket_id, slots, token = mine.pop()
                await commit(line, epoch, ticket_id, slots, token, 0)
                await line.client.release(epoch, [ticket_id])
                await line.client.return_slots(epoch, slots[2:])
            case 2:
                line.fence(epoch)
                with pytest.raises(Conflict):
                    await line.client.lease(epoch, 1)
                await line.books()
                epochs[number] = await line.client.reattach(epoch)
                mine.clear()
        await line.books()
    for number in range(2):
        await line.end(number)
    after = await line.books()
    assert (after.leased_blocks, after.quarantined_blocks, after.tickets, after.pinned_blocks) == (0, 0, 0, 0)
    assert after.free_blocks + after.committed_blocks == SLOTS
