"""Memory domain of one or several GPUs; segments are device memory, shared by descriptors like host memory.

A pool has a segment on each GPU that ``--kv-device`` names, with some of the KV heads of every block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from fractions import Fraction

from pillion.config import KVNodeFlags
from pillion.errors import ConfigError, InvalidRequest
from pillion.kvstore.gpu.cuda_driver import CudaDevice, CudaDriver
from pillion.kvstore.gpu.cuda_memory import CudaMemory, PinnedMemory
from pillion.kvstore.gpu.cuda_segment import DeviceSegment
from pillion.kvstore.ledger.records import slots_of
from pillion.kvstore.memory.domain import Domain, MadeSegment
from pillion.kvstore.memory.head_shares import MAX_SHARDS
from pillion.kvstore.memory.memory import CUDA, PoolMemory
from pillion.kvstore.memory.shards import Shards

log = logging.getLogger("pillion.kvnode")


class CudaDomain(Domain):
    """Memory of the GPUs with these ``indexes``. A GPU that is named twice has two shards."""

    kind = CUDA

    def __init__(self, flags: KVNodeFlags, indexes: Sequence[int]) -> None:
        self._flags = flags
        driver = CudaDriver()
        self._by_index: dict[int, CudaDevice] = {}
        for index in indexes:
            if index not in self._by_index:
                self._by_index[index] = driver.device(index)
        self._devices = [self._by_index[index] for index in indexes]
        self.device_indexes = tuple(indexes)
        self.device_uuids = tuple(device.uuid for device in self._devices)

    def division(self, block_bytes: int, kv_rows: int, kv_heads: int) -> Shards:
        count = len(self._devices)
        if count == 1:
            return Shards.whole(block_bytes)
        if not (kv_rows and kv_heads):
            raise InvalidRequest(
                f"this KV node divides blocks over {count} GPUs by KV heads, and the worker does not say how many it"
                " has: it is of an older version"
            )
        return Shards.divided(block_bytes, kv_rows, kv_heads, count)

    def layout_id(self, namespace: str, division: Shards) -> str:
        return division.layout_id(namespace, self.device_uuids)

    def pool_bytes(self, division: Shards) -> int:
        """Return the size of the pool. Without a flag, each GPU contributes its usable share, less the memory already
        in use."""
        available = {index: self._available_bytes(device) for index, device in self._by_index.items()}
        if len(self._devices) == 1:
            return self._flags.kv_pool_bytes or available[self.device_indexes[0]]
        # The fullest GPU limits the number of slots.
        slot_bytes = dict.fromkeys(self._by_index, 0)
        for shard, index in enumerate(self.device_indexes):
            slot_bytes[index] += division.shard_bytes(shard)
        if self._flags.kv_pool_bytes:
            slots = slots_of(self._flags.kv_pool_bytes, sum(slot_bytes.values()))
        else:
            slots = min(slots_of(available[index], size) for index, size in slot_bytes.items())
        return slots * division.block_bytes

    def shard_on(self, device_uuid: str) -> int:
        if not device_uuid:
            return 0
        if device_uuid not in self.device_uuids:
            named = ",".join(f"cuda:{index}" for index in self.device_indexes)
            raise ConfigError(
                f"a process computes on the GPU {device_uuid}, and this KV node has memory on {named} alone: name the"
                " GPU of each rank of its workers in --kv-device, or choose the GPU by CUDA_VISIBLE_DEVICES"
            )
        return self.device_uuids.index(device_uuid)

    def segment(self, size_bytes: int, shard: int = 0) -> MadeSegment:
        return DeviceSegment(self._devices[shard], size_bytes)

    def map_descriptors(self, descriptors: Sequence[int], num_slots: int, division: Shards) -> list[MadeSegment]:
        segments: list[MadeSegment] = []
        try:
            for shard, (device, descriptor) in enumerate(zip(self._devices, descriptors, strict=True)):
                segments.append(
                    DeviceSegment.from_descriptor(device, descriptor, num_slots * division.shard_bytes(shard))
                )
        except BaseException:
            for segment in segments:
                segment.close()
            raise
        return segments

    def memory(self, segments: Sequence[MadeSegment], num_slots: int, division: Shards) -> PoolMemory:
        mappings = [segment.mapping for segment in segments if isinstance(segment, DeviceSegment)]
        return CudaMemory(mappings, num_slots, division)

    def pinned_memory(self) -> tuple[memoryview, Callable[[], None]] | None:
        if not self._flags.host_bytes:
            return None
        pinned = PinnedMemory(self._devices[0], self._flags.host_bytes)
        return pinned.view, pinned.close

    def close(self) -> None:
        for device in self._by_index.values():
            device.close()

    def _available_bytes(self, device: CudaDevice) -> int:
        """Return the bytes available on a GPU for its part of the pool. Raises ConfigError if there are none and no
        flag sets the size."""
        free, total = device.memory_info()
        log.info("CUDA device %d has %d bytes, %d of them free", device.index, total, free)
        share = self._flags.gpu_memory_utilization
        available = int(Fraction(str(share)) * total) - (total - free)
        if available <= 0 and not self._flags.kv_pool_bytes:
            raise ConfigError(
                f"no memory is left for KV on CUDA device {device.index}: {total - free} of its {total} bytes are "
                f"in use, and --gpu-memory-utilization {share} allows no more"
            )
        return available


def open_cuda_domain(flags: KVNodeFlags) -> Domain:
    """Open the domain of the GPUs that ``--kv-device`` names. Raises like
    :func:`pillion.kvstore.memory.domain.open_domain`."""
    indexes = device_indexes(flags.kv_device)
    if not 0 < flags.gpu_memory_utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization {flags.gpu_memory_utilization}: choose more than 0, at most 1")
    if flags.host_bytes < 0:
        raise ConfigError(f"--host-bytes {flags.host_bytes} is less than 0")
    return CudaDomain(flags, indexes)


def device_indexes(kv_device: str) -> tuple[int, ...]:
    """Parse "cuda" (0), "cuda:N" or several of these. Raises ConfigError on anything else."""
    indexes = []
    for device in kv_device.split(","):
        name, colon, number = device.partition(":")
        if name != CUDA or (colon and not (number.isascii() and number.isdecimal())):
            raise ConfigError(f"--kv-device {kv_device!r} is not cpu, cuda, cuda:N, or several such as cuda:0,cuda:1")
        indexes.append(int(number or 0))
    if len(indexes) > MAX_SHARDS:
        raise ConfigError(f"--kv-device names {len(indexes)} GPUs; a pool can use at most {MAX_SHARDS}")
    return tuple(indexes)
