"""Keeps a mirror of a KV node's pool over lost connections, slow times and the node's restarts.

    follow from where the mirror stands --messages--> applied ... --the stream ends--> pause --> follow again
                                                        '--one does not fit--> forgotten --> pause --> follow again

The keepalive of the connection (:mod:`pillion.net.rpc`) ends a stream whose other side cannot be reached any more. It
proves no more than that: a node that can be reached and sends nothing keeps its stream, so a mirror that is ``current``
is as new as the last message, and nothing bounds how old that is.
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

# The pause before the stream is opened again is RETRY_S at first, and doubles up to MAX_RETRY_S.
RETRY_S = 0.1
MAX_RETRY_S = 5.0
# When a stream of changes ends with one of these errors, it is worth opening it again.
_PASSING = (Unavailable, Overloaded, DeadlineExceeded, Cancelled)


class BlockFollower:
    """Follows one node for one reader. The caller's loop makes all calls.

    Args:
        client: the node's client, which the caller closes.

    Attributes:
        mirror: what is known of the pool; it may be read between two messages.
        current: whether the stream is open, and the mirror whole.
        resumed: number of streams that went on where the one before had ended.
        snapshots: number of snapshots that were received whole.
        misfits: number of messages that did not fit the mirror, each of which is a defect.
    """

    def __init__(self, client: NodeClient) -> None:
        self.mirror = BlockMirror()
        self.current = False
        self.resumed = self.snapshots = self.misfits = 0
        self._client = client
        self._pause_s = RETRY_S

    async def follow(self) -> AsyncGenerator[BlockChanges, None]:
        """Yields every message once the mirror has it, and opens the stream again whenever it ends, without end.

        Raises PillionError where it is useless to open the stream again: the node refuses the caller, or does not know
        the call.
        """
        while True:
            try:
                async with contextlib.aclosing(self._stream()) as messages:
                    async for message in messages:
                        yield message
            except _PASSING as error:
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
                    log.error("what the KV node says does not fit, so all of it is read anew: %s", error.message)
                    raise Unavailable("the mirror was forgotten") from None
                self._count(message)
                yield message

    def _count(self, message: BlockChanges) -> None:
        changes = message.kind == BlockChanges.KIND_CHANGES
        self.snapshots += message.kind == BlockChanges.KIND_SNAPSHOT_END
        self.resumed += changes and not self.current
        self.current |= message.kind != BlockChanges.KIND_SNAPSHOT_PART
        if changes:
            # A snapshot alone is no success, because a follower that each snapshot leaves behind would ask for the next
            # at once.
            self._pause_s = RETRY_S
