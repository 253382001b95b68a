"""The memory domain of a KV node: this host's memory or one GPU's, its size, and how segments of it are made.

open_domain --cpu-->  HostDomain:  segments are anonymous files
     +-------cuda:N-> CudaDomain:  segments are device memory, shared by descriptors too
"""

from __future__ import annotations

import logging
import mmap
from fractions import Fraction

from pillion.config import KVNodeFlags
from pillion.errors import ConfigError
from pillion.kvstore.memory.cuda_driver import CudaDriver
from pillion.kvstore.memory.cuda_memory import CudaMemory, PinnedMemory
from pillion.kvstore.memory.cuda_segment import DeviceSegment
from pillion.kvstore.memory.memory import CUDA, HOST, HostMemory, PoolMemory
from pillion.kvstore.memory.segment import Segment, map_shared

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
        device_index, device_uuid: the GPU; 0 and empty for host memory.
    """

    kind = HOST
    device_index = 0
    device_uuid = ""

    def __init__(self, flags: KVNodeFlags) -> None:
        self._flags = flags

    def pool_bytes(self) -> int:
        """Returns the pool's size: ``--kv-pool-bytes``, or the memory that the domain has left for it."""
        return self._flags.kv_pool_bytes or DEFAULT_HOST_POOL_BYTES

    def segment(self, size_bytes: int) -> AnySegment:
        """Makes fresh memory."""
        return Segment(size_bytes)

    def memory(self, segment: AnySegment, num_slots: int, block_bytes: int) -> PoolMemory:
        """Makes a pool over a segment of this domain."""
        mapped: mmap.mmap = map_shared(segment.fileno(), num_slots * block_bytes)
        return HostMemory(mapped, num_slots, block_bytes)

    def pinned(self, size_bytes: int) -> PinnedMemory:
        """Makes pinned host memory for this domain's GPU."""
        raise ConfigError("host memory is pinned for a GPU, and there is none")

    def close(self) -> None:
        """Closes the domain; nothing of it is used any more. Idempotent."""


class CudaDomain:
    """One GPU's memory; see :class:`HostDomain`."""

    kind = CUDA

    def __init__(self, flags: KVNodeFlags, index: int) -> None:
        self._flags = flags
        self._device = CudaDriver().device(index)
        self.device_index, self.device_uuid = index, self._device.uuid

    def pool_bytes(self) -> int:
        """Without a flag this is the share of the device that may be used, less all that is in use now."""
        free, total = self._device.memory_info()
        log.info("CUDA device %d has %d bytes, %d of them free", self.device_index, total, free)
        if self._flags.kv_pool_bytes:
            return self._flags.kv_pool_bytes
        share = self._flags.gpu_memory_utilization
        left = int(Fraction(str(share)) * total) - (total - free)
        if left <= 0:
            raise ConfigError(
                f"nothing is left for KV on CUDA device {self.device_index}: {total - free} of its {total} bytes are "
                f"in use, and --gpu-memory-utilization {share} allows no more"
            )
        return left

    def segment(self, size_bytes: int) -> AnySegment:
        return DeviceSegment(self._device, size_bytes)

    def memory(self, segment: AnySegment, num_slots: int, block_bytes: int) -> PoolMemory:
        assert isinstance(segment, DeviceSegment)
        return CudaMemory(segment.mapping, num_slots, block_bytes)

    def pinned(self, size_bytes: int) -> PinnedMemory:
        return PinnedMemory(self._device, size_bytes)

    def close(self) -> None:
        self._device.close()


Domain = HostDomain | CudaDomain


def open_domain(flags: KVNodeFlags) -> Domain:
    """Opens the domain that ``--kv-device`` names. Raises ConfigError if there is none, or the flags do not fit."""
    index = device_index(flags.kv_device)
    if index is None:
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
    return CudaDomain(flags, index)


def device_index(kv_device: str) -> int | None:
    """Reads "cpu" (None), "cuda" (0) or "cuda:N". Raises ConfigError on anything else."""
    name, colon, number = kv_device.partition(":")
    if kv_device == CPU:
        return None
    if name != CUDA or (colon and not number.isdecimal()):
        raise ConfigError(f"--kv-device {kv_device!r} is not cpu, cuda or cuda:N")
    return int(number or 0)
