"""Keeps the pool's newest changes by number, and decides what a follower is sent of them.

    the ledger's events --append--> BlockLog: changes first .. last of this epoch; older ones are forgotten
                                      |
    a follower says (epoch, number)   |
        known    ---------------------+--> the changes after that number
        unknown  --> a snapshot of the pool, which stands for a number --> the changes after that one
        left after by the log  --> refused; it may follow again

Every change has the next number of the log's epoch, and says how many blocks the pool has after it and their digest,
so that a follower notices at once when what it believes is not what the node has. A follower is a place in the log and,
until its snapshot has ended, a list of the blocks that were in the pool when it began. No change is queued for it, and
nothing that changes the pool waits for it. A snapshot ends early where the log forgets the changes that would follow
it: the rest of it would be sent for nothing.

Sans-IO (I9). All of it is called on the node's loop.
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

# One message to a follower has at most this many blocks: 128 KiB of hashes, and as much of parents at worst.
MAX_MESSAGE_BLOCKS = 4096
# A node keeps this many of the newest changes for its followers.
MAX_CHANGES = 65_536
# A follower that fell behind the log may follow again at once.
FOLLOW_AGAIN_MS = 100


class LoggedChange(NamedTuple):
    """Holds a change of the pool, with the number of blocks in the pool and their digest after it."""

    event: IndexEvent
    blocks: int
    digest: int


class BlockLog:
    """Keeps the newest changes of a pool that was empty when the log began.

    Args:
        epoch: the name of this log; it is never 0, and another one in each life of the node.
        max_changes: how many changes it keeps, at least 1.

    Attributes:
        last: number of the newest change; 0 where there was none.
        blocks, digest: number of blocks in the pool and their digest, after that change.
    """

    def __init__(self, epoch: int, max_changes: int = MAX_CHANGES) -> None:
        self.epoch = epoch
        self.max_changes = max_changes
        self.last = self.blocks = self.digest = 0
        # Change n is at place (n - 1) % max_changes.
        self._ring: list[LoggedChange] = []

    @property
    def first(self) -> int:
        """Gives the number of the oldest change that is kept; ``last`` + 1 where none is."""
        return self.last - len(self._ring) + 1

    def append(self, events: Iterable[IndexEvent]) -> None:
        """Gives the ledger's events the next numbers of the log. It takes O(1) for each."""
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
        """Returns whether the log still has all changes after ``number`` of an epoch."""
        return epoch == self.epoch and self.first - 1 <= number <= self.last

    def after(self, number: int, most: int) -> list[LoggedChange]:
        """Returns the changes after ``number``, at most ``most``. Raises Overloaded where one of them is forgotten."""
        self.require(number)
        end = min(self.last, number + most)
        return [self._ring[at % self.max_changes] for at in range(number, end)]

    def require(self, number: int) -> None:
        """Raises Overloaded where a change after ``number`` is forgotten."""
        if not self.keeps(self.epoch, number):
            raise Overloaded(
                f"this follower has seen change {number}, and the node knows changes {self.first} to {self.last}:"
                " follow again",
                FOLLOW_AGAIN_MS,
            )

    def check_integrity(self, tree: BlockTree) -> None:
        """Raises Internal unless the log's count and digest are those of the blocks in ``tree``. O(blocks)."""
        digest = 0
        for block_hash in tree.by_hash:
            digest ^= digest_share(block_hash)
        if (self.blocks, self.digest) != (len(tree), digest):
            raise Internal(f"the log of changes leads to {self.blocks} blocks, the pool has {len(tree)} or others")
        if len(self._ring) != min(self.last, self.max_changes):
            raise Internal(f"the log keeps {len(self._ring)} of {self.last} changes")


class FollowerStream:
    """Decides what one follower is sent, message by message.

    Args:
        tree: the pool's blocks.
        facts: what a follower has to know of the pool; None as long as the pool has no shape.
        epoch, number: where the follower stands: the log's epoch and the number of the last change that it knows.

    Attributes:
        more: whether the last message was full, so that the next one should follow at once.
    """

    def __init__(
        self, tree: BlockTree, log: BlockLog, facts: Callable[[], PoolFacts | None], epoch: int, number: int
    ) -> None:
        self._log, self._facts = log, facts
        self._facts_sent = self._opened = False
        self.more = False
        self._number = number
        self._snapshot: Iterator[Block] | None = None
        if not log.keeps(epoch, number):
            self._number, self._blocks, self._digest = log.last, log.blocks, log.digest
            # This list is a copy, so that the snapshot stands for one number; blocks never change their hash or parent.
            self._snapshot = iter(list(tree.by_hash.values()))

    def next_message(self) -> BlockChanges | None:
        """Returns the follower's next message, None where nothing is new. The first message is never None. Raises
        Overloaded where the log has forgotten changes that the follower lacks, or will lack after its snapshot."""
        message = self._next_changes() if self._snapshot is None else self._next_part(self._snapshot)
        if not self._facts_sent and (facts := self._facts()) is not None:
            message.pool.CopyFrom(facts)
            self._facts_sent = True
        elif self._opened and not message.runs and message.kind == BlockChanges.KIND_CHANGES:
            return None
        self._opened = True
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
    """Joins changes (stored, parent, hash) to runs: stored blocks that each follow the one before, and removed
    blocks."""
    runs: list[tuple[bool, bytes, list[bytes]]] = []
    for stored, parent, block_hash in changes:
        if runs and runs[-1][0] == stored and (not stored or parent == runs[-1][2][-1]):
            runs[-1][2].append(block_hash)
        else:
            runs.append((stored, parent if stored else b"", [block_hash]))
    return [
        BlockRun(removed=not stored, parent=parent, block_hashes=b"".join(hashes)) for stored, parent, hashes in runs
    ]
