"""The host memory tier against a model that knows only what was stored, and the guarantees of its buffers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import ConfigError
from pillion.kvstore.memory.memory import HostMemory, block_checksum
from pillion.kvstore.tiers.host_tier import HostTier
from pillion.kvstore.tiers.tiers import BlockName
from tests.support.examples import examples

BLOCK_BYTES = 64
BLOCKS = 5


def name_of(number: int) -> BlockName:
    return BlockName(number.to_bytes(32, "little"), b"", bytes(32), block_checksum(bytes_of(number)))


def bytes_of(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def payload(number: int) -> tuple[BlockName, memoryview]:
    return name_of(number), memoryview(bytes_of(number))


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[HostTier]:
    released: list[bool] = []
    memory = bytearray(BLOCKS * BLOCK_BYTES + 3)
    view = memoryview(memory)
    made = HostTier(view, BLOCK_BYTES, lambda: released.append(True))
    yield made
    made.check_integrity()
    await made.close()
    await made.close()
    assert released == [True]
    # No view of the tier's is left: the memory could be unmapped.
    view.release()
    memory.append(0)


async def filled(tier: HostTier, *numbers: int) -> list[BlockName]:
    """Store like the spiller: in the tier's own buffers."""
    buffers = tier.acquire_empty(len(numbers))
    assert len(buffers) == len(numbers)
    for buffer, number in zip(buffers, numbers, strict=True):
        buffer[:] = bytes_of(number)
    gone = await tier.store([(name_of(number), buffer) for number, buffer in zip(numbers, buffers, strict=True)])
    tier.release_buffers(buffers)
    return gone


async def loaded(tier: HostTier, *numbers: int) -> int:
    pool = HostMemory(bytearray(len(numbers) * BLOCK_BYTES), len(numbers), BLOCK_BYTES)
    count = await tier.load_slots(pool, [name_of(number).hash for number in numbers], range(len(numbers)))
    assert [bytes(pool.block(slot)) for slot in range(count)] == [bytes_of(number) for number in numbers[:count]]
    return count


async def flip(tier: HostTier, number: int, at: int) -> None:
    """Flip one bit of a stored block, in its buffer."""
    (buffer,) = await tier.acquire_blocks([name_of(number).hash])
    buffer[at] ^= 8
    tier.release_buffers([buffer])


async def test_stored_blocks_round_trip_from_any_place() -> None:
    async with opened() as tier:
        assert await filled(tier, 1, 2) == []
        assert await tier.store([payload(3)]) == []
        assert await loaded(tier, 1, 2, 3, 4) == 3
        assert (len(tier), tier.counts.stored, tier.counts.loaded) == (3, 3, 3)
        assert {name.hash for name in tier.names()} == {name_of(number).hash for number in (1, 2, 3)}


async def test_the_least_recently_used_is_evicted_and_reported() -> None:
    async with opened() as tier:
        await filled(tier, *range(BLOCKS))
        tier.touch([name_of(0).hash, b"unknown"])
        assert await loaded(tier, 2) == 1
        assert await filled(tier, 10, 11) == [name_of(1), name_of(3)]
        assert tier.counts.dropped == 2
        tier.release_buffers(tier.acquire_empty(1))
        assert await tier.store([payload(4)]) == []


async def test_a_lent_buffer_has_one_user() -> None:
    async with opened() as tier:
        await filled(tier, 1)
        borrowed = await tier.acquire_blocks([name_of(1).hash])
        acquired = tier.acquire_empty(BLOCKS)
        assert len(acquired) == BLOCKS - 1
        assert tier.room_bytes() == 0
        for buffer in acquired:
            buffer[:] = bytes(BLOCK_BYTES)
        assert await tier.store([payload(2)]) == [name_of(2)], "no buffer is to be had"
        assert bytes(borrowed[0]) == bytes_of(1)
        tier.release_buffers(borrowed)
        tier.release_buffers(acquired)
        tier.release_buffers([memoryview(b"another one's")])
        assert tier.room_bytes() == BLOCKS * BLOCK_BYTES


