"""Memory domains of a KV node: host memory or GPU memory, its size, and the creation of segments in it.

open_domain --cpu------> HostDomain: segments are anonymous files
     '--------a device-> CudaDomain (pillion.kvstore.gpu.cuda_domain)
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from pillion.config import KVNodeFlags
from pillion.errors import ConfigError
from pillion.kvstore.memory.memory import HOST, HostMemory, PoolMemory
from pillion.kvstore.memory.segment import Segment, map_shared
from pillion.kvstore.memory.shards import Shards

DEFAULT_HOST_POOL_BYTES = 2**30
CPU = "cpu"


class MadeSegment(Protocol):
    """Memory created by a node, which other processes map by its descriptor."""

    size_bytes: int

    def fileno(self) -> int:
        """Return the descriptor to send."""

    def close(self) -> None:
        """Close the node's own descriptor and mapping; workers' mappings stay. Idempotent."""


class Domain(ABC):
    """Memory for a node's pool. Calls may take a second or more, so do not make them on the event loop; they raise
    ConfigError if the domain lacks memory.

    Attributes:
        kind: "host" or "cuda".
        device_indexes, device_uuids: the device of each shard of a pool; (0,) and ("",) for host memory.
    """

    kind: str
    device_indexes: tuple[int, ...]
    device_uuids: tuple[str, ...]

    @abstractmethod
    def division(self, block_bytes: int, kv_rows: int, kv_heads: int) -> Shards:
        """Divide blocks over the shards by KV heads. A block has ``kv_rows`` rows (per layer: keys, values) of
        ``kv_heads`` pieces. Raises InvalidRequest if it cannot be divided."""

    @abstractmethod
    def layout_id(self, namespace: str, division: Shards) -> str:
        """Return an identifier for the contents of a surviving pool: a namespace's blocks in this division over the
        domain."""

    @abstractmethod
    def pool_bytes(self, division: Shards) -> int:
        """Return the pool's size: ``--kv-pool-bytes``, or the memory left in the domain."""

    @abstractmethod
    def segment(self, size_bytes: int, shard: int = 0) -> MadeSegment:
        """Allocate memory on the device of a shard."""

    @abstractmethod
    def map_descriptors(self, descriptors: Sequence[int], num_slots: int, division: Shards) -> list[MadeSegment]:
        """Map the pool of an earlier process, given one descriptor per shard, which the caller closes. Raises
        ConfigError if they are not memory of this domain."""

    @abstractmethod
    def memory(self, segments: Sequence[MadeSegment], num_slots: int, division: Shards) -> PoolMemory:
        """Create a pool over one segment per shard."""

    @abstractmethod
    def pinned_memory(self) -> tuple[memoryview, Callable[[], None]] | None:
        """Allocate pinned host memory for the tier below the pool, and return it with a function that frees it; None if
        there is no such tier. Raises ConfigError."""

    @abstractmethod
    def close(self) -> None:
        """Close the domain, which must be unused. Idempotent."""

    def shard_on(self, device_uuid: str) -> int:
        """Return the first shard on a GPU, 0 for host memory. Raises ConfigError if the pool has no shard on it."""
        return 0


class HostDomain(Domain):
    """This host's memory."""

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

    def layout_id(self, namespace: str, division: Shards) -> str:
        return namespace

    def pool_bytes(self, division: Shards) -> int:
        return self._flags.kv_pool_bytes or DEFAULT_HOST_POOL_BYTES

    def segment(self, size_bytes: int, shard: int = 0) -> MadeSegment:
        return Segment(size_bytes)

    def map_descriptors(self, descriptors: Sequence[int], num_slots: int, division: Shards) -> list[MadeSegment]:
        raise ConfigError("a pool in host memory is recovered from its own segment")

    def memory(self, segments: Sequence[MadeSegment], num_slots: int, division: Shards) -> PoolMemory:
        (segment,) = segments
        assert isinstance(segment, Segment)
        mapped: mmap.mmap = map_shared(segment.to_map, num_slots * division.block_bytes)
        return HostMemory(mapped, num_slots, division.block_bytes)

    def pinned_memory(self) -> tuple[memoryview, Callable[[], None]] | None:
        """Return None, since the pool itself is in host memory."""
        return None

    def close(self) -> None:
        pass
