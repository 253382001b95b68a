"""A pool on GPUs as :class:`pillion.kvstore.memory.memory.PoolMemory`; bytes pass through stages of pinned host memory.

    a reader   waits for a free stage --> slots are copied into it, on a thread --> reads --> the stage is free
    a writer   waits for a free stage --> writes --> the stage is copied to its slots, on a thread --> it is free

Each stage has its own stream, so copies of several callers overlap; the number of stages limits them and the pinned
memory. No caller waits for a second stage. Only writers can occupy a stage while waiting for a slow source, and there
are fewer writers than stages.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

from pillion.errors import ConfigError, Internal, Unavailable
from pillion.kvstore.gpu.cuda_driver import CudaDevice, CudaError, CudaStream
from pillion.kvstore.gpu.cuda_segment import DeviceMapping
from pillion.kvstore.memory.memory import CUDA, PoolMemory, address_of, block_checksum, cut_pieces, until_over
from pillion.kvstore.memory.shards import Rectangle, Shards

# Concurrent copies, each through a stage of its own.
STAGES = 6
# Stages that writers may occupy while they wait for slow sources; the other stages stay free for copies that are not
# blocked.
MAX_WRITERS = 4
# Pinned host memory per stage.
STAGE_BYTES = 8 * 2**20

Result = TypeVar("Result")


class PinnedMemory:
    """Host memory, in whole pages, that a GPU copies from and to directly. Raises ConfigError if it cannot be allocated
    or pinned."""

    def __init__(self, device: CudaDevice, size_bytes: int) -> None:
        self._device = device
        try:
            self._mapped = mmap.mmap(-1, size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"cannot allocate {size_bytes} bytes of host memory: {error}") from None
        self.view = memoryview(self._mapped)
        self.address = address_of(self.view)
        self._registered = False
        try:
            device.register(self.address, size_bytes)
            self._registered = True
        finally:
            if not self._registered:
                self.close()

    def close(self) -> None:
        """Unpin and free the memory, with no copy running. Idempotent."""
        if self._registered:
            self._registered = False
            self._device.unregister(self.address)
        with contextlib.suppress(BufferError):
            self.view.release()
            self._mapped.close()


class CudaCopies:
    """Copies between the slots of a pool and host memory, with one stream per GPU. They are finished after
    :meth:`synchronize`; until then their sources and targets must not change. ``mappings``: the memory of each
    shard."""

    def __init__(self, mappings: Sequence[DeviceMapping], num_slots: int, shards: Shards) -> None:
        self._num_slots = num_slots
        self._starts = [mapping.address for mapping in mappings]
        self._shard_bytes = [shards.shard_bytes(shard) for shard in range(len(shards.shares))]
        self._gathered, self._scattered = shards.gathered(), shards.scattered()
        self._streams = [CudaStream(mapping.device) for mapping in mappings]

    def to_host(self, target: int, slot: int) -> None:
        """Start copying a slot's block to an address."""
        for rectangle in self._gathered:
            stream, source, at = (
                self._streams[rectangle.shard],
                self._address(rectangle, slot),
                target + rectangle.block_at,
            )
            if rectangle.rows == 1:
                stream.to_host(at, source, rectangle.width_bytes)
            else:
                stream.rows_to_host(
                    at, rectangle.block_pitch, source, rectangle.shard_pitch, rectangle.width_bytes, rectangle.rows
                )

    def to_slot(self, slot: int, source: int) -> None:
        """Start copying the block at an address to a slot."""
        for rectangle in self._scattered:
            stream, target, at = (
                self._streams[rectangle.shard],
                self._address(rectangle, slot),
                source + rectangle.block_at,
            )
            if rectangle.rows == 1:
                stream.to_device(target, at, rectangle.width_bytes)
            else:
                stream.rows_to_device(
                    target, rectangle.shard_pitch, at, rectangle.block_pitch, rectangle.width_bytes, rectangle.rows
                )

    def synchronize(self) -> None:
        """Wait for all copies. Raises CudaError if one failed."""
        with contextlib.ExitStack() as stack:
            # Wait for all GPUs even if a copy failed on one.
            for stream in self._streams:
                stack.callback(stream.synchronize)

    def close(self) -> None:
        """Destroy the streams, with no copy running. Idempotent."""
        for stream in self._streams:
            stream.close()

    def _address(self, rectangle: Rectangle, slot: int) -> int:
        if not 0 <= slot < self._num_slots:
            raise Internal(f"slot {slot} is not in this pool")
        return self._starts[rectangle.shard] + slot * self._shard_bytes[rectangle.shard] + rectangle.shard_at


class _Stage:
    """A stream on each of the pool's GPUs, with pinned memory for a few blocks."""

    def __init__(self, copies: CudaCopies, views: list[memoryview]) -> None:
        self.copies = copies
        self.views = views
        self.addresses = [address_of(view) for view in views]


