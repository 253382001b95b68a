"""A real node over real gRPC: queueing, cancellation, sessions, dead and silent workers. Nothing may leak."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until
from pillion.config import KVNodeFlags
from pillion.errors import (
    Cancelled,
    ConfigError,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PillionError,
    Unavailable,
)
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.attachment import Attachment, attach
from pillion.kvstore.client.node_client import MAX_RELEASE_TRIES, NodeClient, NodeSession
from pillion.kvstore.hashing import chain_hashes
from pillion.kvstore.node import pool as pool_module
from pillion.kvstore.node.kv_node import KVNode
from pillion.net.rpc import open_channel
from pillion.v1 import kvnode_pb2, kvnode_pb2_grpc
from pillion.v1.kvnode_pb2 import CommitRun, OpenTicketRequest
from pillion.wire.attach import AttachHello
from tests.support.pools import make_pool

NUM_SLOTS = 20
BLOCK_BYTES = 4096
ROOT = bytes(32)


def hashes(*tokens: int) -> bytes:
    return chain_hashes(ROOT, tokens, 1)


def flags_in(folder: str, **more: object) -> KVNodeFlags:
    flags = {
        "node_listen": f"unix:{folder}/node.sock",
        "attach_socket": f"{folder}/attach.sock",
        "kv_pool_bytes": NUM_SLOTS * BLOCK_BYTES,
        # Its workers do not beat: no silence of theirs means anything, but where a test says so.
        "heartbeat_timeout_ms": 600_000,
    }
    return KVNodeFlags(**(flags | more))  # type: ignore[arg-type]


@dataclass
class NodeHarness:
    node: KVNode
    client: NodeClient
    session: NodeSession
    folder: str

    async def worker(self, role: str = "decode") -> Attachment:
        return await asyncio.to_thread(
            attach,
            f"{self.folder}/attach.sock",
            component_id=role,
            role=role,
            block_bytes=BLOCK_BYTES,
            timeout_s=WITHIN_S,
        )

    async def until_waiting(self, count: int) -> None:
        await until(f"{count} calls to wait", lambda: self.node.pool.status().waiting_tickets == count)

    async def until_released(self) -> None:
        await until("all tickets to be released", lambda: not self.node.pool.ledger.tickets)


@asynccontextmanager
async def running(folder: str, **more: object) -> AsyncIterator[NodeHarness]:
    node = await start_kvnode(flags_in(folder, **more))
    node.pool.waiting.max_waiting = 2
    client = NodeClient(node.address, "gateway-0")
    try:
        cluster = NodeHarness(node, client, await client.open_session(), folder)
        yield cluster
        await client.check_integrity()
        await cluster.session.aclose()
        await cluster.until_released()
        await client.check_integrity()
        books = await client.status()
        assert (books.reserved_blocks, books.waiting_tickets) == (0, 0)
    finally:
        await client.aclose()
        await node.stop(0.1)


@pytest.fixture
async def cluster(short_folder: str) -> AsyncIterator[NodeHarness]:
    async with running(short_folder) as made:
        yield made


@pytest.fixture
def attachments() -> Iterator[list[Attachment]]:
    kept: list[Attachment] = []
    yield kept
    for attachment in kept:
        attachment.close()


async def test_a_prompt_moves_from_prefill_to_decode(cluster: NodeHarness, attachments: list[Attachment]) -> None:
    client, epoch = cluster.client, cluster.session.epoch
    prefill, decode = await cluster.worker("prefill"), await cluster.worker("decode")
    attachments += [prefill, decode]
    chain = hashes(1, 2, 3, 4)
    ticket = await client.open_ticket(epoch, chain, 5)
    assert ticket.pinned_blocks == 0
    adopted = await client.adopt(prefill.epoch, ticket.ticket_id, 3)
    run = CommitRun(ticket_id=ticket.ticket_id, slots=adopted.leased_slots, block_hashes=chain[: 3 * 32])
    [result] = await client.commit(prefill.epoch, [run])
    assert result.slots == adopted.leased_slots
    await client.release(prefill.epoch, [ticket.ticket_id])
    taken = await client.adopt(decode.epoch, ticket.ticket_id, 2)
    assert taken.chain_slots == adopted.leased_slots, "no byte moved"
    assert taken.last_hash == chain[64:96]
    await client.release(epoch, [ticket.ticket_id])
    assert (await client.status()).pinned_blocks == 3, "the decode worker still holds it"
    await client.return_slots(decode.epoch, taken.leased_slots)
    await client.release(decode.epoch, [ticket.ticket_id])
    again = await client.open_ticket(epoch, chain, 5)
    assert again.pinned_blocks == 3


async def test_waiters_are_granted_in_order(cluster: NodeHarness, attachments: list[Attachment]) -> None:
    client, epoch = cluster.client, cluster.session.epoch
    attachments.append(await cluster.worker())
    first = await client.open_ticket(epoch, b"", 15)
    second = asyncio.create_task(client.open_ticket(epoch, b"", 15))
    await cluster.until_waiting(1)
    third = asyncio.create_task(client.open_ticket(epoch, b"", 1))
    await cluster.until_waiting(2)
    with pytest.raises(Overloaded) as caught:
        await client.open_ticket(epoch, b"", 1)
    assert caught.value.retry_after_ms > 0
    assert (await client.heartbeat(attachments[0].epoch)).recall_blocks > 0
    await client.release(epoch, [first.ticket_id])
    assert (await second).ticket_id
    await third
    assert (await client.heartbeat(attachments[0].epoch)).recall_blocks == 0


async def test_a_resumed_stream_is_granted_first(cluster: NodeHarness, attachments: list[Attachment]) -> None:
    client, epoch = cluster.client, cluster.session.epoch
    attachments.append(await cluster.worker())
    first = await client.open_ticket(epoch, b"", 15)
    new = asyncio.create_task(client.open_ticket(epoch, b"", 15))
    await cluster.until_waiting(1)
    resumed = asyncio.create_task(client.open_ticket(epoch, b"", 15, resume=True))
    await cluster.until_waiting(2)
    await client.release(epoch, [first.ticket_id])
    await resumed
    assert not new.done()
    new.cancel()


async def test_a_cancelled_waiter_leaves_the_queue(cluster: NodeHarness, attachments: list[Attachment]) -> None:
    client, epoch = cluster.client, cluster.session.epoch
    attachments.append(await cluster.worker())
    first = await client.open_ticket(epoch, b"", 15)
    waiter = asyncio.create_task(client.open_ticket(epoch, b"", 15))
    await cluster.until_waiting(1)
    waiter.cancel()
    await cluster.until_waiting(0)
    with pytest.raises(DeadlineExceeded):
        await client.open_ticket(epoch, b"", 15, timeout_s=0.2)
    await cluster.until_waiting(0)
    await client.release(epoch, [first.ticket_id])
    await cluster.until_released()


async def test_open_and_adopt_in_one_call(cluster: NodeHarness, attachments: list[Attachment]) -> None:
    client, ledger = cluster.client, cluster.node.pool.ledger
    attachments.append(await cluster.worker())
    epoch = attachments[0].epoch
    with pytest.raises(InvalidRequest, match="only a worker"):
        await client.open_ticket(cluster.session.epoch, b"", 15, adopt=True)
    first = await client.open_ticket(epoch, hashes(1, 2), 15, adopt=True)
    assert (len(first.adopted.leased_slots), first.adopted.chain_slots, ledger.reserved) == (15, [], 0)
    second = asyncio.create_task(client.open_ticket(epoch, hashes(1, 2, 3), 15, adopt=True))
    await cluster.until_waiting(1)
    slots = first.adopted.leased_slots
    await client.commit(epoch, [CommitRun(ticket_id=first.ticket_id, block_hashes=hashes(1, 2), slots=slots[:2])])
    await client.return_slots(epoch, slots[2:])
    await client.release(epoch, [first.ticket_id])
    found = await second
    assert (found.pinned_blocks, list(found.adopted.chain_slots)) == (2, list(slots[:2]))
    assert (len(found.adopted.leased_slots), found.adopted.last_hash) == (13, hashes(1, 2)[-32:])
    # Nothing is opened where less is here than was expected.
    with pytest.raises(NotFound, match="2 of 3 blocks are here"):
        await client.open_ticket(epoch, hashes(1, 2, 3), 5, adopt=True, expected_blocks=3)
    assert (len(ledger.tickets), ledger.reserved, len(ledger.holders[epoch].leased)) == (1, 0, 13)
    # Nothing is reserved for a chain that is only pinned.
    pinned = await client.open_ticket(epoch, hashes(1, 2), 0, adopt=True)
    assert (list(pinned.adopted.chain_slots), pinned.adopted.leased_slots) == (list(slots[:2]), [])
    cluster.node.pool.check_integrity()
    await client.return_slots(epoch, found.adopted.leased_slots)
    await client.release(epoch, [found.ticket_id, pinned.ticket_id])


@pytest.mark.parametrize("adopt", [False, True])
async def test_concurrent_cancel_and_grant_leak_nothing(
    cluster: NodeHarness, attachments: list[Attachment], adopt: bool
) -> None:
    """The caller disconnects at every possible moment around the grant."""
    client = cluster.client
    attachments.append(await cluster.worker())
    epoch, ledger = attachments[0].epoch if adopt else cluster.session.epoch, cluster.node.pool.ledger
    for turns in range(0, 80, 2):
        first = await client.open_ticket(epoch, b"", 15)
        waiter = asyncio.create_task(client.open_ticket(epoch, b"", 15, adopt=adopt))
        await cluster.until_waiting(1)
        release = asyncio.create_task(client.release(epoch, [first.ticket_id]))
        await loop_turns(turns)
        waiter.cancel()
        await asyncio.gather(waiter, release, return_exceptions=True)
        if not waiter.cancelled():
            await client.release(epoch, [waiter.result().ticket_id])
            if adopt:
                await client.return_slots(epoch, waiter.result().adopted.leased_slots)
        await cluster.until_released()
        assert not ledger.holders[epoch].leased
        assert cluster.node.pool.status().waiting_tickets == 0
        cluster.node.pool.check_integrity()


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("first", ["granted", "cancelled"])
async def test_a_cancel_that_races_its_grant_leaks_nothing(first: str, adopt: bool) -> None:
    """Both orders, before the waiting task has run."""
    pool = make_pool(20, max_waiting=9)
    worker, _ = pool.attach(AttachHello(component_id="w", role="decode", block_bytes=1))
    epoch = worker if adopt else pool.open_session("g")
    ticket = await pool.open_ticket(OpenTicketRequest(epoch=epoch, nonce=1, total_blocks=15))
    request = OpenTicketRequest(epoch=epoch, nonce=2, total_blocks=15, adopt=adopt)
    waiter = asyncio.create_task(pool.open_ticket(request))
    after = asyncio.create_task(pool.open_ticket(OpenTicketRequest(epoch=epoch, nonce=3, total_blocks=14)))
    await loop_turns(1)
    assert pool.status().waiting_tickets == 2
    if first == "granted":
        pool.release(epoch, [ticket.ticket_id], [])
    waiter.cancel()
    if first == "cancelled":
        pool.release(epoch, [ticket.ticket_id], [])
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert pool.ledger.tickets.keys() == {(await after).ticket_id}, "the next in line got the place"
    assert not pool.ledger.holders[epoch].leased
    pool.check_integrity()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_lost_reply_leaves_no_ticket(
    cluster: NodeHarness, attachments: list[Attachment], monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The first release also fails, as in a partitioned network."""
    attachments.append(await cluster.worker())
    make_stub: Any = kvnode_pb2_grpc.KVNodeStub
    released: list[object] = []

    def losing_stub(channel: grpc.aio.Channel) -> Any:
        stub = make_stub(channel)
        real = stub.OpenTicket

        async def losing(*args: object, **kwargs: object) -> None:
            await real(*args, **kwargs)
            assert cluster.node.pool.ledger.tickets
            raise asyncio.CancelledError

        release = stub.ReleaseTicket

        async def late(request: object, **kwargs: object) -> object:
            released.append(request)
            if len(released) == 1 or not answers:
                raise DeadlineExceeded("nothing came")
            return await release(request, **kwargs)

        stub.OpenTicket, stub.ReleaseTicket = losing, late
        return stub

    monkeypatch.setattr(kvnode_pb2_grpc, "KVNodeStub", losing_stub)
    client, epoch = NodeClient(cluster.node.address, "decode-0"), attachments[0].epoch
    unreleased: list[PillionError] = []
    with pytest.raises(Unavailable):
        await client.open_ticket(epoch, b"", 5, adopt=True, on_unreleased=unreleased.append)
    await client.aclose()
    if not answers:
        assert [type(error) for error in unreleased] == [DeadlineExceeded]
        cluster.node.pool.reattach(epoch)
    await cluster.until_released()
    assert len(cluster.node.pool.ledger.free) == cluster.node.pool.ledger.num_slots
    assert len(released) == (2 if answers else MAX_RELEASE_TRIES)


