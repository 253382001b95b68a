"""This node's side towards its sources: connecting, sessions, pins, releases, and every way in which they fail."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until
from lab.testbed.plane_source import NAMESPACE, SourceProcess, block_of, chain_of, running_source, start_source
from pillion.errors import Conflict, DeadlineExceeded, InvalidRequest, PillionError, Unavailable
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.exchange import peers as peers_module
from pillion.kvstore.exchange.peers import Peer, Peers
from pillion.kvstore.exchange.plane import BlockShape, DataPlane
from pillion.kvstore.exchange.plane_servicer import MAX_PIN_BLOCKS, MAX_READ_SLOTS
from pillion.kvstore.memory.memory import HostMemory
from pillion.kvstore.memory.segment import Segment, map_shared

BLOCK_BYTES = 4096
NUM_SLOTS = 32
CHAIN = b"".join(chain_of(NUM_SLOTS)[0])


@pytest.fixture(scope="module")
def source() -> Iterator[SourceProcess]:
    started = start_source("grpc", num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES)
    yield started
    started.kill()


class Directory:
    """A directory of nodes that counts its look-ups."""

    def __init__(self, **known: str) -> None:
        self.known, self.asked = known, 0

    async def __call__(self) -> Mapping[str, str]:
        self.asked += 1
        return self.known


@contextlib.asynccontextmanager
async def reading(
    directory: Directory, shape: BlockShape | None = None, *, name: str = "reader"
) -> AsyncIterator[tuple[Peers, DataPlane, memoryview]]:
    segment = Segment(NUM_SLOTS * BLOCK_BYTES)
    memory = map_shared(segment.fileno(), NUM_SLOTS * BLOCK_BYTES)
    plane = DataPlane(HostMemory(memory, NUM_SLOTS, BLOCK_BYTES))

    async def own() -> DataPlane:
        return plane

    peers = Peers(name, shape or BlockShape(BLOCK_BYTES, NAMESPACE), directory, own)
    try:
        yield peers, plane, memoryview(memory)
    finally:
        await peers.aclose()
        segment.close()


async def tickets_at(source: SourceProcess) -> int:
    client = NodeClient(source.address, "test")
    try:
        return (await client.status()).tickets
    finally:
        await client.aclose()


async def until_tickets(source: SourceProcess, tickets: int) -> None:
    async def there() -> bool:
        return await tickets_at(source) == tickets

    await until(f"{tickets} tickets at the source", there)


async def test_a_source_node_pins_reads_and_releases(source: SourceProcess) -> None:
    before = await tickets_at(source)
    async with reading(Directory(source=source.address)) as (peers, _, memory):
        node = peers.source("source")
        assert node.node_id == "source"
        pinned = await node.pin(CHAIN, 2, timeout_s=WITHIN_S)
        assert await tickets_at(source) == before + 1
        assert tuple(pinned.slots) == tuple(chain_of(NUM_SLOTS)[1][2:])
        await node.read(pinned.ticket_id, pinned.slots[:3], (7, 5, 6))
        assert bytes(memory[5 * BLOCK_BYTES : 6 * BLOCK_BYTES]) == block_of(1, pinned.slots[1], BLOCK_BYTES)
        node.release(pinned.ticket_id)
        node.release(pinned.ticket_id)
        await until_tickets(source, before)
        with pytest.raises(Unavailable, match="nothing is pinned"):
            await node.read(pinned.ticket_id, pinned.slots[:1], (0,))


async def test_concurrent_callers_share_one_handshake_and_lookup(source: SourceProcess) -> None:
    directory = Directory(source=source.address)
    async with reading(directory) as (peers, _, _):
        met = await asyncio.gather(*(peers.get("source") for _ in range(8)))
        assert len(set(map(id, met))) == 1
        with pytest.raises(Unavailable, match="the registry has no address"):
            await peers.get("stranger")
        assert directory.asked == 1


async def test_an_emptied_directory_is_not_trusted(source: SourceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "ADDRESSES_TTL_S", 0.0)
    directory = Directory(source=source.address, reader="unix:me")
    async with reading(directory) as (peers, _, _):
        await peers.get("source")
        directory.known = {}
        peers.drop("source")
        assert (await peers.get("source")).alive, "a list without the asker itself is no list of those who live"
        directory.known = {"reader": "unix:me"}
        peers.drop("source")
        with pytest.raises(Unavailable, match="the registry has no address"):
            await peers.get("source")


@pytest.mark.parametrize(
    "shape", [BlockShape(BLOCK_BYTES * 2, NAMESPACE), BlockShape(BLOCK_BYTES, b"o" * 32)], ids=["block", "namespace"]
)
async def test_pools_that_do_not_fit_are_a_conflict(source: SourceProcess, shape: BlockShape) -> None:
    async with reading(Directory(source=source.address), shape) as (peers, _, _):
        with pytest.raises(Conflict):
            await peers.get("source")


async def test_an_address_of_another_node_is_rejected(source: SourceProcess) -> None:
    async with reading(Directory(other=source.address)) as (peers, _, _):
        with pytest.raises(Unavailable, match="not other"):
            await peers.get("other")


async def test_a_node_never_fetches_from_itself(source: SourceProcess) -> None:
    async with reading(Directory(source=source.address), name="source") as (peers, _, _):
        with pytest.raises(Unavailable):
            peers.source("source")
        with pytest.raises(Unavailable):
            await peers.get("source")


async def test_a_cancelled_pin_leaves_nothing_pinned(source: SourceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    before = await tickets_at(source)
    released: list[int] = []
    release = NodeClient.release

    async def counted(
        client: NodeClient, epoch: int, ticket_ids: Sequence[int] = (), *, nonces: Sequence[int] = ()
    ) -> None:
        await release(client, epoch, ticket_ids, nonces=nonces)
        released.extend(nonces)

    monkeypatch.setattr(NodeClient, "release", counted)
    async with reading(Directory(source=source.address)) as (peers, _, _):
        peer = await peers.get("source")
        source.signal(signal.SIGSTOP)
        try:
            pinning = asyncio.create_task(peer.pin(CHAIN, 0, WITHIN_S))
            await loop_turns()
            pinning.cancel()
            await asyncio.wait([pinning])
            with pytest.raises(DeadlineExceeded):
                await peer.pin(CHAIN, 0, 0.1)
        finally:
            source.signal(signal.SIGCONT)
        # The woken source made one of the two pins before it heard of the cancellation.
        await until("both pins to be released", lambda: len(released) == 2)
        await until_tickets(source, before)
        assert peer.alive


async def test_an_unresponsive_node_is_backed_off(source: SourceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "AVOID_S", 10 * WITHIN_S)
    async with reading(Directory(source=source.address)) as (peers, _, _):
        node = peers.source("source")
        await node.pin(CHAIN, 0, timeout_s=WITHIN_S)
        source.signal(signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded):
                await node.pin(CHAIN, 0, timeout_s=0.05)
            peers.source("source")
            with pytest.raises(DeadlineExceeded):
                await node.pin(CHAIN, 0, timeout_s=0.25)
            with pytest.raises(Unavailable, match="a moment ago"):
                peers.source("source")
        finally:
            source.signal(signal.SIGCONT)
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + peers_module.AVOID_S)
        await peers.source("source").pin(CHAIN, 0, timeout_s=WITHIN_S)


async def test_a_dead_source_is_dropped() -> None:
    with running_source("grpc", num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES) as mortal:
        async with reading(Directory(source=mortal.address)) as (peers, plane, _):
            forgotten: list[str] = []
            plane.forget = forgotten.append  # type: ignore[method-assign]
            node = peers.source("source")
            pinned = await node.pin(CHAIN, 0, timeout_s=WITHIN_S)
            await node.read(pinned.ticket_id, pinned.slots[:1], (0,))
            peer = await peers.get("source")
            mortal.kill()
            await until("the session's end", lambda: not peer.alive)
            with pytest.raises(Unavailable):
                await node.read(pinned.ticket_id, pinned.slots[:1], (0,))
            node.release(pinned.ticket_id)
            with pytest.raises(Unavailable):
                await peers.get("source", 0.5)
            assert forgotten == ["source"]


async def test_peers_are_bounded_and_idle_ones_are_closed(
    source: SourceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running_source("grpc", node_id="two", num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES) as two,
        running_source("grpc", node_id="three", num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES) as three,
    ):
        directory = Directory(source=source.address, two=two.address, three=three.address)
        async with reading(directory) as (peers, _, _):
            monkeypatch.setattr(peers_module, "MAX_PEERS", 2)
            first = await peers.get("source")
            second = await peers.get("two")
            await peers.get("source")
            third = await peers.get("three")
            await until("the oldest to be closed", lambda: not second.alive)
            assert first.alive
            monkeypatch.setattr(peers_module, "MAX_PEERS", 9)
            monkeypatch.setattr(peers_module, "PEER_IDLE_S", 0.0)
            await peers.get("two")
            await until("idle ones to be closed", lambda: not first.alive and not third.alive)


async def test_requests_that_are_too_large_are_rejected(source: SourceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reading(Directory(source=source.address)) as (peers, _, _):
        peer = await peers.get("source")
        pinned = await peer.pin(CHAIN, 0, WITHIN_S)
        count = MAX_READ_SLOTS + 1
        targets = [memoryview(bytearray(BLOCK_BYTES))] * count
        # The reader's own side cuts longer lists; without that the source refuses them.
        await peer.read_blocks(pinned.ticket_id, pinned.slots[:1] * count, targets)
        monkeypatch.setattr(peers_module, "MAX_READ_SLOTS", 2 * count)
        with pytest.raises(InvalidRequest, match="at most"):
            await peer.read_blocks(pinned.ticket_id, pinned.slots[:1] * count, targets)
        with pytest.raises(InvalidRequest, match="at most"):
            await peer.pin(bytes(32 * (MAX_PIN_BLOCKS + 1)), 0, WITHIN_S)
        with pytest.raises(InvalidRequest, match="after the end"):
            await peer.pin(CHAIN, NUM_SLOTS + 1, WITHIN_S)
        with pytest.raises(InvalidRequest):
            await peer.pin(CHAIN[:-1], 0, WITHIN_S)


async def test_a_stream_of_wrong_length_is_unavailable(source: SourceProcess) -> None:
    async with reading(Directory(source=source.address)) as (peers, _, _):
        peer = await peers.get("source")
        pinned = await peer.pin(CHAIN, 0, WITHIN_S)
        for wrong in (BLOCK_BYTES * 2, BLOCK_BYTES // 2):
            with pytest.raises(Unavailable, match="sent"):
                await peer.read_blocks(pinned.ticket_id, pinned.slots[:1], [memoryview(bytearray(wrong))])


async def test_calls_to_a_closed_peer_raise(source: SourceProcess) -> None:
    async with reading(Directory(source=source.address)) as (peers, _, _):
        peer: Peer = await peers.get("source")
        await peers.aclose()
        await peers.aclose()
        assert not peer.alive
        with pytest.raises(PillionError):
            await peer.pin(CHAIN, 0, 1.0)
        with pytest.raises(PillionError):
            await peer.read_blocks(1, (0,), [memoryview(bytearray(BLOCK_BYTES))])
        with pytest.raises(Unavailable):
            await peers.get("source")
