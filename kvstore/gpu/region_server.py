"""Region connections of the attach socket (:mod:`pillion.kvstore.gpu.regions`).

process                                node
  | -- RegionHello ------------------> |
  |    ... another process fills it    |  at most FILL_TIMEOUT_S
  | <-- RegionReply + descriptor ----- |  state "fill" or "ready" (or an error, then the end)
  | -- RegionFilled -----------------> |  after "fill"
  | ============ the end ============> |  the process no longer uses the region
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Sequence
from typing import Any

from pillion.errors import ConfigError, DeadlineExceeded, InvalidRequest, PillionError
from pillion.kvstore.gpu.regions import Action, Dropped, Granted, RegionGrant, Regions
from pillion.kvstore.memory.domain import MadeSegment
from pillion.kvstore.memory.node_memory import NodeMemory
from pillion.kvstore.node.attach_server import read_line, until_end
from pillion.wire.attach import RegionHello, RegionReply, region_filled_from_line
from pillion.wire.json_lines import line_to_bytes

log = logging.getLogger("pillion.kvnode")

# How long a process waits for another one to fill a region.
FILL_TIMEOUT_S = 1800.0


class RegionServer:
    """All region connections of one node. ``regions`` is for tests."""

    def __init__(self, node_id: str, memory: NodeMemory) -> None:
        self.regions = Regions()
        self._node_id = node_id
        self._memory = memory
        self._ids = itertools.count(1)
        self._segments: dict[str, MadeSegment] = {}
        self._waiting: dict[int, asyncio.Future[str]] = {}

    async def serve(self, sock: socket.socket, hello: RegionHello) -> None:
        """Serve one connection until it ends. Raises OSError if it breaks."""
        user = next(self._ids)
        try:
            shard = self._memory.domain.shard_on(hello.device_uuid)
            # The regions of different GPUs are separate, even with equal keys.
            key = hello.region_key if shard == 0 else f"{hello.region_key} of shard {shard}"
            state = await self._wait_granted(sock, user, key, hello.size_bytes)
            if not state:
                return
            segment = await self._segment(key, hello.size_bytes, shard)
            log.info("%s has region %s: %s", hello.component_id, hello.region_key[:16], state)
            uuid = self._memory.domain.device_uuids[shard]
            self._answer(sock, [segment.fileno()], state=state, mapped_bytes=segment.size_bytes, device_uuid=uuid)
            if state == RegionGrant.FILL:
                message = region_filled_from_line(await read_line(sock))
                if message.filled_bytes != hello.size_bytes:
                    raise InvalidRequest(f"{message.filled_bytes} of {hello.size_bytes} bytes were filled")
                self._apply(self.regions.filled(user))
            await until_end(sock)
        except PillionError as error:
            log.warning("%s gets no region: %s", hello.component_id, error.message)
            # A process that has the memory already gets it as well, as the reason why its connection ends.
            self._answer(sock, [], error=error.message)
        finally:
            self._waiting.pop(user, None)
            self._apply(self.regions.remove_user(user))

    @property
    def waiting(self) -> int:
        """Number of connections that wait for a region or were granted one."""
        return len(self._waiting)

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the regions that have memory."""
        return frozenset(self._segments)

    def close(self) -> None:
        """Close the memory of all regions, after the last connection has ended. Idempotent."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    async def _wait_granted(self, sock: socket.socket, user: int, key: str, size_bytes: int) -> str:
        """Wait until the region is granted; return its state (:class:`RegionGrant`), or "" if the peer is gone."""
        granted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[user] = granted
        self._apply(self.regions.ask(user, key, size_bytes))
        if not granted.done():
            gone = asyncio.ensure_future(until_end(sock))
            try:
                ends: set[asyncio.Future[Any]] = {granted, gone}
                await asyncio.wait(ends, timeout=FILL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    gone.exception()
                    return ""
            finally:
                gone.cancel()
                await asyncio.wait({gone})
        if not granted.done():
            raise DeadlineExceeded(f"the region was not filled within {FILL_TIMEOUT_S:.0f} s")
        return granted.result()

    async def _segment(self, key: str, size_bytes: int, shard: int) -> MadeSegment:
        """Return the region's memory on the GPU of a shard, created for its first user. A second filler gets the same
        memory."""
        if key in self._segments:
            return self._segments[key]
        try:
            segment = await self._memory.region(size_bytes, shard)
        except ConfigError:
            idle = self.regions.drop_idle()
            if not idle:
                raise
            self._apply(idle)
            segment = await self._memory.region(size_bytes, shard)
        self._segments[key] = segment
        return segment

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Granted):
                future = self._waiting.get(action.user)
                if future is not None and not future.done():
                    future.set_result(action.state)
            elif isinstance(action, Dropped) and (segment := self._segments.pop(action.key, None)) is not None:
                segment.close()

    def _answer(self, sock: socket.socket, fds: list[int], **fields: Any) -> None:
        reply = RegionReply(node_id=self._node_id, memory_kind=self._memory.domain.kind, **fields)
        socket.send_fds(sock, [line_to_bytes(reply)], fds)