async def test_a_ticket_with_a_lost_reply_is_freed_by_its_nonce(
    cluster: NodeHarness, attachments: list[Attachment]
) -> None:
    """The reply was lost: only the caller's own nonce is left to free the ticket."""
    attachments.append(await cluster.worker())
    epoch = cluster.session.epoch
    async with open_channel(cluster.node.address) as channel:
        stub = kvnode_pb2_grpc.KVNodeStub(channel)
        request = kvnode_pb2.OpenTicketRequest(epoch=epoch, total_blocks=15, nonce=7)
        await stub.OpenTicket(request)
        with pytest.raises(grpc.aio.AioRpcError, match="nonce"):
            await stub.OpenTicket(request)
        second = stub.OpenTicket(kvnode_pb2.OpenTicketRequest(epoch=epoch, total_blocks=15, nonce=8))
        await cluster.until_waiting(1)
        await stub.ReleaseTicket(kvnode_pb2.ReleaseTicketRequest(epoch=epoch, nonces=[7, 8, 9]))
        with pytest.raises(grpc.aio.AioRpcError, match="no longer waits"):
            await second
    assert not cluster.node.pool.ledger.tickets


async def test_the_end_of_a_session_frees_all_its_tickets(cluster: NodeHarness, attachments: list[Attachment]) -> None:
    client = cluster.client
    worker = await cluster.worker()
    attachments.append(worker)
    other = await client.open_session()
    alone = await client.open_ticket(other.epoch, b"", 5)
    shared = await client.open_ticket(other.epoch, b"", 5)
    await client.adopt(worker.epoch, shared.ticket_id, 2)
    waiter = asyncio.create_task(client.open_ticket(other.epoch, b"", 18))
    await cluster.until_waiting(1)
    await other.aclose()
    with pytest.raises((Cancelled, NotFound)):
        await waiter
    await until("one ticket", lambda: len(cluster.node.pool.ledger.tickets) == 1)
    with pytest.raises(NotFound):
        await client.adopt(worker.epoch, alone.ticket_id, 1)
    with pytest.raises(NotFound):
        await client.open_ticket(other.epoch, b"", 1)
    await client.release(worker.epoch, [shared.ticket_id])
    assert (await client.status()).reserved_blocks == 0