class CudaMemory(PoolMemory):
    """A pool on a GPU, or on several with a shard of every block each; whole blocks are copied in their canonical
    layout. ``address`` and ``device_index`` are of the first GPU.

    The constructor pins memory, so do not call it on the event loop. Raises ConfigError if the pool does not fit into
    ``mappings``, one per shard, or if no memory can be pinned.
    """

    kind = CUDA

    def __init__(self, mappings: Sequence[DeviceMapping], num_slots: int, shards: Shards) -> None:
        mapping, block_bytes = mappings[0], shards.block_bytes
        for shard, part in enumerate(mappings):
            if part.size_bytes < num_slots * shards.shard_bytes(shard):
                needed = f"{num_slots} slots of {shards.shard_bytes(shard)} bytes"
                raise ConfigError(f"{needed} do not fit into {part.size_bytes} bytes")
        self.num_slots, self.block_bytes = num_slots, block_bytes
        self.device_index, self.address = mapping.device_index, mapping.address
        self.batch_blocks = self.ahead_blocks = max(1, min(num_slots, STAGE_BYTES // block_bytes))
        self._mappings = mappings
        self._closed = False
        stage_bytes = self.batch_blocks * block_bytes
        self._pinned = PinnedMemory(mapping.device, STAGES * stage_bytes)
        self._stages: list[_Stage] = []
        for first in range(0, STAGES * stage_bytes, stage_bytes):
            starts = range(first, first + stage_bytes, block_bytes)
            views = [self._pinned.view[start : start + block_bytes] for start in starts]
            self._stages.append(_Stage(CudaCopies(mappings, num_slots, shards), views))
        self._free: asyncio.LifoQueue[_Stage] = asyncio.LifoQueue()
        for stage in self._stages:
            self._free.put_nowait(stage)
        self._writers = asyncio.Semaphore(MAX_WRITERS)
        self._threads = ThreadPoolExecutor(STAGES, "kv-cuda-copy")

    @asynccontextmanager
    async def writing(self, slots: Sequence[int]) -> AsyncIterator[list[memoryview]]:
        async with self._writers, self._stage() as stage:
            yield stage.views[: len(slots)]
            await self._in_thread(lambda: self._to_slots(stage.copies, slots, stage.addresses))

    async def pieces(self, slots: Sequence[int], piece_bytes: int) -> list[bytes]:
        def copy(stage: _Stage) -> list[bytes]:
            self._to_host(stage.copies, slots, stage.addresses)
            return cut_pieces(stage.views[: len(slots)], piece_bytes)

        async with self._stage() as stage:
            return await self._in_thread(lambda: copy(stage))

    async def copy_out(
        self, slots: Sequence[int], targets: Sequence[memoryview], known_sums: Sequence[int]
    ) -> list[int]:
        """Copy slots directly into ``targets``, which should be pinned for speed."""

        def copy(stage: _Stage) -> list[int]:
            self._to_host(stage.copies, slots, [address_of(target) for target in targets])
            return [known or block_checksum(target) for target, known in zip(targets, known_sums, strict=True)]

        async with self._stage() as stage:
            return await self._in_thread(lambda: copy(stage))

    async def copy_in(self, slots: Sequence[int], sources: Sequence[memoryview]) -> None:
        """Copy directly from ``sources``, which should be pinned for speed, into slots."""
        async with self._stage() as stage:
            addresses = [address_of(source) for source in sources]
            await self._in_thread(lambda: self._to_slots(stage.copies, slots, addresses))

    async def checksums(self, slots: Sequence[int]) -> list[int]:
        def checksum(stage: _Stage, part: Sequence[int]) -> list[int]:
            self._to_host(stage.copies, part, stage.addresses)
            return [block_checksum(view) for view in stage.views[: len(part)]]

        sums: list[int] = []
        for start in range(0, len(slots), self.batch_blocks):
            part = slots[start : start + self.batch_blocks]
            async with self._stage() as stage:
                sums += await self._in_thread(lambda stage=stage, part=part: checksum(stage, part))  # type: ignore[misc]
        return sums

    def on_device(self) -> AbstractContextManager[None]:
        return self._mappings[0].device.current()

    def hold(self) -> Any:
        return [mapping.hold() for mapping in self._mappings]

    def close(self) -> None:
        """Free stages and threads; the mapping belongs to its segment. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._threads.shutdown()
        for stage in self._stages:
            stage.copies.close()
        self._stages.clear()
        self._pinned.close()

    @asynccontextmanager
    async def _stage(self) -> AsyncIterator[_Stage]:
        stage = await self._free.get()
        try:
            yield stage
        finally:
            self._free.put_nowait(stage)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        try:
            result: Result = await until_over(loop.run_in_executor(self._threads, work))
        except CudaError as error:
            raise Unavailable(f"the GPU's memory cannot be copied: {error.message}") from None
        return result

    def _to_host(self, copies: CudaCopies, slots: Sequence[int], addresses: Sequence[int]) -> None:
        try:
            for slot, target in zip(slots, addresses, strict=False):
                copies.to_host(target, slot)
        finally:
            # If one copy failed to start, wait for those before it.
            copies.synchronize()

    def _to_slots(self, copies: CudaCopies, slots: Sequence[int], addresses: Sequence[int]) -> None:
        try:
            for slot, source in zip(slots, addresses, strict=False):
                copies.to_slot(slot, source)
        finally:
            copies.synchronize()
