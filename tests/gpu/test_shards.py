"""Blocks are divided over several shards and joined again, against plain slices of arrays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.testbed import fake_cuda
from lab.testbed.fake_cuda import DeviceBytes
from pillion.errors import ConfigError, InvalidRequest
from pillion.kvstore.gpu import cuda_driver, cuda_memory
from pillion.kvstore.gpu.cuda_driver import CudaDriver
from pillion.kvstore.gpu.cuda_memory import CudaMemory
from pillion.kvstore.gpu.cuda_segment import DeviceSegment
from pillion.kvstore.memory import head_shares
from pillion.kvstore.memory.head_shares import MAX_SHARDS
from pillion.kvstore.memory.memory import HostMemory, block_checksum
from pillion.kvstore.memory.shards import Shards

Bytes = npt.NDArray[np.uint8]
SLOTS = 5


def shares_of(heads: int, ranks: int) -> tuple[range, ...]:
    """The KV heads of each rank: unequal shares, and heads shared by several ranks."""
    if ranks > heads:
        return tuple(range(rank * heads // ranks, rank * heads // ranks + 1) for rank in range(ranks))
    return tuple(range(part[0], part[-1] + 1) for part in np.array_split(range(heads), ranks))


def blocks_of(shards: Shards, count: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (count, shards.block_bytes), np.uint8)


def sliced(shards: Shards, blocks: Bytes) -> list[Bytes]:
    """The oracle: the content of each shard."""
    pieces = blocks.reshape(len(blocks), shards.rows, shards.heads, shards.piece_bytes)
    return [np.ascontiguousarray(pieces[:, :, share.start : share.stop]).reshape(-1) for share in shards.shares]


def scattered(shards: Shards, block: Bytes) -> list[Bytes]:
    found = [np.zeros(shards.shard_bytes(shard), np.uint8) for shard in range(len(shards.shares))]
    for part in shards.scattered():
        for row in range(part.rows):
            at, of = part.shard_at + row * part.shard_pitch, part.block_at + row * part.block_pitch
            found[part.shard][at : at + part.width_bytes] = block[of : of + part.width_bytes]
    return found


def gathered(shards: Shards, found: Sequence[Bytes]) -> Bytes:
    block = np.zeros(shards.block_bytes, np.uint8)
    for part in shards.gathered():
        for row in range(part.rows):
            at, of = part.shard_at + row * part.shard_pitch, part.block_at + row * part.block_pitch
            block[of : of + part.width_bytes] = found[part.shard][at : at + part.width_bytes]
    return block


@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("readers", [1, 2, 4])
@given(st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 5, 8]), st.integers(1, 9), st.integers(0, 99))
def test_workers_of_other_sizes_read_the_same_values(
    writers: int, readers: int, rows: int, heads: int, piece_bytes: int, seed: int
) -> None:
    """Through the canonical block, whose bytes are the same for all sizes."""
    layouts = []
    for ranks in (writers, readers):
        if ranks > heads and ranks % heads:
            with pytest.raises(InvalidRequest, match="cannot be divided into"):
                head_shares.shares_of(heads, ranks)
        else:
            assert head_shares.shares_of(heads, ranks) == shares_of(heads, ranks)
            assert Shards.divided(rows * heads * piece_bytes, rows, heads, ranks).piece_bytes == piece_bytes
            layouts.append(Shards(rows, heads, piece_bytes, shares_of(heads, ranks)))
    for ours in layouts:
        (block,) = blocks_of(ours, 1, seed)
        shards = scattered(ours, block)
        for one, other in zip(shards, sliced(ours, block[None]), strict=True):
            np.testing.assert_array_equal(one, other)
        back = gathered(ours, shards)
        np.testing.assert_array_equal(back, block)
        # Each byte of the block comes from one place.
        assert sum(part.rows * part.width_bytes for part in ours.gathered()) == ours.block_bytes
        for theirs in layouts:
            for one, other in zip(scattered(theirs, back), sliced(theirs, block[None]), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "shares",
    [
        (),
        (range(3),),
        (range(5),),
        (range(1), range(2, 4)),
        (range(2), range(1), range(2, 4)),
        (range(2), range(2), range(3, 4)),
        (range(1, 4),),
        (range(4), range(0)),
        (range(0, 4, 2), range(1, 4, 2)),
        (range(2, 4), range(2)),
        (range(4),) * (MAX_SHARDS + 1),
    ],
)
def test_invalid_divisions_are_refused(shares: tuple[range, ...]) -> None:
    with pytest.raises(InvalidRequest):
        Shards(2, 4, 8, shares)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Four GPUs; some of them may be the same real one."""
    monkeypatch.setattr(cuda_driver, "LIBRARY", fake_cuda.library())
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "4")
    driver = CudaDriver()
    opened = [driver.device(index % driver.count()) for index in range(4)]
    yield opened
    for device in opened:
        device.close()


@pytest.mark.parametrize(("heads", "ranks"), [(4, 2), (3, 2), (2, 4), (1, 2), (8, 4)])
def test_a_pool_on_several_devices_reads_and_writes_whole_blocks(
    devices: list[Any], monkeypatch: pytest.MonkeyPatch, heads: int, ranks: int
) -> None:
    """A divided pool supports the calls of a pool in host memory, with the same bytes; each device has its heads of
    each slot."""
    shards = Shards(6, heads, 48, shares_of(heads, ranks))
    monkeypatch.setattr(cuda_memory, "STAGE_BYTES", 2 * shards.block_bytes)
    segments = [DeviceSegment(device, SLOTS * shards.shard_bytes(at)) for at, device in enumerate(devices[:ranks])]
    mappings = [segment.mapping for segment in segments]
    memory, store = CudaMemory(mappings, SLOTS, shards), bytearray(SLOTS * shards.block_bytes)
    host, blocks = HostMemory(store, SLOTS, shards.block_bytes), blocks_of(shards, SLOTS)

    async def compare() -> None:
        for pool in (host, memory):
            for slot in range(SLOTS):
                async with pool.writing([slot]) as (target,):
                    target[:] = blocks[slot].data
            assert await pool.pieces([3, 4], 100) == await host.pieces([3, 4], 100)
            assert await pool.checksums(range(SLOTS)) == [block_checksum(block.data) for block in blocks]
            copies = [memoryview(bytearray(shards.block_bytes)) for _ in range(2)]
            await pool.copy_out([4, 2], copies, [0, 0])
            assert [bytes(copy) for copy in copies] == [blocks[4].tobytes(), blocks[2].tobytes()]
            await pool.copy_in([0, 1], copies)
            assert pool.hold() is not None

    asyncio.run(compare())
    wanted = sliced(shards, np.frombuffer(store, np.uint8).reshape(SLOTS, -1))
    for at, mapping in enumerate(mappings):
        assert DeviceBytes(mapping).read(0, SLOTS * shards.shard_bytes(at)) == wanted[at].tobytes()
    with pytest.raises(ConfigError, match="do not fit"):
        CudaMemory(mappings, 2**20, shards)
    memory.close()
    for segment in segments:
        segment.close()