async def test_a_dead_workers_tickets_are_freed(cluster: NodeHarness) -> None:
    client = cluster.client
    worker = await cluster.worker()
    ticket = await client.open_ticket(cluster.session.epoch, hashes(1, 2, 3), 4)
    adopted = await client.adopt(worker.epoch, ticket.ticket_id, 3)
    await client.commit(
        worker.epoch, [CommitRun(ticket_id=ticket.ticket_id, slots=adopted.leased_slots[:1], block_hashes=hashes(1))]
    )
    worker.close()
    await until("no leases", lambda: cluster.node.pool.status().leased_blocks == 0)
    books = await client.status()
    assert (books.pinned_blocks, books.reserved_blocks) == (1, 3), (
        "what it committed stands, the rest is promised again"
    )
    with pytest.raises(NotFound):
        await client.heartbeat(worker.epoch)


async def test_a_silent_worker_is_fenced(short_folder: str, attachments: list[Attachment]) -> None:
    async with running(short_folder, heartbeat_ms=50) as cluster:
        client = cluster.client
        worker = await cluster.worker()
        attachments.append(worker)
        slots = await client.lease(worker.epoch, 3)
        assert not (await client.heartbeat(worker.epoch)).fenced
        # From here on its silence counts.
        cluster.node.pool._timeout_s = 0.2
        await until("the quarantine", lambda: cluster.node.pool.status().quarantined_blocks == 3)
        assert (await client.heartbeat(worker.epoch)).fenced
        with pytest.raises(Conflict, match="fenced"):
            await client.return_slots(worker.epoch, slots)
        assert (await client.status()).quarantined_blocks == 3, "a late heartbeat does not lift a fence"
        worker.close()
        await until("the slots to be free", lambda: cluster.node.pool.status().free_blocks == NUM_SLOTS)


