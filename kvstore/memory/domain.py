"""Defines the memory domain of a KV node: this host's memory or another device's, its size, and how segments of it are
made.

open_domain --cpu------> HostDomain: segments are anonymous files
     '--------a device-> CudaDomain (pillion.kvstore.gpu.cuda_domain)
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pillion.config import KVNodeFlags
from pillion.errors import ConfigError
from pillion.kvstore.memory.memory import HOST, HostMemory, PoolMemory
from pillion.kvstore.memory.segment import Segment, map_shared
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


class Division(Protocol):
    """Says how the blocks of a pool are divided over the shards of a domain.

    Attributes:
        block_bytes: bytes of a whole block.
        shares: the KV heads of each shard, in order.
    """

    @property
    def block_bytes(self) -> int: ...

    @property
    def shares(self) -> Sequence[range]: ...

    def shard_bytes(self, shard: int) -> int:
        """Returns the bytes of a block's part in a shard."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Describes the division of blocks that lie in one piece in one shard."""

    block_bytes: int

    @property
    def shares(self) -> Sequence[range]:
        return (range(1),)

    def shard_bytes(self, shard: int) -> int:
        return self.block_bytes


class Domain(Protocol):
    """Represents memory for a node's pool. The calls may take a second and more, so they must not run on the event
    loop's thread, and they raise ConfigError if the domain has not enough memory left.

    Attributes:
        kind: "host" or "cuda".
        device_indexes, device_uuids: the device of each shard of a pool; for host memory, 0 and an empty one.
    """

    kind: str
    device_indexes: tuple[int, ...]
    device_uuids: tuple[str, ...]

    def division(self, block_bytes: int, kv_rows: int, kv_heads: int) -> Division:
        """Divides blocks of ``kv_rows`` rows (layers, keys and values apart) of ``kv_heads`` pieces over the shards.
        Raises InvalidRequest where the blocks cannot be divided."""

    def layout(self, namespace: str, division: Division) -> str:
        """Returns a name for the contents of a pool that outlives its node: blocks of a namespace, divided like this
        over the domain."""

    def pool_bytes(self, division: Division) -> int:
        """Returns the pool's size: ``--kv-pool-bytes``, or the memory that the domain has left for it."""

    def segment(self, size_bytes: int, shard: int = 0) -> MadeSegment:
        """Makes fresh memory on the device of a shard."""

    def kept(self, descriptors: Sequence[int], num_slots: int, division: Division) -> list[MadeSegment]:
        """Maps the memory of each shard of a pool that an earlier process has made; the descriptors stay the caller's.
        Raises ConfigError where they are not memory of this domain."""

    def memory(self, segments: Sequence[MadeSegment], num_slots: int, division: Division) -> PoolMemory:
        """Makes a pool over a segment of each shard."""

    def buffers(self, block_bytes: int) -> Tier | None:
        """Makes the tier of host memory that blocks go to first when they leave the pool, where there is one."""

    def close(self) -> None:
        """Closes the domain, of which nothing may be used any more. Idempotent."""


class HostDomain:
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

    def division(self, block_bytes: int, kv_rows: int, kv_heads: int) -> Division:
        return Whole(block_bytes)

    def layout(self, namespace: str, division: Division) -> str:
        return namespace

    def pool_bytes(self, division: Division) -> int:
        return self._flags.kv_pool_bytes or DEFAULT_HOST_POOL_BYTES

    def segment(self, size_bytes: int, shard: int = 0) -> MadeSegment:
        return Segment(size_bytes)

    def kept(self, descriptors: Sequence[int], num_slots: int, division: Division) -> list[MadeSegment]:
        raise ConfigError("the host's memory has no descriptor but its segment's")

    def memory(self, segments: Sequence[MadeSegment], num_slots: int, division: Division) -> PoolMemory:
        (segment,) = segments
        assert isinstance(segment, Segment)
        mapped: mmap.mmap = map_shared(segment.to_map, num_slots * division.block_bytes)
        return HostMemory(mapped, num_slots, division.block_bytes)

    def buffers(self, block_bytes: int) -> Tier | None:
        """Returns None, because the pool itself is in host memory."""
        return None

    def close(self) -> None:
        pass
