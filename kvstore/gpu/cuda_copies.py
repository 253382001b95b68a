"""Runs streams of copies between blocks on the host and a pool's slots on one GPU or several."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pillion.errors import Internal
from pillion.kvstore.gpu.cuda_driver import CudaStream
from pillion.kvstore.gpu.cuda_segment import DeviceMapping
from pillion.kvstore.memory.shards import Rectangle, Shards


class CudaCopies:
    """Has one stream on each GPU of a pool. A copy that is begun here is done when :meth:`synchronize` has returned;
    both sides stay as they are until then. ``mappings`` are the memory of each of ``shards``."""

    def __init__(self, mappings: Sequence[DeviceMapping], num_slots: int, shards: Shards) -> None:
        self._num_slots = num_slots
        self._starts = [mapping.address for mapping in mappings]
        self._shard_bytes = [shards.shard_bytes(shard) for shard in range(len(shards.shares))]
        self._gathered, self._scattered = shards.gathered(), shards.scattered()
        self._streams = [CudaStream(mapping.device) for mapping in mappings]

    def to_host(self, target: int, slot: int) -> None:
        """Begins to copy a slot's block to an address."""
        for part in self._gathered:
            stream, source, to = self._streams[part.shard], self._at(part, slot), target + part.block_at
            if part.rows == 1:
                stream.to_host(to, source, part.width_bytes)
            else:
                stream.rows_to_host(to, part.block_pitch, source, part.shard_pitch, part.width_bytes, part.rows)

    def to_slot(self, slot: int, source: int) -> None:
        """Begins to copy the block at an address to a slot."""
        for part in self._scattered:
            stream, to, begin = self._streams[part.shard], self._at(part, slot), source + part.block_at
            if part.rows == 1:
                stream.to_device(to, begin, part.width_bytes)
            else:
                stream.rows_to_device(to, part.shard_pitch, begin, part.block_pitch, part.width_bytes, part.rows)

    def synchronize(self) -> None:
        """Returns when all copies that were begun are done. Raises CudaError if one failed."""
        with contextlib.ExitStack() as every:
            # Where a copy fails on one GPU, those of the other GPUs are waited for too.
            for stream in self._streams:
                every.callback(stream.synchronize)

    def close(self) -> None:
        """Destroys the streams, on which no copy may run any more. Idempotent."""
        for stream in self._streams:
            stream.close()

    def _at(self, part: Rectangle, slot: int) -> int:
        if not 0 <= slot < self._num_slots:
            raise Internal(f"slot {slot} is not of this pool")
        return self._starts[part.shard] + slot * self._shard_bytes[part.shard] + part.shard_at
