"""Defines the memory domain of a KV node: this host's memory or another device's, its size, and how segments of it are
made.

open_domain --cpu------> HostDomain: segments are anonymous files
     '--------a device-> CudaDomain (pillion.kvstore.gpu.cuda_domain)
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from pillion.config import KVNodeFlags
from pillion.errors import ConfigError
from pillion.kvstore.memory.memory import HOST, HostMemory, PoolMemory
from pillion.kvstore.memory.segment import Segment, map_shared
from pillion.kvstore.memory.shards import Shards
from pillion.kvstore.tiers.tiers import Tier

# A pool in host memory has this size without --kv-pool-bytes.
DEFAULT_HOST_POOL_BYTES = 2**30
CPU = "cpu"


class MadeSegment(Protocol):
    """Represents memory that a node has made and that other processes map by its descriptor."""

    size_bytes: int

    def fileno(self) -> int:
        """Returns the descriptor to send."""

    def close(self) -> None:
        """Gives up the node's own hold on the memory; workers that map it keep it. Idempotent."""


class Domain(ABC):
    """Represents memory for a node's pool. The calls may take a second and more, so they must not run on the event
    loop's thread, and they raise ConfigError if the domain has not enough memory left.

    Attributes:
        kind: "host" or "cuda".
        device_indexes, device_uuids: the device of each shard of a pool; for host memory, 0 and an empty one.
    """

    kind: str
    device_indexes: tuple[int, ...]
    device_uuids: tuple[str, ...]

    @abstractmethod
    def division(self, block_bytes: int, kv_rows: int, kv_heads: int) -> Shards:
        """Divides blocks of ``kv_rows`` rows (layers, keys and values apart) of ``kv_heads`` pieces over the shards.
        Raises InvalidRequest where the blocks cannot be divided."""

    @abstractmethod
    def layout(self, namespace: str, division: Shards) -> str:
        """Returns a name for the contents of a pool that outlives its node: blocks of a namespace, divided like this
        over the domain."""

    @abstractmethod
    def pool_bytes(self, division: Shards) -> int:
        """Returns the pool's size: ``--kv-pool-bytes``, or the memory that the domain has left for it."""

    @abstractmethod
    def segment(self, size_bytes: int, shard: int = 0) -> MadeSegment:
        """Makes fresh memory on the device of a shard."""

    @abstractmethod
    def kept(self, descriptors: Sequence[int], num_slots: int, division: Shards) -> list[MadeSegment]:
        """Maps the memory of each shard of a pool that an earlier process has made; the descriptors stay the caller's.
        Raises ConfigError where they are not memory of this domain."""

    @abstractmethod
    def memory(self, segments: Sequence[MadeSegment], num_slots: int, division: Shards) -> PoolMemory:
        """Makes a pool over a segment of each shard."""

    @abstractmethod
    def buffers(self, block_bytes: int) -> Tier | None:
        """Makes the tier of host memory that blocks go to first when they leave the pool, where there is one."""

    @abstractmethod
    def close(self) -> None:
        """Closes the domain, of which nothing may be used any more. Idempotent."""

    def place(self, device_uuid: str) -> int:
        """Returns the first of the shards that are on a GPU. Raises ConfigError if none is; host memory is near to
        all."""
        return 0


class HostDomain(Domain):
    """Represents this host's memory."""

    kind = HOST
    device_indexes: tuple[int, ...] = (0,)
    device_uuids: tuple[str, ...] = ("",)

    def __init__(self, flags: KVNodeFlags) -> None:
        """Raises ConfigError for flags of a pool on a device."""
        if flags.host_bytes:
            raise ConfigError(
                "--host-bytes is for a pool on a GPU (--kv-device cuda): here it would copy from host memory to host "
                "memory; raise --kv-pool-bytes instead"
            )
        self._flags = flags

    def division(self, block_bytes: int, kv_rows: int, kv_heads: int) -> Shards:
        return Shards.whole(block_bytes)

    def layout(self, namespace: str, division: Shards) -> str:
        return namespace

    def pool_bytes(self, division: Shards) -> int:
        return self._flags.kv_pool_bytes or DEFAULT_HOST_POOL_BYTES

    def segment(self, size_bytes: int, shard: int = 0) -> MadeSegment:
        return Segment(size_bytes)

    def kept(self, descriptors: Sequence[int], num_slots: int, division: Shards) -> list[MadeSegment]:
        raise ConfigError("the host's memory has no descriptor but its segment's")

    def memory(self, segments: Sequence[MadeSegment], num_slots: int, division: Shards) -> PoolMemory:
        (segment,) = segments
        assert isinstance(segment, Segment)
        mapped: mmap.mmap = map_shared(segment.to_map, num_slots * division.block_bytes)
        return HostMemory(mapped, num_slots, division.block_bytes)

    def buffers(self, block_bytes: int) -> Tier | None:
        """Returns None, because the pool itself is in host memory."""
        return None

    def close(self) -> None:
        pass
