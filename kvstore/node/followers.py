"""Those who follow the pool's blocks from outside: a bounded number of streams, each a place in the log of changes.

    asked --a place is free--> sent a message --all of it was in there--> pauses for GATHER_S, waits for changes
                                    ^   +-- more is missing: at once --+           |
                                    +----------------------------------------------+
    ended by: the caller, the node's end, a message that is not taken in time, a log that has moved on

What a follower is sent is decided by :class:`pillion.kvstore.ledger.block_log.FollowerStream`. Nothing that changes the
pool waits for a follower: it only sets a flag.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

from pillion.errors import Overloaded, Unavailable
from pillion.kvstore.ledger.block_log import FOLLOW_AGAIN_MS, BlockLog, FollowerStream
from pillion.kvstore.ledger.records import IndexEvent
from pillion.kvstore.ledger.tree import BlockTree
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Reading
from pillion.v1.kvnode_pb2 import BlockChanges, PoolFacts

# Changes that come within such a time after a message go into the next one: a message costs about as much as a commit.
GATHER_S = 0.02
# How long a follower may take for a message before its place is given away.
STALL_S = 30.0


class Followers:
    """The followers of one pool. Called on the node's loop alone.

    Args:
        tree: the pool's blocks; ``log`` has their changes.
        facts: see :class:`FollowerStream`.
        max_followers: more are refused.

    Attributes:
        log: for reading.
        dropped: followers that were too slow.
    """

    def __init__(
        self,
        tree: BlockTree,
        log: BlockLog,
        facts: Callable[[], PoolFacts | None],
        max_followers: int,
    ) -> None:
        self.log = log
        self.dropped = 0
        self._tree, self._facts = tree, facts
        self._max_followers = max_followers
        # Each is set when something is new for one follower.
        self._news: dict[asyncio.Event, None] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._news)

    def note(self, events: Iterable[IndexEvent]) -> None:
        """Logs the ledger's events, in order. O(events), and never waits."""
        last = self.log.last
        self.log.append(events)
        if self.log.last != last:
            self.wake()

    def wake(self) -> None:
        """Has all followers look for something new."""
        for news in self._news:
            news.set()

    def close(self) -> None:
        """Ends all streams, and takes no new ones. Idempotent."""
        self._closed = True
        self.wake()

    async def follow(self, epoch: int, number: int, send: Callable[[BlockChanges], Awaitable[None]]) -> None:
        """Sends a follower all that it lacks and all that comes, until it is cancelled.

        ``send`` returns when the message is on its way. Raises Overloaded beyond ``max_followers`` and for a follower
        that is too slow, Unavailable when the node ends.
        """
        if len(self) >= self._max_followers:
            raise Overloaded(f"{self._max_followers} followers read this node's changes already", FOLLOW_AGAIN_MS)
        news = asyncio.Event()
        self._news[news] = None
        try:
            stream = FollowerStream(self._tree, self.log, self._facts, epoch, number)
            await self._serve(stream, news, send)
        except Overloaded:
            self.dropped += 1
            raise
        finally:
            del self._news[news]

    async def _serve(
        self, stream: FollowerStream, news: asyncio.Event, send: Callable[[BlockChanges], Awaitable[None]]
    ) -> None:
        while not self._closed:
            news.clear()
            message = stream.next_message()
            if message is None:
                await news.wait()
                continue
            try:
                async with asyncio.timeout(STALL_S):
                    await send(message)
            except TimeoutError:
                raise Overloaded(f"this follower has taken nothing for {STALL_S} s", FOLLOW_AGAIN_MS) from None
            if not stream.more:
                await asyncio.sleep(GATHER_S)
        raise Unavailable("the KV node ends", FOLLOW_AGAIN_MS)

    def readings(self) -> Iterator[Reading]:
        """Yields the metrics."""
        yield names.KV_FOLLOWERS, (), len(self)
        yield names.KV_DROPPED_FOLLOWERS, (), self.dropped
