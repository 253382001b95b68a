"""A follower's mirror of the blocks in a KV node's pool. Sans-IO (I9).

    empty --snapshot parts, buffered--> the snapshot's end: all of it at once --changes, by number--> ...
       ^                                                                             |
       +------ a message does not fit: reset, to be followed from the start ---------+

The mirror is the node's pool after change ``number`` of log ``log_epoch``. A gap in the numbers, a block stored twice
or removed without being stored, and a count or digest that differs from the node's are detected with the message, so a
mirror never diverges unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import takewhile
from operator import xor

from pillion.errors import Internal
from pillion.kvstore.hashing import digest_share, split_hashes
from pillion.v1.kvnode_pb2 import BlockChanges, PoolFacts


@dataclass(frozen=True, slots=True)
class BlockChange:
    """Arrival (``stored``) or removal of a block.

    Attributes:
        block_hash: its chain hash (32 bytes).
        parent: of an arriving block, the hash of the block before it; empty for the first block of a chain.
    """

    block_hash: bytes
    stored: bool
    parent: bytes = b""


class BlockMirror:
    """The blocks of one node's pool.

    Attributes:
        blocks: parent hash by block hash, parents before their children.
        log_epoch, number: position in the node's log; 0 while empty.
        pool: properties of the pool, such as its node, namespace and block size; None until received.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.log_epoch = self.number = 0
        self.pool: PoolFacts | None = None
        self._digest = 0
        # Blocks of an incomplete snapshot.
        self._snapshot: dict[bytes, bytes] | None = None

    def begin(self) -> None:
        """Start a new stream, dropping an incomplete snapshot."""
        self._snapshot = None

    def forget(self) -> None:
        """Reset the mirror, so that the next stream starts with a snapshot."""
        self.blocks, self._snapshot, self.pool = {}, None, None
        self.log_epoch = self.number = self._digest = 0

    def apply(self, message: BlockChanges) -> list[BlockChange]:
        """Apply a stream's next message and return its changes, in order; for a snapshot, the blocks of this part.

        Raises Internal if the message does not fit. The mirror is then invalid: call :meth:`forget` and follow again.
        """
        changes = list(changes_of(message))
        if message.HasField("pool"):
            self.pool = message.pool
        if message.kind == BlockChanges.KIND_CHANGES:
            self._apply_changes(message, changes)
        else:
            self._apply_snapshot_part(message, changes)
        return changes

    def prefix_blocks(self, hashes: Iterable[bytes]) -> int:
        """Return how many leading blocks of a chain, given by their hashes, the node has."""
        return sum(1 for _ in takewhile(self.blocks.__contains__, hashes))

    def check_integrity(self) -> None:
        """Raise Internal if a block precedes or lacks its parent, or if the digest is wrong. O(blocks)."""
        self._check_parents(self.blocks)
        if _digest(self.blocks) != self._digest:
            raise Internal("the mirror's digest does not match its blocks")

    def _apply_changes(self, message: BlockChanges, changes: list[BlockChange]) -> None:
        if self._snapshot is not None:
            raise Internal("a snapshot was not completed")
        if (message.log_epoch, message.number - len(changes)) != (self.log_epoch, self.number):
            raise Internal(f"{len(changes)} changes up to number {message.number} do not follow change {self.number}")
        for change in changes:
            if change.stored == (change.block_hash in self.blocks):
                raise Internal("a block was added twice, or removed before it was added")
            self._digest ^= digest_share(change.block_hash)
            if not change.stored:
                del self.blocks[change.block_hash]
                continue
            if change.parent and change.parent not in self.blocks:
                raise Internal("a block came without its parent")
            self.blocks[change.block_hash] = change.parent
        self.number = message.number
        if changes:
            self._check_state(message)

    def _apply_snapshot_part(self, message: BlockChanges, changes: list[BlockChange]) -> None:
        snapshot = {} if self._snapshot is None else self._snapshot
        self._snapshot = snapshot
        snapshot.update((change.block_hash, change.parent) for change in changes)
        if message.kind != BlockChanges.KIND_SNAPSHOT_END:
            return
        self._check_parents(snapshot)
        self.blocks, self._snapshot = snapshot, None
        self.log_epoch, self.number = message.log_epoch, message.number
        self._digest = _digest(snapshot)
        self._check_state(message)

    def _check_state(self, message: BlockChanges) -> None:
        if (len(self.blocks), self._digest) != (message.blocks, message.digest):
            raise Internal(f"the node has {message.blocks} blocks, the mirror {len(self.blocks)} or different ones")

    @staticmethod
    def _check_parents(blocks: dict[bytes, bytes]) -> None:
        seen = {b""}
        for block_hash, parent in blocks.items():
            if parent not in seen:
                raise Internal("a block has no parent")
            seen.add(block_hash)


def changes_of(message: BlockChanges) -> Iterator[BlockChange]:
    """Yield the changes of a message, in order; the blocks of a part of a snapshot count as stored. Raises
    InvalidRequest for hashes of wrong length."""
    for run in message.runs:
        parent = run.parent
        for block_hash in split_hashes(run.block_hashes):
            yield BlockChange(block_hash, not run.removed, b"" if run.removed else parent)
            parent = block_hash


def _digest(blocks: Iterable[bytes]) -> int:
    return reduce(xor, map(digest_share, blocks), 0)
