"""The memory domain of a KV node: this host's memory or that of some GPUs, its size, and how segments of it are made.

open_domain --cpu--------------> HostDomain:  segments are anonymous files
     +-------cuda:N, cuda:M ...> CudaDomain:  segments are device memory, shared by descriptors too; a pool has one on
                                              each GPU that is named, with some of the KV heads of every block
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from fractions import Fraction

from pillion.config import KVNodeFlags
from pillion.errors import ConfigError
from pillion.kvstore.ledger.records import slots_of
from pillion.kvstore.memory.cuda_driver import CudaDevice, CudaDriver
from pillion.kvstore.memory.cuda_memory import CudaMemory, PinnedMemory
from pillion.kvstore.memory.cuda_segment import DeviceSegment
from pillion.kvstore.memory.memory import CUDA, HOST, HostMemory, PoolMemory
from pillion.kvstore.memory.segment import Segment, map_shared
from pillion.kvstore.memory.shards import MAX_SHARDS, Shards

log = logging.getLogger("pillion.kvnode")

# Size of a pool in host memory without --kv-pool-bytes.
DEFAULT_HOST_POOL_BYTES = 2**30
CPU = "cpu"


AnySegment = Segment | DeviceSegment


class HostDomain:
    """This host's memory. Its calls, as those of :class:`CudaDomain`, may take a second and more, so they are not for
    the event loop's thread, and they raise ConfigError if the domain has not enough memory left.

    Attributes:
        kind: "host" or "cuda".
        device_indexes, device_uuids: the GPU of each shard of a pool; for host memory, 0 and an empty one.
    """

    kind = HOST
    device_indexes: tuple[int, ...] = (0,)
    device_uuids: tuple[str, ...] = ("",)

    def __init__(self, flags: KVNodeFlags) -> None:
        self._flags = flags

    def pool_bytes(self, shards: Shards) -> int:
        """Returns the pool's size: ``--kv-pool-bytes``, or the memory that the domain has left for it."""
        return self._flags.kv_pool_bytes or DEFAULT_HOST_POOL_BYTES

    def place(self, device_uuid: str) -> int:
        """Returns the first of the shards that are on a GPU. Raises ConfigError if none is."""
        return 0

    def segment(self, size_bytes: int, shard: int = 0) -> AnySegment:
        """Makes fresh memory where a shard is."""
        return Segment(size_bytes)

    def memory(self, segments: Sequence[AnySegment], num_slots: int, shards: Shards) -> PoolMemory:
        """Makes a pool over a segment of each shard."""
        (segment,) = segments
        assert isinstance(segment, Segment)
        mapped: mmap.mmap = map_shared(segment.to_map, num_slots * shards.block_bytes)
        return HostMemory(mapped, num_slots, shards.block_bytes)

    def pinned(self, size_bytes: int) -> PinnedMemory:
        """Makes pinned host memory for this domain's GPU."""
        raise ConfigError("host memory is pinned for a GPU, and there is none")

    def close(self) -> None:
        """Closes the domain; nothing of it is used any more. Idempotent."""