async def test_a_block_that_is_dropped_while_it_is_read_stays_readable() -> None:
    async with opened() as tier:
        await filled(tier, *range(BLOCKS))
        borrowed = await tier.acquire_blocks([name_of(0).hash])
        # Flipped and found by another reader: the block goes, the first reader's buffer does not.
        borrowed[0][3] ^= 1
        assert await tier.acquire_blocks([name_of(0).hash]) == []
        assert name_of(0).hash not in tier
        acquired = tier.acquire_empty(BLOCKS)
        assert all(buffer is not borrowed[0] for buffer in acquired)
        tier.release_buffers(acquired)
        tier.release_buffers(borrowed)
        tier.check_integrity()


async def test_a_flipped_bit_is_found() -> None:
    async with opened() as tier:
        await filled(tier, 1, 2, 3)
        await flip(tier, 2, at=5)
        pool = HostMemory(bytearray(3 * BLOCK_BYTES), 3, BLOCK_BYTES)
        wanted = [name_of(number).hash for number in (1, 2, 3)]
        assert await tier.load_slots(pool, wanted, range(3)) == 1
        assert tier.counts.corrupt == 1
        assert name_of(2).hash not in tier
        assert await tier.store([payload(4)]) == [name_of(2)]


async def test_blocks_of_another_size_are_rejected() -> None:
    with pytest.raises(ConfigError, match="--host-bytes"):
        HostTier(memoryview(bytearray(BLOCK_BYTES - 1)), BLOCK_BYTES, lambda: None)
    async with opened() as tier:
        assert await tier.store([(name_of(1), memoryview(b"short"))]) == [name_of(1)]
        assert tier.counts.failed == 1
    assert tier.room_bytes() == 0
    assert tier.acquire_empty(1) == []
    assert await tier.acquire_blocks([name_of(1).hash]) == []
    assert await tier.store([payload(1)]) == [name_of(1)]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fill", "store", "load", "lend", "borrow", "back", "touch", "flip"]),
        st.integers(0, 7),
        st.integers(1, 3),
    ),
    max_size=40,
)


@settings(max_examples=examples(150))
@given(STEPS)
def test_bytes_are_correct_and_no_buffer_leaks(steps: list[tuple[str, int, int]]) -> None:
    asyncio.run(_play(steps))


async def _play(steps: list[tuple[str, int, int]]) -> None:
    async with opened() as tier:
        held: list[tuple[memoryview, bytes]] = []
        for what, first, count in steps:
            numbers = [(first + offset) % 8 for offset in range(count)]
            hashes = [name_of(number).hash for number in numbers]
            if what == "fill":
                for number, buffer in zip(numbers, tier.acquire_empty(count), strict=False):
                    buffer[:] = bytes_of(number)
                    await tier.store([(name_of(number), buffer)])
                    tier.release_buffers([buffer])
            elif what == "store":
                await tier.store([payload(number) for number in numbers])
            elif what == "load":
                await loaded(tier, *numbers)
            elif what == "lend":
                for buffer in tier.acquire_empty(count):
                    buffer[:] = bytes([first]) * BLOCK_BYTES
                    held.append((buffer, bytes(buffer)))
            elif what == "borrow":
                for number, buffer in zip(numbers, await tier.acquire_blocks(hashes), strict=False):
                    assert bytes(buffer) == bytes_of(number)
                    held.append((buffer, bytes(buffer)))
            elif what == "back" and held:
                buffer, was = held.pop(first % len(held))
                assert bytes(buffer) == was, "somebody else wrote to it"
                tier.release_buffers([buffer])
            elif what == "touch":
                tier.touch(hashes)
            elif what == "flip":
                for buffer in await tier.acquire_blocks(hashes[:1]):
                    buffer[0] ^= all(buffer is not other for other, _ in held)
                    tier.release_buffers([buffer])
            assert len(tier) <= BLOCKS
            tier.check_integrity()
        tier.release_buffers([buffer for buffer, _ in held])
