"""Defines the seam at which a room learns of all changes of a pool's blocks; the plain implementation ignores them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial

from pillion.config import KVNodeFlags
from pillion.errors import NotFound
from pillion.kvstore.ledger.records import IndexEvent
from pillion.kvstore.ledger.tree import BlockTree
from pillion.observability.metrics import Reading
from pillion.rooms import Seam, entered_one
from pillion.v1.kvnode_pb2 import BlockChanges, FollowBlocksRequest
from pillion.wire.attach import AttachHello


class BlockWatch:
    """Sees all changes of a pool's blocks, on the node's loop; no method except ``follow`` may wait. This class ignores
    the changes, and has no followers."""

    def shaped(self, hello: AttachHello) -> None:
        """Notes that the first worker has said how large a block is and what it holds."""

    def note(self, events: Iterable[IndexEvent]) -> None:
        """Notes that blocks came and went, in this order. O(events)."""

    async def follow(self, request: FollowBlocksRequest, send: Callable[[BlockChanges], Awaitable[None]]) -> None:
        """Sends a follower all changes that it lacks and all that come, until it is cancelled. Raises PillionError."""
        raise NotFound("this node's blocks cannot be followed: its installation lacks the room 'events'")

    def close(self) -> None:
        """Ends all streams, and takes no new ones. Idempotent."""

    def check_integrity(self) -> None:
        """Raises PillionError unless the changes that were seen lead to the pool's blocks."""

    def readings(self) -> Iterator[Reading]:
        """Yields the metrics of the pool's followers."""
        return iter(())


WATCH = Seam[Callable[[KVNodeFlags, BlockTree], BlockWatch]]("kvstore.node.watch")


def watch_of(flags: KVNodeFlags) -> Callable[[BlockTree], BlockWatch]:
    """Returns the function that makes the watch of a node's blocks, by its flags."""
    return partial(entered_one(WATCH), flags)
