"""Numbered log of the pool's newest changes, and the messages that a follower gets from it.

    the ledger's events --append--> BlockLog: changes first .. last of this epoch; older ones are dropped
                                      |
    a follower sends (epoch, number)  |
        in the log   -----------------+--> the changes after that number
        not in it    --> a snapshot of the pool, as of a number --> the changes after it
        overtaken by the log --> refused; it may follow again

Every change has the next number of the log's epoch, the number of blocks in the pool after it, and their digest, so
that a follower detects any divergence at once. A follower is a position in the log and, during a snapshot, a list of
the blocks that were present when the snapshot began. Nothing is queued per follower, and no change of the pool waits
for one. A snapshot is aborted if the log drops the changes that would follow it.

Sans-IO (I9). Called on the node's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from pillion.errors import Internal, Overloaded
from pillion.kvstore.hashing import digest_share
from pillion.kvstore.ledger.records import Block, IndexEvent
from pillion.kvstore.ledger.tree import BlockTree
from pillion.v1.kvnode_pb2 import BlockChanges, BlockRun, PoolFacts

# Blocks per message: 128 KiB of hashes, and at worst as many of their parents.
MAX_MESSAGE_BLOCKS = 4096
MAX_CHANGES = 65_536
# Delay that a refused follower is told to wait before it follows again.
FOLLOW_AGAIN_MS = 100


class LoggedChange(NamedTuple):
    """A change of the pool, with the number of blocks in the pool after it and their digest."""

    event: IndexEvent
    blocks: int
    digest: int


class BlockLog:
    """Log of the newest changes of a pool that was empty when the log began.

    Args:
        epoch: identifies this log; nonzero, and different in each process of the node.
        max_changes: capacity, at least 1.

    Attributes:
        last: number of the newest change; 0 for none.
        blocks, digest: number of blocks in the pool after that change, and their digest.
    """

    def __init__(self, epoch: int, max_changes: int = MAX_CHANGES) -> None:
        self.epoch = epoch
        self.max_changes = max_changes
        self.last = self.blocks = self.digest = 0
        # Change n is at index (n - 1) % max_changes.
        self._ring: list[LoggedChange] = []

    @property
    def first(self) -> int:
        """Number of the oldest change in the log; ``last`` + 1 if empty."""
        return self.last - len(self._ring) + 1

    def append(self, events: Iterable[IndexEvent]) -> None:
        """Append the ledger's events. O(1) per event."""
        for event in events:
            self.blocks += 1 if event.here else -1
            self.digest ^= digest_share(event.block_hash)
            change = LoggedChange(event, self.blocks, self.digest)
            if len(self._ring) < self.max_changes:
                self._ring.append(change)
            else:
                self._ring[self.last % self.max_changes] = change
            self.last += 1

    def keeps(self, epoch: int, number: int) -> bool:
        """Return whether the log still has all changes after ``number`` of an epoch."""
        return epoch == self.epoch and self.first - 1 <= number <= self.last

    def after(self, number: int, limit: int) -> list[LoggedChange]:
        """Return up to ``limit`` changes after ``number``. Raises Overloaded if one of them was dropped."""
        self.require(number)
        end = min(self.last, number + limit)
        return [self._ring[at % self.max_changes] for at in range(number, end)]

    def require(self, number: int) -> None:
        """Raise Overloaded if a change after ``number`` was dropped."""
        if not self.keeps(self.epoch, number):
            raise Overloaded(
                f"this follower is at change {number}, and the log only has changes {self.first} to {self.last}:"
                " follow again",
                FOLLOW_AGAIN_MS,
            )

    def check_integrity(self, tree: BlockTree) -> None:
        """Raise Internal unless the log's count and digest are those of the blocks in ``tree``. O(blocks)."""
        digest = 0
        for block_hash in tree.by_hash:
            digest ^= digest_share(block_hash)
        if (self.blocks, self.digest) != (len(tree), digest):
            raise Internal(
                f"the log of changes leads to {self.blocks} blocks, the pool has {len(tree)} or different ones"
            )
        if len(self._ring) != min(self.last, self.max_changes):
            raise Internal(f"the log keeps {len(self._ring)} of {self.last} changes")


class FollowerStream:
    """Builds one follower's messages.

    Args:
        tree: the pool's blocks.
        facts: returns the pool's properties for followers; None while the pool has no shape.
        epoch, number: the follower's position: the log's epoch and the number of the last change that it has.

    Attributes:
        more: True if the last message was full, so that the next one should follow at once.
    """

    def __init__(
        self, tree: BlockTree, log: BlockLog, facts: Callable[[], PoolFacts | None], epoch: int, number: int
    ) -> None:
        self._log, self._facts = log, facts
        self._facts_sent = self._started = False
        self.more = False
        self._number = number
        self._snapshot: Iterator[Block] | None = None
        if not log.keeps(epoch, number):
            self._number, self._blocks, self._digest = log.last, log.blocks, log.digest
            # A copy, so that the snapshot matches one number; blocks never change their hash or parent.
            self._snapshot = iter(list(tree.by_hash.values()))

    def next_message(self) -> BlockChanges | None:
        """Return the follower's next message, None if there is nothing new; never None the first time. Raises
        Overloaded if the log has dropped changes that the follower needs, now or after its snapshot."""
        message = self._next_changes() if self._snapshot is None else self._next_part(self._snapshot)
        if not self._facts_sent and (facts := self._facts()) is not None:
            message.pool.CopyFrom(facts)
            self._facts_sent = True
        elif self._started and not message.runs and message.kind == BlockChanges.KIND_CHANGES:
            return None
        self._started = True
        return message

    def _next_part(self, snapshot: Iterator[Block]) -> BlockChanges:
        self._log.require(self._number)
        part = list(islice(snapshot, MAX_MESSAGE_BLOCKS))
        self.more = True
        runs = to_runs((True, block.parent_hash, block.hash) for block in part)
        message = BlockChanges(log_epoch=self._log.epoch, number=self._number, runs=runs)
        if len(part) == MAX_MESSAGE_BLOCKS:
            message.kind = BlockChanges.KIND_SNAPSHOT_PART
            return message
        self._snapshot = None
        message.kind = BlockChanges.KIND_SNAPSHOT_END
        message.blocks, message.digest = self._blocks, self._digest
        return message

    def _next_changes(self) -> BlockChanges:
        changes = self._log.after(self._number, MAX_MESSAGE_BLOCKS)
        self._number += len(changes)
        self.more = len(changes) == MAX_MESSAGE_BLOCKS
        message = BlockChanges(log_epoch=self._log.epoch, number=self._number)
        if changes:
            message.runs.extend(to_runs((event.here, event.parent, event.block_hash) for event, _, _ in changes))
            message.blocks, message.digest = changes[-1].blocks, changes[-1].digest
        return message


def to_runs(changes: Iterable[tuple[bool, bytes, bytes]]) -> list[BlockRun]:
    """Join changes (stored, parent, hash) into runs, each a chain of stored blocks or a list of removed ones."""
    runs: list[tuple[bool, bytes, list[bytes]]] = []
    for stored, parent, block_hash in changes:
        if runs and runs[-1][0] == stored and (not stored or parent == runs[-1][2][-1]):
            runs[-1][2].append(block_hash)
        else:
            runs.append((stored, parent if stored else b"", [block_hash]))
    return [
        BlockRun(removed=not stored, parent=parent, block_hashes=b"".join(hashes)) for stored, parent, hashes in runs
    ]