async def test_a_suspended_node_fences_no_worker(cluster: NodeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, now = cluster.node.pool, 1000.0
    pool._timeout_s = 5.0
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: now))
    worker = await cluster.worker()
    pool.judge_silence(0.5)
    pool.heartbeat(worker.epoch)
    now += 3600.0
    pool.judge_silence(0.5)
    assert not pool.heartbeat(worker.epoch).fenced
    for _ in range(12):
        now += 0.5
        pool.judge_silence(0.5)
    assert pool.heartbeat(worker.epoch).fenced
    worker.close()


async def test_invalid_calls_are_rejected(cluster: NodeHarness, attachments: list[Attachment]) -> None:
    client, epoch = cluster.client, cluster.session.epoch
    with pytest.raises(Unavailable, match="no worker has attached"):
        await client.open_ticket(epoch, b"", 1)
    attachments.append(await cluster.worker())
    with pytest.raises(Overloaded, match="21 KV blocks, the pool has 20"):
        await client.open_ticket(epoch, b"", 21)
    with pytest.raises(InvalidRequest):
        await client.open_ticket(epoch, hashes(1, 2), 2)
    with pytest.raises(InvalidRequest):
        await client.open_ticket(epoch, b"short", 2)
    with pytest.raises(InvalidRequest):
        await client.return_slots(attachments[0].epoch, [1])
    with pytest.raises(NotFound):
        await client.lease(12345, 1)
    assert (await client.open_ticket(epoch, b"", 20)).ticket_id, "alone, a prompt may have the whole pool"


