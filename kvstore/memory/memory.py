"""Defines the interface to a pool's bytes, in this host's memory or on a GPU, and implements it for host memory.

async with memory.writing(slots) as targets:    host: the slots themselves    GPU: pinned memory, copied to the
    ...                                                                            slots when the block ends well
await memory.pieces(slots, size)                copies, made in a thread
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import xxhash

from pillion.errors import ConfigError

HOST, CUDA = "host", "cuda"
# A reader over the network has this many bytes copied ahead.
AHEAD_BYTES = 4 * 2**20
# A buffer of at most this size keeps its memory with this process when it is freed.
KEPT_BYTES = 16 * 2**20

Result = TypeVar("Result")


class PoolMemory(ABC):
    """Represents the memory of one pool: ``num_slots`` blocks of ``block_bytes``.

    The node's loop makes the calls; nothing here blocks its thread, and nothing here knows who may use a slot: callers
    name slots that are theirs to write, or pinned blocks to read. When a call ends, however it ends, nothing that it
    began still runs; so a caller that is cancelled is held until then. Raises Unavailable if a GPU fails.

    Attributes:
        kind: "host" or "cuda"; ``device_index`` says which GPU (0 on a host).
        address: address of the first slot, for one-sided transfers.
        batch_blocks: most slots that one :meth:`writing` may name.
        ahead_blocks: most slots that one :meth:`pieces` may name.
    """

    kind: str
    device_index: int
    num_slots: int
    block_bytes: int
    address: int
    batch_blocks: int
    ahead_blocks: int

    @abstractmethod
    def writing(self, slots: Sequence[int]) -> AbstractAsyncContextManager[list[memoryview]]:
        """Yields one target per slot. If the ``async with`` block ends well, the targets' bytes are in the slots
        afterwards; if it raises, the slots may hold anything."""

    @abstractmethod
    async def pieces(self, slots: Sequence[int], piece_bytes: int) -> list[bytes]:
        """Returns copies of the slots' bytes, joined in order and cut into pieces of ``piece_bytes``; the last one may
        be shorter."""

    @abstractmethod
    async def copy_out(
        self, slots: Sequence[int], targets: Sequence[memoryview], known_sums: Sequence[int]
    ) -> list[int]:
        """Copies slots into host memory; returns their checksums. Known checksums (not 0) are not computed again."""

    @abstractmethod
    async def copy_in(self, slots: Sequence[int], sources: Sequence[memoryview]) -> None:
        """Copies blocks from host memory into slots of the pool."""

    @abstractmethod
    async def checksums(self, slots: Sequence[int]) -> list[int]:
        """Returns each slot's :func:`block_checksum`."""

    def on_device(self) -> AbstractContextManager[None]:
        """Makes the pool's GPU the current one of this thread, for other libraries, within the block."""
        return contextlib.nullcontext()

    @abstractmethod
    def hold(self) -> Any:
        """Returns an object that keeps the memory mapped as long as it lives."""

    @abstractmethod
    def close(self) -> None:
        """Frees the memory, on which no call may run any more. Idempotent."""


class HostMemory(PoolMemory):
    """Represents a pool in a host's RAM. Raises ConfigError if the pool does not fit into ``memory``, which is
    writable."""

    kind = HOST
    device_index = 0

    def __init__(self, memory: mmap.mmap | bytearray, num_slots: int, block_bytes: int) -> None:
        if len(memory) < num_slots * block_bytes:
            raise ConfigError(f"{num_slots} slots of {block_bytes} bytes do not fit into {len(memory)} bytes")
        self.num_slots = self.batch_blocks = num_slots
        self.block_bytes = block_bytes
        self.ahead_blocks = max(1, AHEAD_BYTES // block_bytes)
        self._memory = memory
        self._view = memoryview(memory)
        self.address: int = address_of(self._view)

    def block(self, slot: int) -> memoryview:
        """Returns the bytes of a slot, writable."""
        return self._view[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    @asynccontextmanager
    async def writing(self, slots: Sequence[int]) -> AsyncIterator[list[memoryview]]:
        """Gives the slots themselves as the targets of a write."""
        views = [self.block(slot) for slot in slots]
        try:
            yield views
        finally:
            for view in views:
                view.release()

    async def pieces(self, slots: Sequence[int], piece_bytes: int) -> list[bytes]:
        return await until_over(asyncio.to_thread(lambda: joined([self.block(slot) for slot in slots], piece_bytes)))

    async def copy_out(
        self, slots: Sequence[int], targets: Sequence[memoryview], known_sums: Sequence[int]
    ) -> list[int]:
        def copy() -> list[int]:
            sums = []
            for slot, target, known in zip(slots, targets, known_sums, strict=True):
                copy_bytes(target, self.block(slot))
                sums.append(known or block_checksum(target))
            return sums

        return await until_over(asyncio.to_thread(copy))

    async def copy_in(self, slots: Sequence[int], sources: Sequence[memoryview]) -> None:
        def copy() -> None:
            for slot, source in zip(slots, sources, strict=True):
                copy_bytes(self.block(slot), source)

        await until_over(asyncio.to_thread(copy))

    async def checksums(self, slots: Sequence[int]) -> list[int]:
        return await until_over(asyncio.to_thread(lambda: [block_checksum(self.block(slot)) for slot in slots]))

    def hold(self) -> Any:
        return np.frombuffer(self._view, np.uint8)

    def close(self) -> None:
        """Unmaps the memory, unless a view of it still exists. Idempotent."""
        with contextlib.suppress(BufferError):
            self._view.release()
            if isinstance(self._memory, mmap.mmap):
                self._memory.close()


def address_of(view: memoryview) -> int:
    """Returns the address of a buffer's first byte; this does not keep the buffer in place."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


def keep_freed_buffers() -> None:
    """Makes the C library's allocator keep freed buffers of KEPT_BYTES and less for their next users.

    It raises its threshold to the largest buffer that was freed so far (glibc; elsewhere nothing happens). Otherwise
    every message's buffers would be mapped anew, and their page faults would cost several times as much as copying
    their bytes.
    """
    np.empty(KEPT_BYTES, np.uint8)


def joined(blocks: Iterable[memoryview], piece_bytes: int) -> list[bytes]:
    """Returns copies of the blocks' bytes, joined in order and cut into pieces of ``piece_bytes``."""
    pieces, parts, room = list[bytes](), list[memoryview](), piece_bytes
    for block in blocks:
        at = 0
        while at < len(block):
            parts.append(block[at : at + room])
            at += len(parts[-1])
            room -= len(parts[-1])
            if not room:
                pieces.append(b"".join(parts))
                parts, room = [], piece_bytes
    return [*pieces, b"".join(parts)] if parts else pieces


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies bytes without the interpreter's lock, so that other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def block_checksum(block: bytes | memoryview) -> int:
    """Returns XXH3-64 (Y. Collet, xxHash) of a block's bytes, never 0, which means "unknown". It finds damage, but no
    forgery. One core checks about as fast as memory can be read, and the interpreter's lock is free meanwhile."""
    return xxhash.xxh3_64_intdigest(block) or 1


async def until_over(work: Awaitable[Result], give_up: Callable[[], None] = lambda: None) -> Result:
    """Returns the result of ``work``; where the caller is cancelled, that takes effect only when ``work`` has ended.
    ``give_up`` is called at each cancel, so that the work ends soon."""
    future = asyncio.ensure_future(work)
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
            give_up()
    if cancelled:
        if not future.cancelled():
            future.exception()
        raise asyncio.CancelledError
    return future.result()
