"""ReadBlocks at the source: its cost grows with the number of blocks, and it sends nothing that was released."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from lab.testbed.redis import RedisServer
from pillion.errors import InvalidRequest, NotFound
from pillion.kvstore.exchange.plane_servicer import MAX_PIECE_BYTES, KVPlaneServicer
from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.tree import BlockTree
from pillion.kvstore.memory import memory as memory_module
from pillion.kvstore.memory.memory import HostMemory
from pillion.v1.kvnode_pb2 import CommitRun
from pillion.v1.kvplane_pb2 import BlockPiece, ReadBlocksRequest
from pillion.wire.attach import AttachHello
from tests.support.kv_hosts import hosts, prompt
from tests.support.pools import make_pool

BLOCK_BYTES = 1536
NUM_SLOTS = 5000
LENGTHS = (1000, 4000)


class SourceOfOneChain:
    """A real pool with one chain, pinned by a session; every slot's bytes are its number."""

    def __init__(self) -> None:
        self.pool = make_pool(NUM_SLOTS * BLOCK_BYTES)
        self.memory = HostMemory(bytearray(NUM_SLOTS * BLOCK_BYTES), NUM_SLOTS, BLOCK_BYTES)
        for slot in range(NUM_SLOTS):
            self.memory.block(slot)[:] = slot.to_bytes(4, "little") * (BLOCK_BYTES // 4)
        worker, _ = self.pool.attach(AttachHello(component_id="w", role="decode", block_bytes=BLOCK_BYTES))
        self.epoch = self.pool.open_session("reader")
        self.packed = chain_hashes(bytes(32), range(max(LENGTHS)), 1)
        ledger = self.pool.ledger
        ticket = ledger.pin_chain(self.epoch, 1, ())
        slots = ledger.adopt(worker, ticket.ticket_id, max(LENGTHS)).leased_slots
        run = CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=self.packed)
        assert not ledger.commit(worker, [run])[0].refusal
        self.ticket_id, self.slots = ticket.ticket_id, tuple(slots)

    async def pin(self, blocks: int) -> int:
        """Pin the chain's first blocks for the reader; return the ticket."""
        ticket_id, chain = await self.pool.pin_chain(self.epoch, blocks, split_hashes(self.packed)[:blocks], 0)
        assert len(chain) == blocks
        return ticket_id

    def pinned_slots(self, epoch: int, ticket_id: int) -> frozenset[int]:
        return self.pool.pinned_slots(epoch, ticket_id)

    def read(self, ticket_id: int, slots: tuple[int, ...], max_piece_bytes: int = 2**20) -> AsyncIterator[BlockPiece]:
        servicer = KVPlaneServicer(lambda: cast(Any, self))
        request = ReadBlocksRequest(epoch=self.epoch, ticket_id=ticket_id, slots=slots, max_piece_bytes=max_piece_bytes)
        return servicer.ReadBlocks(request, cast(Any, None))


async def test_the_cost_of_a_read_is_linear_in_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    source, walked = SourceOfOneChain(), list[int]()
    walk = BlockTree.chain

    def counted(tree: BlockTree, last_block: Any) -> list[Any]:
        walked.append(last_block.depth + 1)
        return walk(tree, last_block)

    tickets = [await source.pin(blocks) for blocks in LENGTHS]
    monkeypatch.setattr(BlockTree, "chain", counted)
    for ticket_id, blocks in zip(tickets, LENGTHS, strict=True):
        walked.clear()
        # The reader asks for one batch after the other, as a fetch does.
        for first in range(0, blocks, 500):
            part = source.slots[first : first + 500]
            pieces = [piece.data async for piece in source.read(ticket_id, part)]
            assert b"".join(pieces) == b"".join(bytes(source.memory.block(slot)) for slot in part)
            assert len(pieces) == -(-500 * BLOCK_BYTES // MAX_PIECE_BYTES)
        assert sum(walked) == blocks
    source.pool.check_integrity()


async def test_bytes_are_copied_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    source, threads = SourceOfOneChain(), set[threading.Thread]()
    joined = memory_module.cut_pieces
    monkeypatch.setattr(
        memory_module, "cut_pieces", lambda *words: threads.add(threading.current_thread()) or joined(*words)
    )
    assert [piece async for piece in source.read(source.ticket_id, source.slots)]
    assert threads
    assert threading.main_thread() not in threads


async def test_blocks_released_during_a_read_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot may hold another block by then; with or without checksums, none of its bytes are sent."""
    source = SourceOfOneChain()
    joined = memory_module.cut_pieces

    def overwritten(*words: Any) -> list[bytes]:
        for slot in source.slots:
            source.memory.block(slot)[:] = bytes(BLOCK_BYTES)
        return joined(*words)

    reading = source.read(source.ticket_id, source.slots)
    first = await anext(reading)
    source.pool.release(source.epoch, [source.ticket_id], [])
    monkeypatch.setattr(memory_module, "cut_pieces", overwritten)
    sent = [first.data]

    async def read_on() -> None:
        async for piece in reading:
            sent.append(piece.data)

    with pytest.raises(NotFound):
        await read_on()
    known = b"".join(slot.to_bytes(4, "little") * (BLOCK_BYTES // 4) for slot in source.slots)
    assert known.startswith(b"".join(sent))


async def test_an_older_reader_gets_one_block_per_message() -> None:
    source = SourceOfOneChain()
    pieces = [piece.data async for piece in source.read(source.ticket_id, source.slots[:9], max_piece_bytes=0)]
    assert pieces == [bytes(source.memory.block(slot)) for slot in source.slots[:9]]


async def test_slots_outside_the_chain_or_the_pool_are_rejected() -> None:
    source = SourceOfOneChain()
    for outside in (NUM_SLOTS - 1, NUM_SLOTS, 2**31):
        with pytest.raises(InvalidRequest, match="not in the chain of ticket"):
            await anext(source.read(source.ticket_id, (source.slots[0], outside)))


async def test_blocks_arrive_whole_wherever_messages_cut_them(
    short_folder: str, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that end in the middle of a block, between two real nodes."""
    monkeypatch.setattr("pillion.kvstore.exchange.peers.MAX_PIECE_BYTES", 5000)
    async with hosts(short_folder, redis, "a", "b", kv_transport="grpc") as (a, b):
        hashes = prompt(*range(20))
        await a.serve(hashes)
        assert (await b.serve(hashes, "a")).fetched_blocks == 20
        await b.idle()
        await b.check()
