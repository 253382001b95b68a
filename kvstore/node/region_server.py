"""The node's side of shared regions (:mod:`pillion.kvstore.node.regions`): a connection each, over the attach socket.

process                                node
  | -- RegionHello ------------------> |
  |        ... others fill it ...      |  at most WAIT_S
  | <-- RegionReply + descriptor ----- |  state "fill" or "ready" (or an error, then the end)
  | -- RegionFilled -----------------> |  from who was to fill it
  | ============ the end ============> |  it uses the region no more
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Sequence
from typing import Any

from pillion.errors import ConfigError, DeadlineExceeded, InvalidRequest, PillionError
from pillion.kvstore.memory.domain import AnySegment
from pillion.kvstore.memory.node_memory import NodeMemory
from pillion.kvstore.node.attach import read_line, until_end
from pillion.kvstore.node.regions import FILL, Action, Dropped, Granted, Regions
from pillion.wire.kvnode import RegionHello, RegionReply, line_to_bytes, region_filled_from_line

log = logging.getLogger("pillion.kvnode")

# Longest time that somebody waits for a region to be filled: large weights may come from a slow disk.
WAIT_S = 1800.0


class RegionServer:
    """Of one node. ``regions`` is for tests."""

    def __init__(self, node_id: str, memory: NodeMemory) -> None:
        self.regions = Regions()
        self._node_id = node_id
        self._memory = memory
        self._ids = itertools.count(1)
        self._segments: dict[str, AnySegment] = {}
        self._waiting: dict[int, asyncio.Future[str]] = {}

    async def serve(self, sock: socket.socket, hello: RegionHello) -> None:
        """One connection, until it ends. Raises OSError where that fails."""
        user = next(self._ids)
        try:
            state = await self._granted(sock, user, hello)
            if not state:
                return
            segment = await self._segment(hello.region_key, hello.size_bytes)
            log.info("%s has region %s: %s", hello.component_id, hello.region_key[:16], state)
            self._answer(sock, RegionReply(state=state, mapped_bytes=segment.size_bytes), [segment.fileno()])
            if state == FILL:
                said = region_filled_from_line(await read_line(sock))
                if said.filled_bytes != hello.size_bytes:
                    raise InvalidRequest(f"{said.filled_bytes} of {hello.size_bytes} bytes were filled")
                self._do(self.regions.filled(user))
            await until_end(sock)
        except PillionError as error:
            log.warning("%s gets no region: %s", hello.component_id, error.message)
            self._answer(sock, RegionReply(error=error.message), [])
        finally:
            self._waiting.pop(user, None)
            self._do(self.regions.gone(user))

    def close(self) -> None:
        """Gives up the node's hold on all memory; no connection is served any more. Idempotent."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    async def _granted(self, sock: socket.socket, user: int, hello: RegionHello) -> str:
        """ "fill" or "ready"; empty where the other side went away first."""
        granted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[user] = granted
        self._do(self.regions.ask(user, hello.region_key, hello.size_bytes))
        if not granted.done():
            gone = asyncio.ensure_future(until_end(sock))
            try:
                both: set[asyncio.Future[Any]] = {granted, gone}
                await asyncio.wait(both, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    # An error of the connection is its end too.
                    gone.exception()
                    return ""
            finally:
                gone.cancel()
                await asyncio.wait({gone})
        if not granted.done():
            raise DeadlineExceeded(f"the region was not filled within {WAIT_S:.0f} s")
        return granted.result()

    async def _segment(self, key: str, size_bytes: int) -> AnySegment:
        """The region's memory, made for its first user. Whoever fills after a dead one gets the same."""
        if key in self._segments:
            return self._segments[key]
        try:
            segment = await self._memory.region(size_bytes)
        except ConfigError:
            idle = self.regions.drop_idle()
            if not idle:
                raise
            self._do(idle)
            segment = await self._memory.region(size_bytes)
        self._segments[key] = segment
        return segment

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Granted):
                future = self._waiting.get(action.user)
                if future is not None and not future.done():
                    future.set_result(action.state)
            elif isinstance(action, Dropped) and (segment := self._segments.pop(action.key, None)) is not None:
                segment.close()

    def _answer(self, sock: socket.socket, reply: RegionReply, fds: list[int]) -> None:
        domain = self._memory.domain
        reply = RegionReply(
            node_id=self._node_id,
            state=reply.state,
            memory_kind=domain.kind,
            device_uuid=domain.device_uuid,
            mapped_bytes=reply.mapped_bytes,
            error=reply.error,
        )
        if reply.error and not fds:
            # Also to one that was promised memory: it hears the end, and why.
            sock.send(line_to_bytes(reply))
        else:
            socket.send_fds(sock, [line_to_bytes(reply)], fds)
