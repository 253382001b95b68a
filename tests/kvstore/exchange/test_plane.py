"""One suite for every data plane, against real sources in their own processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until
from lab.testbed.plane_source import NAMESPACE, SourceProcess, block_of, chain_of, running_source, start_source
from pillion.errors import ConfigError, Conflict, InvalidRequest, NotFound, Unavailable
from pillion.kvstore.exchange import peers, plane
from pillion.kvstore.exchange.exchanged_pool import choose_transport
from pillion.kvstore.exchange.peers import Peer, Peers
from pillion.kvstore.exchange.plane import BlockShape, DataPlane
from pillion.kvstore.memory.memory import HostMemory, block_checksum
from pillion.kvstore.memory.segment import Segment, map_shared
from pillion.kvstore.transfer.nixl import nixl_plane
from pillion.kvstore.transfer.nixl.nixl_agent import why_nixl_unusable
from pillion.kvstore.transfer.nixl.nixl_plane import NixlPlane
from pillion.v1.kvplane_pb2 import PinBlocksReply

BLOCK_BYTES = 65536
NUM_SLOTS = 64
# What reader and source have. The last one finds no one-sided path, and streams.
SOURCES = {"grpc": "grpc", "nixl": "nixl", "nixl-tcp": "nixl"}
# How long a read waits for a source that says nothing: a sound one on a loaded machine, and one that was stopped.
PATIENT_S, HASTY_S = 30.0, 0.5
# Real seconds in which a late write would show: it comes from another process, or a thread of a library's.
QUIET_S = 0.5


class Reader:
    """A node's reading side: pool, plane, peers."""

    def __init__(self, transport: str, num_slots: int, block_bytes: int, addresses: dict[str, str]) -> None:
        self.segment = Segment(num_slots * block_bytes)
        self.memory = map_shared(self.segment.fileno(), num_slots * block_bytes)
        self.pool = HostMemory(self.memory, num_slots, block_bytes)
        self.num_slots, self.block_bytes = num_slots, block_bytes
        self.plane: DataPlane
        if transport != "grpc":
            self.plane = NixlPlane(self.pool, stall_timeout_s=PATIENT_S)
        else:
            self.plane = DataPlane(self.pool)
        self.addresses = addresses

        async def directory() -> dict[str, str]:
            return addresses

        async def plane() -> DataPlane:
            return self.plane

        self.peers = Peers("reader", BlockShape(block_bytes, NAMESPACE), directory, plane)

    def block(self, slot: int) -> bytes:
        return bytes(self.memory[slot * self.block_bytes : (slot + 1) * self.block_bytes])

    async def pin(self, count: int, first_block: int = 0, node_id: str = "source") -> tuple[Peer, PinBlocksReply]:
        peer = await self.peers.get(node_id)
        hashes, _ = chain_of(self.num_slots)
        return peer, await peer.pin(b"".join(hashes[:count]), first_block, WITHIN_S)

    async def aclose(self) -> None:
        await self.peers.aclose()
        self.plane.close()
        self.segment.close()


# Where there is no one-sided path, one test of `make test` shows that blocks come nevertheless.
@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.long if kind == "nixl-tcp" else ()) for kind in SOURCES])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the reader's transport. Skips NIXL if it is not installed."""
    kind: str = request.param
    if kind != "grpc" and (trouble := why_nixl_unusable()):
        pytest.skip(trouble)
    if kind == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(peers, "STREAM_STALL_S", PATIENT_S)
    monkeypatch.setattr(peers, "ADDRESSES_TTL_S", 0.0)
    return kind


@pytest.fixture(scope="module")
def lasting() -> Iterator[dict[str, SourceProcess]]:
    """Sources by kind, for tests that do not damage them."""
    started: dict[str, SourceProcess] = {}
    yield started
    for source in started.values():
        source.kill()


@pytest.fixture
async def reader(transport: str, lasting: dict[str, SourceProcess]) -> AsyncIterator[Reader]:
    if transport not in lasting:
        lasting[transport] = start_source(SOURCES[transport], num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES)
    async with reading(transport, lasting[transport]) as made:
        yield made


@pytest.fixture
def mortal(transport: str) -> Iterator[SourceProcess]:
    with running_source(SOURCES[transport], num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES) as started:
        yield started


@contextlib.asynccontextmanager
async def reading(
    transport: str, source: SourceProcess, num_slots: int = NUM_SLOTS, block_bytes: int = BLOCK_BYTES
) -> AsyncIterator[Reader]:
    made = Reader(transport, num_slots, block_bytes, {source.node_id: source.address})
    try:
        yield made
    finally:
        await made.aclose()


@pytest.mark.parametrize("transport", list(SOURCES), indirect=True)
async def test_many_blocks_are_read_at_once_in_any_slot_order(reader: Reader) -> None:
    peer, pinned = await reader.pin(NUM_SLOTS, first_block=3)
    local = tuple(reversed(range(1, NUM_SLOTS - 2)))
    await peer.read(reader.plane, pinned.ticket_id, pinned.slots, local)
    assert tuple(pinned.slots) == tuple(chain_of(NUM_SLOTS)[1][3:])
    for theirs, own, checksum in zip(pinned.slots, local, pinned.checksums, strict=True):
        assert reader.block(own) == block_of(1, theirs, BLOCK_BYTES)
        assert block_checksum(reader.block(own)) == checksum
    for untouched in (0, NUM_SLOTS - 2, NUM_SLOTS - 1):
        assert not any(reader.block(untouched))


