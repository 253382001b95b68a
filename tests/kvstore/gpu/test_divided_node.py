"""Nodes whose pool is divided over several GPUs: workers get a shard on each, everyone else gets whole blocks.

On a machine with one GPU both shards are on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from lab.testbed import fake_cuda
from lab.testbed.conditions import WITHIN_S
from lab.testbed.fake_cuda import NATIVE, DeviceBytes
from lab.testbed.redis import RedisServer
from pillion.config import KVNodeFlags
from pillion.errors import ConfigError, Conflict
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.attachment import Attachment, attach
from pillion.kvstore.gpu import cuda_driver, cuda_memory
from pillion.kvstore.gpu.cuda_domain import CudaDomain, device_indexes
from pillion.kvstore.gpu.cuda_driver import CudaDriver
from pillion.kvstore.gpu.mapped_memory import Region, map_pool, share_region
from pillion.kvstore.ledger.records import slots_of
from pillion.kvstore.memory.head_shares import MAX_SHARDS
from pillion.kvstore.memory.shards import Shards
from pillion.kvstore.node.kv_node import KVNode
from pillion.v1.kvnode_pb2 import PrefetchReply
from tests.support.kv_hosts import (
    BLOCK_BYTES,
    EAGER,
    KV_HEADS,
    KV_ROWS,
    NUM_SLOTS,
    PIECE_BYTES,
    KVHost,
    content,
    hosts,
    prompt,
)

KEY = "c3" * 32
FAKE_ONLY = pytest.mark.skipif(NATIVE, reason="this asks for two GPUs of the fake driver")


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the --kv-device of two shards."""
    monkeypatch.setattr(cuda_driver, "LIBRARY", fake_cuda.library())
    monkeypatch.setattr(cuda_memory, "STAGE_BYTES", 3 * BLOCK_BYTES)
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    return f"cuda:0,cuda:{min(1, CudaDriver().count() - 1)}"


async def started(folder: str, kv_device: str, **more: Any) -> KVNode:
    flags = {"kv_pool_bytes": NUM_SLOTS * BLOCK_BYTES, **more}
    return await start_kvnode(
        KVNodeFlags(
            node_listen=f"unix:{folder}/node.sock", attach_socket=f"{folder}/attach.sock", kv_device=kv_device, **flags
        )
    )


async def attached(folder: str, kv_rows: int = KV_ROWS, kv_heads: int = KV_HEADS) -> Attachment:
    return await asyncio.to_thread(
        attach,
        f"{folder}/attach.sock",
        component_id="w",
        role="decode",
        block_bytes=BLOCK_BYTES,
        timeout_s=WITHIN_S,
        kv_rows=kv_rows,
        kv_heads=kv_heads,
        map_device=map_pool,
    )


async def region(folder: str, device_uuid: str) -> Region:
    path = f"{folder}/attach.sock"
    return await asyncio.to_thread(share_region, path, KEY, 2**20, WITHIN_S, device_uuid=device_uuid)


async def checked(*nodes: KVHost) -> None:
    for host in nodes:
        await host.idle()
        await host.check()


async def test_divided_blocks_spill_return_and_move_to_undivided_nodes(
    short_folder: str, redis: RedisServer, two: str
) -> None:
    """Tiers and other nodes see the canonical block: its bytes follow from its hash everywhere."""
    divided = {"kv_device": two, "host_bytes": 64 * BLOCK_BYTES, **EAGER}
    async with (
        hosts(short_folder, redis, "a", **divided) as (a,),
        hosts(short_folder, redis, "b", kv_device="cuda", kv_transport="grpc") as (b,),
        hosts(short_folder, redis, "c", kv_transport="grpc") as (c,),
    ):
        assert not isinstance(a.worker.pool, memoryview)
        assert a.worker.pool.shares == (range(2), range(2, 4))
        hashes, others = prompt(*range(20)), prompt(*range(50, 65))
        await a.serve(hashes)
        status = await a.until(lambda status: status.host_blocks > 0 and status.free_blocks >= NUM_SLOTS * 0.8)
        assert (status.kv_device, status.kv_transport) == (two, "grpc")
        brought = await a.serve(hashes)
        assert brought.blocks == 20
        assert brought.restored_blocks > 0
        assert await b.serve(hashes, "a") == PrefetchReply(blocks=20, fetched_blocks=20)
        await c.serve(others)
        assert (await a.serve(others, "c")).fetched_blocks == 15
        await checked(a, b, c)


