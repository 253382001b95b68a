"""Mirror of a KV node's pool that survives lost connections, backlogs and restarts of the node.

    follow from the mirror's position --messages--> applied ... --the stream ends--> pause --> follow again
                                                      '--one does not fit--> mirror reset --> pause --> follow again

The connection's keepalive (:mod:`pillion.net.rpc`) ends a stream to an unreachable node. A reachable node that sends
nothing keeps its stream, so a ``current`` mirror is as new as the last message, whose age is unbounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from pillion.errors import Cancelled, DeadlineExceeded, Internal, InvalidRequest, Overloaded, Unavailable
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.events.block_mirror import BlockMirror
from pillion.v1.kvnode_pb2 import BlockChanges

log = logging.getLogger("pillion.follower")

RETRY_S = 0.1
MAX_RETRY_S = 5.0


class BlockFollower:
    """Follows one node for one reader. Use from one event loop.

    Args:
        client: the node's client; the caller closes it.

    Attributes:
        mirror: the mirrored pool, readable between messages.
        current: True while the stream is open and the mirror complete.
        resumed: streams that continued where the previous one had ended.
        snapshots: complete snapshots received.
        misfits: messages inconsistent with the mirror, each of which is a bug.
    """

    def __init__(self, client: NodeClient) -> None:
        self.mirror = BlockMirror()
        self.current = False
        self.resumed = self.snapshots = self.misfits = 0
        self._client = client
        self._pause_s = RETRY_S

    async def follow(self) -> AsyncGenerator[BlockChanges, None]:
        """Yield every message after the mirror has applied it, reopening the stream whenever it ends, forever.

        Raises PillionError if reopening is useless: the node refuses the caller, or does not implement the call.
        """
        while True:
            try:
                async with contextlib.aclosing(self._stream()) as messages:
                    async for message in messages:
                        yield message
            except (Unavailable, Overloaded, DeadlineExceeded, Cancelled) as error:
                log.info("the stream of blocks ended: %s", error.message)
            finally:
                self.current = False
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, MAX_RETRY_S)

    async def _stream(self) -> AsyncGenerator[BlockChanges, None]:
        mirror = self.mirror
        mirror.begin()
        epoch, number = mirror.log_epoch, mirror.number
        async with contextlib.aclosing(self._client.follow_blocks(epoch, number)) as messages:
            async for message in messages:
                try:
                    mirror.apply(message)
                except (Internal, InvalidRequest) as error:
                    self.misfits += 1
                    mirror.forget()
                    log.error("the KV node's changes are inconsistent, so its blocks are read again: %s", error.message)
                    raise Unavailable("the mirror was reset") from None
                self._count(message)
                yield message

    def _count(self, message: BlockChanges) -> None:
        changes = message.kind == BlockChanges.KIND_CHANGES
        self.snapshots += message.kind == BlockChanges.KIND_SNAPSHOT_END
        self.resumed += changes and not self.current
        self.current |= message.kind != BlockChanges.KIND_SNAPSHOT_PART
        if changes:
            # Not reset by a snapshot: a follower overtaken after each snapshot would request the next one at once.
            self._pause_s = RETRY_S
