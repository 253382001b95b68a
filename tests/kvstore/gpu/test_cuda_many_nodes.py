"""Nodes with pools on GPUs: blocks move to pinned memory and disk and back, and from node to node.

Every block's bytes are derived from its hash, so whoever pins a chain can check its content.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from lab.testbed import fake_cuda
from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.fake_cuda import NATIVE, DeviceBytes
from lab.testbed.redis import RedisServer
from pillion.errors import ConfigError, Unavailable
from pillion.kvstore.gpu import cuda_driver, cuda_memory
from pillion.kvstore.gpu.cuda_driver import CudaDriver
from pillion.kvstore.gpu.cuda_memory import STAGES, CudaMemory
from pillion.kvstore.gpu.cuda_segment import DeviceSegment
from pillion.kvstore.hashing import split_hashes
from pillion.kvstore.memory.memory import HostMemory, address_of, block_checksum
from pillion.kvstore.memory.shards import Shards
from pillion.kvstore.tiers import storage
from pillion.kvstore.tiers.host_tier import HostTier
from pillion.v1 import kvplane_pb2_grpc
from pillion.v1.kvnode_pb2 import NodeStatus, PrefetchReply
from pillion.v1.kvplane_pb2 import MeetRequest
from pillion.wire.common import hello_to_pb
from tests.support.kv_hosts import BLOCK_BYTES, EAGER, NAMESPACE, NUM_SLOTS, KVHost, content, hosts, prompt

CUDA: dict[str, Any] = {"kv_device": "cuda", "kv_transport": "grpc"}
HOST_BLOCKS = 16


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", fake_cuda.library())
    # Several batches for what would be one, and callers that wait for each other.
    monkeypatch.setattr(cuda_memory, "STAGE_BYTES", 3 * BLOCK_BYTES)


def spilled(status: NodeStatus) -> bool:
    """Return whether all blocks that the watermarks want out of the pool are in a lower tier."""
    return status.free_blocks >= NUM_SLOTS * 0.8 and status.host_blocks + status.disk_blocks >= status.spilled_blocks


class WatchedTier(HostTier):
    """Records where its memory is, and whether it was closed."""

    def __init__(self, memory: memoryview, block_bytes: int, release: Callable[[], None]) -> None:
        super().__init__(memory, block_bytes, release)
        self.all_bytes, self.address, self.closed = memory.nbytes, address_of(memory), False

    def holds(self, payload: memoryview) -> bool:
        return self.address <= address_of(payload) < self.address + self.all_bytes

    async def close(self) -> None:
        self.closed = True
        await super().close()


@pytest.fixture(autouse=True)
def tiers(monkeypatch: pytest.MonkeyPatch) -> list[WatchedTier]:
    """The host memory tiers of the test's nodes."""
    made: list[WatchedTier] = []

    def make(*arguments: Any, **options: Any) -> WatchedTier:
        made.append(WatchedTier(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(storage, "HostTier", make)
    return made


async def settled(tiers: list[WatchedTier]) -> None:
    """Every buffer of the used host memory is returned, and in exactly one state."""
    for tier in tiers:
        if not tier.closed:
            await until("all buffers to be back", lambda tier=tier: tier.room_bytes() == tier.all_bytes)  # type: ignore[misc]
            tier.check_integrity()


async def checked(*nodes: KVHost) -> None:
    for host in nodes:
        await host.idle()
        await host.check()


async def test_evicted_blocks_return_from_host_memory(
    short_folder: str, redis: RedisServer, tiers: list[WatchedTier]
) -> None:
    flags = {**CUDA, **EAGER, "host_bytes": 64 * BLOCK_BYTES}
    async with hosts(short_folder, redis, "a", **flags) as (a,):
        hashes = prompt(*range(20))
        await a.serve(hashes)
        status = await a.until(spilled)
        assert status.host_blocks == status.spilled_blocks > 0
        assert status.disk_blocks == 0
        brought = await a.serve(hashes)
        assert brought.blocks == 20
        assert brought.restored_blocks > 0
        await checked(a)
        await settled(tiers)


async def test_spilling_to_host_memory_copies_only_once(
    short_folder: str, redis: RedisServer, tiers: list[WatchedTier]
) -> None:
    """The spiller's copies are where the tier stores them."""
    async with hosts(short_folder, redis, "a", **CUDA, **EAGER, host_bytes=64 * BLOCK_BYTES) as (a,):
        tier = (await until("the tier in host memory", lambda: tiers))[0]
        kept: list[bool] = []
        original = tier.store

        async def watched(blocks: Any) -> Any:
            kept.extend(tier.holds(payload) for _, payload in blocks)
            return await original(blocks)

        tier.store = watched  # type: ignore[method-assign]
        await a.serve(prompt(*range(20)))
        await a.until(spilled)
        assert kept
        assert all(kept)


async def test_blocks_spill_to_host_memory_first_and_then_to_disk(
    short_folder: str, redis: RedisServer, tiers: list[WatchedTier]
) -> None:
    flags = {**CUDA, **EAGER, "host_bytes": HOST_BLOCKS * BLOCK_BYTES, "disk_path": f"{short_folder}/disk"}
    async with hosts(short_folder, redis, "a", **flags) as (a,):
        chains = [prompt(*range(first, first + 20)) for first in (0, 100, 200)]
        for chain in chains:
            await a.serve(chain)
            await a.until(spilled)
        status = await a.client.status()
        assert status.host_blocks <= HOST_BLOCKS < status.disk_blocks
        for chain in chains:
            assert (await a.serve(chain)).blocks == 20
            await a.nothing_moves()
        await checked(a)
        await settled(tiers)
        await a.stop()
        await a.start()
        # KVHost memory is gone with the process, the disk is not.
        await a.until(lambda status: status.disk_blocks > 0)
        assert (await a.serve(chains[0])).restored_blocks > 0
        await checked(a)


async def test_a_block_corrupted_in_host_memory_is_recomputed(
    short_folder: str, redis: RedisServer, tiers: list[WatchedTier]
) -> None:
    async with hosts(short_folder, redis, "a", **CUDA, **EAGER, host_bytes=64 * BLOCK_BYTES) as (a,):
        hashes = prompt(*range(20))
        await a.serve(hashes)
        await a.until(spilled)
        (tier,) = tiers
        victim = next(block_hash for block_hash in split_hashes(hashes) if block_hash in tier)
        (buffer,) = await tier.acquire_blocks([victim])
        buffer[100] ^= 1
        tier.release_buffers([buffer])
        brought = await a.serve(hashes)
        assert brought.blocks == split_hashes(hashes).index(victim)
        assert (await a.client.status()).corrupt_blocks == 1
        await checked(a)
        await settled(tiers)


async def test_a_chain_is_copied_between_devices(short_folder: str, redis: RedisServer) -> None:
    async with hosts(short_folder, redis, "a", "b", **CUDA) as (a, b):
        hashes = prompt(*range(20))
        assert await a.serve(hashes) == PrefetchReply(blocks=0)
        assert await b.serve(hashes, "a") == PrefetchReply(blocks=20, fetched_blocks=20)
        await checked(a, b)
        stub: Any = kvplane_pb2_grpc.KVPlaneStub(a.client.channel)
        namespace = bytes.fromhex(NAMESPACE)
        pool = await stub.Meet(MeetRequest(hello=hello_to_pb("test"), block_bytes=BLOCK_BYTES, kv_namespace=namespace))
        assert (pool.memory_kind, pool.device_index) == ("cuda", 0)


async def test_a_chain_is_copied_between_host_and_device(short_folder: str, redis: RedisServer) -> None:
    async with (
        hosts(short_folder, redis, "a", **CUDA) as (a,),
        hosts(short_folder, redis, "b", kv_transport="grpc") as (b,),
    ):
        there, back = prompt(*range(15)), prompt(*range(50, 65))
        await a.serve(there)
        await b.serve(back)
        assert (await b.serve(there, "a")).fetched_blocks == 15
        assert (await a.serve(back, "b")).fetched_blocks == 15
        await checked(a, b)


async def test_storms_of_requests_on_two_devices(
    short_folder: str, redis: RedisServer, tiers: list[WatchedTier]
) -> None:
    """Few stages, many callers, blocks moving in both directions; some callers disconnect."""
    flags = {**CUDA, **EAGER, "host_bytes": HOST_BLOCKS * BLOCK_BYTES, "disk_path": ""}
    async with hosts(short_folder, redis, "a", "b", **flags) as nodes:
        rng = random.Random(7)

        async def request(number: int) -> None:
            host, other = rng.sample(nodes, 2)
            base = rng.randrange(6) * 100
            chain = prompt(*range(base, base + rng.randrange(1, 9)))
            try:
                async with asyncio.timeout(rng.choice([0.02, 10, 10])):
                    await host.serve(chain, other.name)
            except TimeoutError:
                pass

        for _ in range(8):
            await asyncio.gather(*(request(number) for number in range(6)))
        await checked(*nodes)
        assert len(tiers) == 2
        await settled(tiers)


def memory_of(slots: int, block_bytes: int = BLOCK_BYTES) -> tuple[CudaMemory, DeviceBytes, DeviceSegment]:
    segment = DeviceSegment(CudaDriver().device(0), slots * block_bytes)
    return CudaMemory([segment.mapping], slots, Shards.whole(block_bytes)), DeviceBytes(segment.mapping), segment


def block(slot: int) -> bytes:
    return content(slot.to_bytes(32, "little"))


async def test_host_and_device_memory_behave_alike() -> None:
    """One script, two memories, the same bytes."""
    device, raw, segment = memory_of(10)
    store = bytearray(10 * BLOCK_BYTES)
    host = HostMemory(store, 10, BLOCK_BYTES)
    for memory in (host, device):
        for first in range(0, 10, 3):
            part = range(10)[first : first + 3]
            async with memory.writing(part) as targets:
                for slot, target in zip(part, targets, strict=True):
                    target[:] = block(slot)
        pieces = await memory.pieces([7, 2], 5000)
        assert b"".join(pieces) == block(7) + block(2)
        assert [len(piece) for piece in pieces] == [5000, 5000, 5000, 2 * BLOCK_BYTES - 15000]
        assert await memory.checksums(range(10)) == [block_checksum(block(slot)) for slot in range(10)]
        copies = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(5)]
        assert await memory.copy_out([0, 9, 4, 5, 6], copies, [0, 77, 0, 0, 0]) == [
            block_checksum(block(0)), 77, *(block_checksum(block(slot)) for slot in (4, 5, 6))
        ]  # fmt: skip
        assert [bytes(copy) for copy in copies] == [block(slot) for slot in (0, 9, 4, 5, 6)]
        await memory.copy_in([1, 2], [copies[1], copies[0]])
        with pytest.raises(ValueError, match="on purpose"):
            async with memory.writing([3]):
                raise ValueError("on purpose")
        with memory.on_device():
            assert memory.hold() is not None
    assert raw.read(0, 10 * BLOCK_BYTES) == bytes(store)
    assert raw.read(2 * BLOCK_BYTES, BLOCK_BYTES) == block(0)
    device.close()
    device.close()
    segment.close()


async def test_a_cancelled_writer_writes_nothing_later() -> None:
    memory, raw, segment = memory_of(4)
    begun = asyncio.Event()

    async def write() -> None:
        async with memory.writing([1]) as (target,):
            target[:] = block(1)
            begun.set()
            await asyncio.Event().wait()

    writers = [asyncio.create_task(write()) for _ in range(2 * STAGES)]
    await begun.wait()
    for writer in writers:
        writer.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    assert raw.read(BLOCK_BYTES, BLOCK_BYTES) == bytes(BLOCK_BYTES)
    for _ in range(2 * STAGES):
        assert await asyncio.wait_for(memory.checksums(range(4)), WITHIN_S)
    memory.close()
    segment.close()


async def test_slow_sources_do_not_block_others() -> None:
    memory, _, segment = memory_of(4)

    async def write() -> None:
        async with memory.writing([1]):
            await asyncio.Event().wait()

    writers = [asyncio.create_task(write()) for _ in range(3 * STAGES)]
    reads = [memory.pieces([0, 1], 5000) for _ in range(2 * STAGES)]
    assert await asyncio.wait_for(asyncio.gather(*reads), WITHIN_S)
    assert await asyncio.wait_for(memory.checksums(range(4)), WITHIN_S)
    for writer in writers:
        writer.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    memory.close()
    segment.close()


@pytest.mark.skipif(NATIVE, reason="a real GPU does not fail on request")
async def test_a_device_error_fails_only_one_copy() -> None:
    memory, _, segment = memory_of(4)
    fake_cuda.fail_next_copy()
    with pytest.raises(Unavailable, match="cannot be copied"):
        await memory.checksums([0])
    assert len(await memory.checksums(range(4))) == 4
    memory.close()
    with pytest.raises(ConfigError, match="fit"):
        CudaMemory([segment.mapping], 1000, Shards.whole(BLOCK_BYTES))
    segment.close()