class CudaDomain:
    """The memory of one GPU or several; see :class:`HostDomain`. A GPU may be named twice: it has two shards then."""

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

    def pool_bytes(self, shards: Shards) -> int:
        """Without a flag, each GPU gives the share of it that may be used, less all that is in use now."""
        left = {index: self._left(device) for index, device in self._by_index.items()}
        if len(self._devices) == 1:
            return self._flags.kv_pool_bytes or left[self.device_indexes[0]]
        # As many slots as the fullest GPU has room for.
        taken = dict.fromkeys(self._by_index, 0)
        for shard, index in enumerate(self.device_indexes):
            taken[index] += shards.shard_bytes(shard)
        if self._flags.kv_pool_bytes:
            slots = slots_of(self._flags.kv_pool_bytes, sum(taken.values()))
        else:
            slots = min(slots_of(left[index], size) for index, size in taken.items())
        return slots * shards.block_bytes

    def place(self, device_uuid: str) -> int:
        if not device_uuid:
            # A process that does not say where it computes.
            return 0
        if device_uuid not in self.device_uuids:
            named = ",".join(f"cuda:{index}" for index in self.device_indexes)
            raise ConfigError(
                f"a process computes on the GPU {device_uuid}, and this KV node has memory on {named} alone: name the"
                " GPU of each rank of its workers in --kv-device, or choose the GPU by CUDA_VISIBLE_DEVICES"
            )
        return self.device_uuids.index(device_uuid)

    def segment(self, size_bytes: int, shard: int = 0) -> AnySegment:
        return DeviceSegment(self._devices[shard], size_bytes)

    def kept(self, descriptors: Sequence[int], num_slots: int, shards: Shards) -> list[AnySegment]:
        """Maps the memory of each shard of a pool that an earlier process has made; the descriptors stay the caller's.
        Raises ConfigError where they are not that."""
        made: list[AnySegment] = []
        try:
            for shard, (device, descriptor) in enumerate(zip(self._devices, descriptors, strict=True)):
                made.append(DeviceSegment.kept(device, descriptor, num_slots * shards.shard_bytes(shard)))
        except BaseException:
            for segment in made:
                segment.close()
            raise
        return made

    def memory(self, segments: Sequence[AnySegment], num_slots: int, shards: Shards) -> PoolMemory:
        mappings = [segment.mapping for segment in segments if isinstance(segment, DeviceSegment)]
        return CudaMemory(mappings, num_slots, shards)

    def pinned(self, size_bytes: int) -> PinnedMemory:
        return PinnedMemory(self._devices[0], size_bytes)

    def close(self) -> None:
        for device in self._by_index.values():
            device.close()

    def _left(self, device: CudaDevice) -> int:
        """Bytes of a GPU for its part of the pool. Raises ConfigError if there are none and no flag says how many."""
        free, total = device.memory_info()
        log.info("CUDA device %d has %d bytes, %d of them free", device.index, total, free)
        share = self._flags.gpu_memory_utilization
        left = int(Fraction(str(share)) * total) - (total - free)
        if left <= 0 and not self._flags.kv_pool_bytes:
            raise ConfigError(
                f"nothing is left for KV on CUDA device {device.index}: {total - free} of its {total} bytes are "
                f"in use, and --gpu-memory-utilization {share} allows no more"
            )
        return left


Domain = HostDomain | CudaDomain


def open_domain(flags: KVNodeFlags) -> Domain:
    """Opens the domain that ``--kv-device`` names. Raises ConfigError if there is none, or the flags do not fit."""
    indexes = device_indexes(flags.kv_device)
    if not indexes:
        if flags.host_bytes:
            raise ConfigError(
                "--host-bytes is for a pool on a GPU (--kv-device cuda): here it would copy from host memory to host "
                "memory; raise --kv-pool-bytes instead"
            )
        return HostDomain(flags)
    if not 0 < flags.gpu_memory_utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization {flags.gpu_memory_utilization}: choose more than 0, at most 1")
    if flags.host_bytes < 0:
        raise ConfigError(f"--host-bytes {flags.host_bytes} is less than 0")
    return CudaDomain(flags, indexes)


def device_indexes(kv_device: str) -> tuple[int, ...]:
    """Reads "cpu" (none), "cuda" (0), "cuda:N" or several of these. Raises ConfigError on anything else."""
    if kv_device == CPU:
        return ()
    found = []
    for device in kv_device.split(","):
        name, colon, number = device.partition(":")
        if name != CUDA or (colon and not (number.isascii() and number.isdecimal())):
            raise ConfigError(f"--kv-device {kv_device!r} is not cpu, cuda, cuda:N, or several such as cuda:0,cuda:1")
        found.append(int(number or 0))
    if len(found) > MAX_SHARDS:
        raise ConfigError(f"--kv-device names {len(found)} GPUs; a pool can be on {MAX_SHARDS}")
    return tuple(found)