async def test_several_reads_at_once_do_not_disturb_each_other(reader: Reader) -> None:
    peer, pinned = await reader.pin(NUM_SLOTS)
    shares = [(pinned.slots[k::8], tuple(range(k * 8, k * 8 + 8))) for k in range(8)]
    await asyncio.gather(*(peer.read(reader.plane, pinned.ticket_id, theirs, own) for theirs, own in shares))
    for theirs, own in shares:
        assert [reader.block(slot) for slot in own] == [block_of(1, slot, BLOCK_BYTES) for slot in theirs]


async def test_two_sources_at_once(reader: Reader, transport: str) -> None:
    kind = SOURCES[transport]
    with running_source(kind, node_id="other", boot=9, num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES) as other:
        reader.addresses["other"] = other.address
        (one, first), (two, second) = await reader.pin(20), await reader.pin(20, node_id="other")
        await asyncio.gather(
            one.read(reader.plane, first.ticket_id, first.slots, tuple(range(20))),
            two.read(reader.plane, second.ticket_id, second.slots, tuple(range(20, 40))),
        )
    assert [reader.block(own) for own in range(20)] == [block_of(1, slot, BLOCK_BYTES) for slot in first.slots]
    assert [reader.block(own) for own in range(20, 40)] == [block_of(9, slot, BLOCK_BYTES) for slot in second.slots]


async def test_a_flipped_bit_is_found_by_the_checksum(transport: str) -> None:
    flipped, kind = chain_of(NUM_SLOTS)[1][2], SOURCES[transport]
    with running_source(kind, num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES, flipped_slot=flipped) as source:
        async with reading(transport, source) as reader:
            peer, pinned = await reader.pin(4)
            await peer.read(reader.plane, pinned.ticket_id, pinned.slots, (0, 1, 2, 3))
            fits = [block_checksum(reader.block(own)) == pinned.checksums[own] for own in range(4)]
    assert fits == [True, True, False, True]


async def test_a_cancelled_read_writes_to_no_slot_later(reader: Reader) -> None:
    peer, pinned = await reader.pin(NUM_SLOTS)
    read = asyncio.create_task(peer.read(reader.plane, pinned.ticket_id, pinned.slots, tuple(range(NUM_SLOTS))))
    await loop_turns(5)
    read.cancel()
    await asyncio.wait([read])
    await stays_quiet(reader)


async def test_a_source_that_is_killed_while_it_is_read(transport: str, mortal: SourceProcess) -> None:
    """Stopped first, so that the read is certainly in progress; shared memory is read anyway, or it is gone."""
    async with reading(transport, mortal) as reader:
        peer, pinned = await reader.pin(NUM_SLOTS)
        await peer.read(reader.plane, pinned.ticket_id, pinned.slots[:1], (0,))
        mortal.signal(signal.SIGSTOP)
        read = asyncio.create_task(peer.read(reader.plane, pinned.ticket_id, pinned.slots, tuple(range(NUM_SLOTS))))
        await loop_turns()
        mortal.kill()
        await _over_and_quiet(reader, read, pinned)
        with pytest.raises(Unavailable):
            await peer.read(reader.plane, pinned.ticket_id, pinned.slots, tuple(range(NUM_SLOTS)))


async def test_a_source_killed_after_a_partial_read(transport: str) -> None:
    num_slots, block_bytes = 256, 2**18
    with running_source(SOURCES[transport], num_slots=num_slots, block_bytes=block_bytes) as source:
        async with reading(transport, source, num_slots, block_bytes) as reader:
            peer, pinned = await reader.pin(num_slots)
            read = asyncio.create_task(peer.read(reader.plane, pinned.ticket_id, pinned.slots, tuple(range(num_slots))))
            # Without a pause between two looks: all of it comes within some milliseconds.
            while not reader.memory[0] and not read.done():
                await loop_turns(1)
            source.kill()
            await _over_and_quiet(reader, read, pinned)


