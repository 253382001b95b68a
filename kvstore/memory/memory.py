"""Access to a pool's bytes, in host memory or on a GPU; implementation for host memory.

async with memory.writing(slots) as targets:    host: the slots themselves    GPU: pinned memory, copied to the
    ...                                                                            slots when the block succeeds
await memory.pieces(slots, size)                copies, made on a thread
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
# Bytes copied ahead for readers over the network.
AHEAD_BYTES = 4 * 2**20

Result = TypeVar("Result")


class PoolMemory(ABC):
    """Memory of one pool: ``num_slots`` blocks of ``block_bytes``.

    Only the node's loop calls it; no call blocks the thread. Callers must own the slots that they write, and have
    pinned the blocks that they read. A call returns or raises, even if cancelled, only when everything that it started
    has ended. Raises Unavailable if a GPU fails.

    Attributes:
        kind: "host" or "cuda".
        device_index: index of the GPU, 0 on a host.
        address: address of the first slot, for one-sided transfers.
        batch_blocks: max slots per :meth:`writing`.
        ahead_blocks: max slots per :meth:`pieces`.
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
        """Yield one target per slot. If the block succeeds, the targets' bytes are in the slots afterwards; if it
        raises, the slots are undefined."""

    @abstractmethod
    async def pieces(self, slots: Sequence[int], piece_bytes: int) -> list[bytes]:
        """Return copies of the slots' bytes, joined in order and cut into pieces of ``piece_bytes``; the last one may
        be shorter."""

    @abstractmethod
    async def copy_out(
        self, slots: Sequence[int], targets: Sequence[memoryview], known_sums: Sequence[int]
    ) -> list[int]:
        """Copy slots into host memory; return their checksums. Nonzero ``known_sums`` are not recomputed."""

    @abstractmethod
    async def copy_in(self, slots: Sequence[int], sources: Sequence[memoryview]) -> None:
        """Copy blocks from host memory into slots."""

    @abstractmethod
    async def checksums(self, slots: Sequence[int]) -> list[int]:
        """Return each slot's :func:`block_checksum`."""

    def on_device(self) -> AbstractContextManager[None]:
        """Make the pool's GPU the thread's current one while the context is open, for other libraries."""
        return contextlib.nullcontext()

    @abstractmethod
    def hold(self) -> Any:
        """Return an object that keeps the memory mapped during its lifetime."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory, with no call running. Idempotent."""


class HostMemory(PoolMemory):
    """A pool in host memory. Raises ConfigError if the pool does not fit into ``memory``, which is writable."""

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
        """Return a writable view of a slot."""
        return self._view[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    @asynccontextmanager
    async def writing(self, slots: Sequence[int]) -> AsyncIterator[list[memoryview]]:
        """Yield the slots themselves."""
        views = [self.block(slot) for slot in slots]
        try:
            yield views
        finally:
            for view in views:
                view.release()

    async def pieces(self, slots: Sequence[int], piece_bytes: int) -> list[bytes]:
        return await until_over(
            asyncio.to_thread(lambda: cut_pieces([self.block(slot) for slot in slots], piece_bytes))
        )

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
        """Unmap the memory, unless a view of it still exists. Idempotent."""
        with contextlib.suppress(BufferError):
            self._view.release()
            if isinstance(self._memory, mmap.mmap):
                self._memory.close()


def address_of(view: memoryview) -> int:
    """Return the address of a buffer's first byte, without keeping the buffer alive."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


def keep_freed_buffers() -> None:
    """Make the C library's allocator reuse freed buffers of up to 16 MiB, the limit of a gRPC message.

    glibc raises its mmap threshold to the size of the largest buffer freed so far (no effect elsewhere). Otherwise
    every message's buffers would be mapped afresh, and their page faults cost several times as much as copying their
    bytes.
    """
    np.empty(16 * 2**20, np.uint8)


def cut_pieces(blocks: Iterable[memoryview], piece_bytes: int) -> list[bytes]:
    """Return copies of the blocks' bytes, joined in order and cut into pieces of ``piece_bytes``."""
    pieces, parts, left_bytes = list[bytes](), list[memoryview](), piece_bytes
    for block in blocks:
        at = 0
        while at < len(block):
            parts.append(block[at : at + left_bytes])
            at += len(parts[-1])
            left_bytes -= len(parts[-1])
            if not left_bytes:
                pieces.append(b"".join(parts))
                parts, left_bytes = [], piece_bytes
    return [*pieces, b"".join(parts)] if parts else pieces


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def block_checksum(block: bytes | memoryview) -> int:
    """Return the XXH3-64 (Y. Collet, xxHash) of a block's bytes, never 0, which means "unknown". Detects damage, not
    forgery. Runs at about memory bandwidth, without the GIL."""
    return xxhash.xxh3_64_intdigest(block) or 1


async def until_over(work: Awaitable[Result], give_up: Callable[[], None] = lambda: None) -> Result:
    """Return the result of ``work``. If the caller is cancelled, that takes effect only after ``work`` has ended;
    ``give_up`` is called at each cancel, to end it early."""
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