async def test_the_nodes_exit_is_noticed(short_folder: str) -> None:
    node = await start_kvnode(flags_in(short_folder))
    client = NodeClient(node.address, "g")
    session = await client.open_session()
    closed = asyncio.create_task(session.closed())
    await loop_turns()
    assert not closed.done()
    await node.stop(0.1)
    await node.stop(0.1)
    async with asyncio.timeout(WITHIN_S):
        await closed
    with pytest.raises(Unavailable):
        await client.status()
    with pytest.raises(Unavailable):
        await client.open_session()
    await client.aclose()


async def test_a_failed_start_leaves_nothing_behind(short_folder: str) -> None:
    with pytest.raises(ConfigError, match="node-id"):
        await start_kvnode(flags_in(short_folder, node_id=""))
    with pytest.raises(ConfigError, match="cannot listen"):
        await start_kvnode(flags_in(short_folder, node_listen="unix:/nonexistent/folder/node.sock"))
    node = await start_kvnode(flags_in(short_folder))
    with pytest.raises(ConfigError):
        await start_kvnode(flags_in(short_folder, node_listen="127.0.0.1:0"))
    client = NodeClient(node.address, "g")
    await client.status()
    await client.aclose()
    await node.stop(0.1)


async def test_a_task_that_dies_is_reported(cluster: NodeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = asyncio.create_task(cluster.node.wait_failed())

    def broken(interval_s: float) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(cluster.node.pool, "judge_silence", broken)
    async with asyncio.timeout(WITHIN_S):
        assert "a defect" in await failed
