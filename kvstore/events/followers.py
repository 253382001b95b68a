"""Followers of the pool's blocks: a limited number of streams, each a position in the log of changes.

    request --below the limit--> sent a message --it was not full--> pauses for GATHER_S, waits for changes
                                    ^   +-- more to send: at once --+           |
                                    +-------------------------------------------+
    ended by: the caller, the node's end, a stalled write, a log that has dropped the next changes

:class:`pillion.kvstore.events.block_log.FollowerStream` builds the messages. A change of the pool only sets a flag and
never waits for a follower.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

from pillion.errors import Overloaded, Unavailable
from pillion.kvstore.events.block_log import FOLLOW_AGAIN_MS, BlockLog, FollowerStream
from pillion.kvstore.ledger.records import IndexEvent
from pillion.kvstore.ledger.tree import BlockTree
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Reading
from pillion.v1.kvnode_pb2 import BlockChanges, FollowBlocksRequest, PoolFacts
from pillion.wire.attach import AttachHello

MAX_FOLLOWERS = 16
# Pause after a message, to batch changes: a message costs about as much as a commit.
GATHER_S = 0.02
# A follower that accepts no message for this long is dropped.
STALL_S = 30.0


class Followers:
    """The followers of one pool. Only the node's loop calls it.

    Args:
        tree: the pool's blocks.
        log: the changes of those blocks.
        node_id, kv_device: properties reported to followers.

    Attributes:
        log: the log of changes, for reading.
        dropped: number of followers dropped for being slow.
    """

    def __init__(
        self,
        tree: BlockTree,
        log: BlockLog,
        node_id: str = "",
        kv_device: str = "",
    ) -> None:
        self.log = log
        self.dropped = 0
        self._tree = tree
        self._node_id, self._kv_device = node_id, kv_device
        self._facts: PoolFacts | None = None
        # One event per follower, set when the pool has changed.
        self._wakeups: dict[asyncio.Event, None] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._wakeups)

    def note(self, events: Iterable[IndexEvent]) -> None:
        """Log the ledger's events, in order. O(events), never waits."""
        last = self.log.last
        self.log.append(events)
        if self.log.last != last:
            self._wake()

    def shaped(self, hello: AttachHello) -> None:
        """Report the pool's namespace and block size to all followers."""
        self._facts = PoolFacts(
            node_id=self._node_id,
            kv_namespace=bytes.fromhex(hello.namespace),
            block_tokens=hello.block_tokens,
            block_bytes=hello.block_bytes,
            kv_device=self._kv_device,
        )
        self._wake()

    def close(self) -> None:
        """End all streams and refuse new ones. Idempotent."""
        self._closed = True
        self._wake()

    def check_integrity(self) -> None:
        """Raise Internal unless the log matches the pool's blocks. O(blocks)."""
        self.log.check_integrity(self._tree)

    async def follow(self, request: FollowBlocksRequest, send: Callable[[BlockChanges], Awaitable[None]]) -> None:
        """Send a follower all changes after its position, until cancelled.

        ``send`` returns when the message is on its way. Raises Overloaded beyond MAX_FOLLOWERS and for a slow
        follower, Unavailable when the node ends.
        """
        if len(self) >= MAX_FOLLOWERS:
            raise Overloaded(f"{MAX_FOLLOWERS} followers already read this node's changes", FOLLOW_AGAIN_MS)
        wakeup = asyncio.Event()
        self._wakeups[wakeup] = None
        try:
            stream = FollowerStream(self._tree, self.log, lambda: self._facts, request.log_epoch, request.number)
            await self._serve(stream, wakeup, send)
        except Overloaded:
            self.dropped += 1
            raise
        finally:
            del self._wakeups[wakeup]

    def _wake(self) -> None:
        for wakeup in self._wakeups:
            wakeup.set()

    async def _serve(
        self, stream: FollowerStream, wakeup: asyncio.Event, send: Callable[[BlockChanges], Awaitable[None]]
    ) -> None:
        while not self._closed:
            wakeup.clear()
            message = stream.next_message()
            if message is None:
                await wakeup.wait()
                continue
            try:
                async with asyncio.timeout(STALL_S):
                    await send(message)
            except TimeoutError:
                raise Overloaded(f"this follower has read nothing for {STALL_S} s", FOLLOW_AGAIN_MS) from None
            if not stream.more:
                await asyncio.sleep(GATHER_S)
        raise Unavailable("the KV node is stopping", FOLLOW_AGAIN_MS)

    def readings(self) -> Iterator[Reading]:
        yield names.KV_FOLLOWERS, (), len(self)
        yield names.KV_DROPPED_FOLLOWERS, (), self.dropped