async def test_another_process_of_a_worker_maps_the_same_shards(short_folder: str, two: str) -> None:
    node = await started(short_folder, two)
    try:
        worker = await attached(short_folder)
        other = Attachment.joined(*worker.handed_over(), BLOCK_BYTES, map_pool)
        assert not isinstance(worker.pool, memoryview)
        assert not isinstance(other.pool, memoryview)
        for shard, heads in enumerate(worker.pool.shares):
            size = KV_ROWS * len(heads) * PIECE_BYTES
            DeviceBytes(worker.pool.shard(shard)).write(7 * size, content(bytes([shard]))[:size])
            assert DeviceBytes(other.pool.shard(shard)).read(7 * size, size) == content(bytes([shard]))[:size]
        node.check_integrity()
        other.close()
        worker.close()
        node._memory.segments.pop().close()
        with pytest.raises(Conflict, match="1 segments for a pool of 2 shards"):
            node.check_integrity()
    finally:
        await node.stop(0.1)


async def test_each_gpu_has_its_own_regions(short_folder: str, two: str) -> None:
    node = await started(short_folder, two)
    try:
        uuids = [CudaDriver().uuid_of(index) for index in device_indexes(two)]
        regions = [await region(short_folder, uuid) for uuid in dict.fromkeys(uuids)]
        for each, uuid in zip(regions, dict.fromkeys(uuids), strict=True):
            assert each.must_fill
            assert each.device_memory is not None
            assert CudaDriver().uuid_of(each.device_memory.device_index) == uuid
            each.filled()
        again = await region(short_folder, uuids[-1])
        assert not again.must_fill
        for each in (*regions, again):
            each.close()
        named = ",".join(f"cuda:{index}" for index in device_indexes(two))
        with pytest.raises(ConfigError, match=f"memory on {named} alone.*--kv-device"):
            await region(short_folder, "00000000-0000-0000-0000-000000000000")
    finally:
        await node.stop(0.1)


@FAKE_ONLY
async def test_a_shard_that_cannot_be_reached_is_rejected_by_name(
    short_folder: str, two: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_NO_PEERS", "1")
    node = await started(short_folder, two)
    try:
        worker = await attached(short_folder)
        assert not isinstance(worker.pool, memoryview)
        assert worker.pool.shard(0).device_index == 0
        with pytest.raises(ConfigError, match=r"device 0 cannot reach the memory of CUDA device 1.*no peer access"):
            worker.pool.shard(1)
        worker.close()
    finally:
        await node.stop(0.1)


@pytest.mark.parametrize(
    ("kv_rows", "kv_heads", "words"),
    [
        (0, 0, "the worker does not say how many"),
        (KV_ROWS, 3, "cannot be divided into 4 rows of 3 KV heads"),
        (KV_ROWS * KV_HEADS, 1, ""),
    ],
)
async def test_blocks_that_cannot_be_divided_are_rejected(
    short_folder: str, two: str, kv_rows: int, kv_heads: int, words: str
) -> None:
    node = await started(short_folder, two)
    try:
        if words:
            with pytest.raises(ConfigError, match=words):
                await attached(short_folder, kv_rows, kv_heads)
        # The next worker may be another one; a single head is in both shards.
        worker = await attached(short_folder, kv_rows if not words else KV_ROWS, kv_heads if not words else KV_HEADS)
        assert not isinstance(worker.pool, memoryview)
        assert worker.pool.shares == ((range(2), range(2, 4)) if words else (range(1), range(1)))
        assert worker.num_slots == (NUM_SLOTS if words else NUM_SLOTS // 2)
        node.check_integrity()
        worker.close()
    finally:
        await node.stop(0.1)


async def test_flags_unsupported_with_several_gpus_are_rejected(short_folder: str, two: str) -> None:
    with pytest.raises(ConfigError, match="--kv-transport nixl reads a block as one range"):
        await started(short_folder, two, kv_transport="nixl")
    for wrong in ("cuda:0,cpu", "cuda:0,", "cuda:x", "cuda:-1", "cuda:\u0663"):
        with pytest.raises(ConfigError, match="is not cpu, cuda, cuda:N, or several"):
            await started(short_folder, wrong)
    with pytest.raises(ConfigError, match="a pool can use at most 16"):
        await started(short_folder, ",".join(["cuda:0"] * (MAX_SHARDS + 1)))
    assert device_indexes("cuda,cuda:3") == (0, 3)


@FAKE_ONLY
@pytest.mark.parametrize("indexes", [(0, 1), (0, 0), (0, 1, 0)])
def test_the_fullest_gpu_decides_how_many_slots_there_are(
    indexes: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --kv-pool-bytes, the free memory of a GPU is shared by all its shards."""
    monkeypatch.setenv("FAKE_CUDA_TOTAL_BYTES", str(2**28))
    domain = CudaDomain(KVNodeFlags(gpu_memory_utilization=0.5), indexes)
    held = domain.segment(2**26)
    shards = Shards.divided(BLOCK_BYTES, KV_ROWS, KV_HEADS, len(indexes))
    taken = dict.fromkeys(indexes, 0)
    for shard, index in enumerate(indexes):
        taken[index] += shards.shard_bytes(shard)
    left = {0: 2**27 - 2**26, 1: 2**27}
    assert domain.pool_bytes(shards) == BLOCK_BYTES * min(slots_of(left[index], size) for index, size in taken.items())
    held.close()
    domain.close()
