"""Maps a KV node's shared memory other than host pools: pools on GPUs, and regions."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence

from pillion.errors import ConfigError, Unavailable
from pillion.kvstore.client.attachment import SharedMemory, asked
from pillion.kvstore.gpu.cuda_segment import DeviceMapping, map_device
from pillion.kvstore.gpu.regions import RegionGrant
from pillion.kvstore.memory.memory import HOST, address_of
from pillion.kvstore.memory.segment import map_shared
from pillion.wire.attach import (
    AttachedShard,
    AttachReply,
    RegionFilled,
    RegionHello,
    RegionReply,
    region_reply_from_line,
)
from pillion.wire.json_lines import line_to_bytes


class PoolShards:
    """A pool divided over GPUs: each shard has some KV heads of every block. A process maps the shards that it uses,
    for kernels of its first GPU.

    Attributes:
        shares: the KV heads of each shard.
    """

    divided = True

    def __init__(self, descriptors: Sequence[int], shards: Sequence[AttachedShard]) -> None:
        """``descriptors`` has one per shard; the caller closes them, after :meth:`close`."""
        self.shares = tuple(range(shard.first_head, shard.first_head + shard.heads) for shard in shards)
        self._descriptors, self._shards = descriptors, shards
        self._mapped: dict[int, DeviceMapping] = {}

    def shard(self, index: int) -> DeviceMapping:
        """Return the mapping of a shard. Raises ConfigError if this process's GPU cannot reach it."""
        if index not in self._mapped:
            shard = self._shards[index]
            fd = self._descriptors[index]
            self._mapped[index] = map_device(fd, shard.mapped_bytes, shard.device_uuid, reader_index=0)
        return self._mapped[index]

    def close(self) -> None:
        """Unmap the shards, which must be unused. Idempotent."""
        while self._mapped:
            self._mapped.popitem()[1].close()


class Region(SharedMemory):
    """A mapped region. Created by :func:`share_region`.

    Attributes:
        device_memory: the mapping of GPU memory, else None.
        address, size_bytes: its address (a device address on a GPU) and size.
        must_fill: True if this process must write every byte and then call :meth:`filled`; other processes may be
            waiting.
    """

    def __init__(
        self, sock: socket.socket, mapped: mmap.mmap | DeviceMapping, size_bytes: int, *, must_fill: bool
    ) -> None:
        super().__init__(sock, mapped)
        self.device_memory = mapped if isinstance(mapped, DeviceMapping) else None
        self.size_bytes = size_bytes
        self.must_fill = must_fill
        self.address = mapped.address if isinstance(mapped, DeviceMapping) else address_of(self.memory)

    def filled(self) -> None:
        """Report that all writes to the region have ended. Raises Unavailable if the node is gone; the caller may then
        start again with the restarted node."""
        if self.must_fill:
            self.must_fill = False
            try:
                self._sock.sendall(line_to_bytes(RegionFilled(filled_bytes=self.size_bytes)))
            except OSError as error:
                raise Unavailable(f"the KV node is gone: {error.strerror}") from None

    def close(self) -> None:
        """Stop using the region. If it was not filled, another process fills it. Idempotent."""
        self.unmap()
        self._sock.close()


def share_region(socket_path: str, key: str, size_bytes: int, timeout_s: float, *, device_uuid: str = "") -> Region:
    """Map the region ``key`` (64 hexadecimal digits) of the node behind ``socket_path``, to fill it, or to read it once
    it is filled.

    Blocks for up to ``timeout_s`` while another process fills it. ``device_uuid`` selects the GPU on a node with a pool
    on GPUs; each GPU has separate regions.

    Raises, in one line, ConfigError if the node refuses or lacks memory, and Unavailable if it is absent, does not
    answer or ends meanwhile.
    """
    hello = RegionHello(
        component_id=f"process-{os.getpid()}",
        region_key=key,
        size_bytes=size_bytes,
        device_uuid=device_uuid,
    )
    with asked(f"no region from the KV node at {socket_path}", socket_path, hello, timeout_s) as (sock, line, fds):
        reply = region_reply_from_line(line)
        if reply.error or len(fds) != 1:
            raise ConfigError(f"the KV node shares no region: {reply.error or 'its answer has no descriptor'}")
        on_host = reply.memory_kind == HOST
        mapped = map_shared(fds[0], size_bytes) if on_host else _map_device(fds[0], reply, size_bytes)
    sock.setblocking(True)
    return Region(sock, mapped, size_bytes, must_fill=reply.state == RegionGrant.FILL)


def map_pool(fds: Sequence[int], reply: AttachReply, size_bytes: int) -> DeviceMapping | PoolShards:
    """Map the pool behind the node's descriptors; shards of a divided pool are mapped later. Raises ConfigError."""
    if not reply.shards:
        return _map_device(fds[0], reply, size_bytes)
    heads = max(shard.first_head + shard.heads for shard in reply.shards)
    for shard in reply.shards:
        if shard.mapped_bytes * heads < size_bytes * shard.heads:
            raise ConfigError(
                f"the KV node shares {shard.mapped_bytes} bytes on a GPU, {size_bytes * shard.heads // heads} are"
                " needed"
            )
    return PoolShards(fds, reply.shards)


def _map_device(fd: int, reply: AttachReply | RegionReply, size_bytes: int) -> DeviceMapping:
    """Map the device memory behind a descriptor, at least ``size_bytes``. Raises ConfigError."""
    if reply.mapped_bytes < size_bytes:
        raise ConfigError(f"the KV node shares {reply.mapped_bytes} bytes, {size_bytes} are needed")
    return map_device(fd, reply.mapped_bytes, reply.device_uuid)