async def test_a_source_that_is_stopped_while_it_is_read(
    transport: str, mortal: SourceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that a stopped source sends when it continues must not reach slots that may have another owner by then."""
    async with reading(transport, mortal) as reader:
        peer, pinned = await reader.pin(NUM_SLOTS)
        await peer.read(reader.plane, pinned.ticket_id, pinned.slots[:1], (0,))
        mortal.signal(signal.SIGSTOP)
        monkeypatch.setattr(peers, "STREAM_STALL_S", HASTY_S)
        read = asyncio.create_task(peer.read(reader.plane, pinned.ticket_id, pinned.slots, tuple(range(NUM_SLOTS))))
        await asyncio.wait([read], timeout=WITHIN_S)
        assert read.done(), "a read ends by itself"
        assert read.exception() is None or isinstance(read.exception(), Unavailable)
        reader.memory[BLOCK_BYTES:] = bytes(len(reader.memory) - BLOCK_BYTES)
        mortal.signal(signal.SIGCONT)
        monkeypatch.setattr(peers, "STREAM_STALL_S", PATIENT_S)
        await stays_quiet(reader)
        assert not any(reader.memory[BLOCK_BYTES:])
        await peer.read(reader.plane, pinned.ticket_id, pinned.slots, tuple(range(NUM_SLOTS)))
        assert reader.block(5) == block_of(1, pinned.slots[5], BLOCK_BYTES)


async def test_a_source_that_restarted_under_its_name(transport: str, mortal: SourceProcess) -> None:
    async with reading(transport, mortal) as reader:
        peer, pinned = await reader.pin(8)
        await peer.read(reader.plane, pinned.ticket_id, pinned.slots, tuple(range(8)))
        mortal.kill()
        kind = SOURCES[transport]
        with running_source(kind, boot=2, num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES) as again:
            reader.addresses["source"] = again.address
            await until("the session's end", lambda: not peer.alive)
            peer, pinned = await reader.pin(8)
            assert peer.pool.boot_epoch == 2
            await peer.read(reader.plane, pinned.ticket_id, pinned.slots, tuple(range(8)))
        assert [reader.block(own) for own in range(8)] == [block_of(2, slot, BLOCK_BYTES) for slot in pinned.slots]


async def test_mismatched_lists_are_rejected_before_a_transfer(reader: Reader) -> None:
    peer, pinned = await reader.pin(4)
    wrong = [
        (pinned.slots, (0, 1, 2)),
        (pinned.slots, (0, 1, 2, 2)),
        (pinned.slots, (0, 1, 2, NUM_SLOTS)),
        ((*pinned.slots[:3], NUM_SLOTS), (0, 1, 2, 3)),
    ]
    for remote, local in wrong:
        with pytest.raises(Conflict):
            await peer.read(reader.plane, pinned.ticket_id, remote, local)
    assert not any(reader.memory[: 4 * BLOCK_BYTES])


async def test_a_read_beyond_the_bound_is_rejected(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, pinned = await reader.pin(4)
    for module in (nixl_plane, plane):
        monkeypatch.setattr(module, "MAX_READS", 0)
    with pytest.raises(Unavailable, match="in progress"):
        await peer.read(reader.plane, pinned.ticket_id, pinned.slots, (0, 1, 2, 3))


async def test_the_stream_sends_only_pinned_blocks(reader: Reader) -> None:
    peer, pinned = await reader.pin(4)
    outside = chain_of(NUM_SLOTS)[1][4]
    target = [memoryview(bytearray(BLOCK_BYTES))]
    with pytest.raises(InvalidRequest, match="not in the chain of ticket"):
        await peer.read_blocks(pinned.ticket_id, (outside,), target)
    with pytest.raises(NotFound):
        await peer.read_blocks(pinned.ticket_id + 99, pinned.slots[:1], target)
    assert not any(target[0])


def test_auto_chooses_the_best_transport(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO")
    assert choose_transport("grpc") == "grpc"
    trouble = why_nixl_unusable()
    assert choose_transport("auto") == ("grpc" if trouble else "nixl")
    assert len([record for record in caplog.records if record.name == "pillion.kvnode"]) == 2
    monkeypatch.setattr("pillion.kvstore.exchange.exchanged_pool.why_nixl_unusable", lambda: "nixl does not import")
    assert choose_transport("auto") == "grpc"
    assert "nixl does not import" in caplog.text
    with pytest.raises(ConfigError, match="does not import"):
        choose_transport("nixl")


def test_a_pool_that_is_too_small_is_rejected() -> None:
    segment = Segment(4096)
    memory = map_shared(segment.fileno(), 4096)
    with pytest.raises(ConfigError, match="fit"):
        HostMemory(memory, 2, 4096)
    segment.close()


def test_checksums_are_never_zero_and_differ_by_a_bit() -> None:
    block = bytearray(4096)
    clean = block_checksum(bytes(block))
    block[2048] ^= 1
    assert 0 not in (clean, block_checksum(block), block_checksum(b""))
    assert clean != block_checksum(memoryview(block))


async def _over_and_quiet(reader: Reader, read: asyncio.Task[None], pinned: PinBlocksReply) -> None:
    """The read ends, either with all bytes, correctly, or with Unavailable. Nobody writes afterwards."""
    await asyncio.wait([read], timeout=WITHIN_S)
    assert read.done(), "a read ends by itself"
    if read.exception() is None:
        wanted = [block_of(1, slot, reader.block_bytes) for slot in pinned.slots]
        assert [reader.block(own) for own in range(len(wanted))] == wanted
    else:
        assert isinstance(read.exception(), Unavailable)
    await stays_quiet(reader)


async def stays_quiet(reader: Reader) -> None:
    """Assert that the reader's memory does not change during QUIET_S."""
    before = bytes(reader.memory)
    await asyncio.sleep(QUIET_S)
    assert bytes(reader.memory) == before
