"""Mirrors the blocks of a KV node's pool for a follower. Sans-IO (I9).

    nothing --snapshot parts, aside--> the snapshot's end: all of it at once --changes, by number--> ...
       ^                                                                             |
       +------ what the node says does not fit: forgotten, to be followed anew ------+

The mirror is the node's pool after change ``number`` of log ``log_epoch``. A number that does not follow, a block that
came twice or left without having come, and a count or digest that is not the node's are noticed with the message that
they come with, so a mirror never drifts unseen.
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
    """Says that a block of a pool came (``stored``) or went.

    Attributes:
        block_hash: its chain hash (32 bytes).
        parent: for a block that came, the hash of the block before it; empty for the first block of a chain.
    """

    block_hash: bytes
    stored: bool
    parent: bytes = b""


class BlockMirror:
    """Holds what is known of one node's pool.

    Attributes:
        blocks: the hash of each block's parent by the block's own hash, parents before their children.
        log_epoch, number: where the mirror stands; 0 as long as it knows nothing.
        pool: the node's name, namespace and block size; None as long as they are not known.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.log_epoch = self.number = 0
        self.pool: PoolFacts | None = None
        self._digest = 0
        # These are the blocks of a snapshot whose last part has not come yet.
        self._coming: dict[bytes, bytes] | None = None

    def begin(self) -> None:
        """Begins with a new stream; a snapshot that did not come whole is dropped."""
        self._coming = None

    def forget(self) -> None:
        """Forgets the node's blocks, so that the next stream brings a snapshot."""
        self.blocks, self._coming, self.pool = {}, None, None
        self.log_epoch = self.number = self._digest = 0

    def apply(self, message: BlockChanges) -> list[BlockChange]:
        """Applies the next message of a stream to the mirror. Returns its changes, in order; for a snapshot, the blocks
        of this part.

        Raises Internal where the message does not fit what is known. The mirror is of no use then: :meth:`forget` it,
        and follow anew.
        """
        changes = list(changes_of(message))
        if message.HasField("pool"):
            self.pool = message.pool
        if message.kind == BlockChanges.KIND_CHANGES:
            self._apply_changes(message, changes)
        else:
            self._apply_part(message, changes)
        return changes

    def prefix_blocks(self, hashes: Iterable[bytes]) -> int:
        """Returns how many blocks the node has of a prompt's chain of block hashes, from its first one on."""
        return sum(1 for _ in takewhile(self.blocks.__contains__, hashes))

    def check_integrity(self) -> None:
        """Raises Internal where a block's parent is missing or comes after it, or the digest is wrong. O(blocks)."""
        self._check_parents(self.blocks)
        if _digest(self.blocks) != self._digest:
            raise Internal("the mirror's digest is not that of its blocks")

    def _apply_changes(self, message: BlockChanges, changes: list[BlockChange]) -> None:
        if self._coming is not None:
            raise Internal("a snapshot was not brought to its end")
        if (message.log_epoch, message.number - len(changes)) != (self.log_epoch, self.number):
            raise Internal(f"changes end with number {message.number}, {self.number} is known, {len(changes)} came")
        for change in changes:
            if change.stored == (change.block_hash in self.blocks):
                raise Internal("a block came twice, or left without having come")
            self._digest ^= digest_share(change.block_hash)
            if not change.stored:
                del self.blocks[change.block_hash]
                continue
            if change.parent and change.parent not in self.blocks:
                raise Internal("a block came without the one before it")
            self.blocks[change.block_hash] = change.parent
        self.number = message.number
        if changes:
            self._check_state(message)

    def _apply_part(self, message: BlockChanges, changes: list[BlockChange]) -> None:
        coming = {} if self._coming is None else self._coming
        self._coming = coming
        coming.update((change.block_hash, change.parent) for change in changes)
        if message.kind != BlockChanges.KIND_SNAPSHOT_END:
            return
        self._check_parents(coming)
        self.blocks, self._coming = coming, None
        self.log_epoch, self.number = message.log_epoch, message.number
        self._digest = _digest(coming)
        self._check_state(message)

    def _check_state(self, message: BlockChanges) -> None:
        if (len(self.blocks), self._digest) != (message.blocks, message.digest):
            raise Internal(f"the node has {message.blocks} blocks, the mirror {len(self.blocks)} or others")

    @staticmethod
    def _check_parents(blocks: dict[bytes, bytes]) -> None:
        seen = {b""}
        for block_hash, parent in blocks.items():
            if parent not in seen:
                raise Internal("a block stands without the one before it")
            seen.add(block_hash)


def changes_of(message: BlockChanges) -> Iterator[BlockChange]:
    """Yields the changes of a message, in order; for a snapshot's part, its blocks. Raises InvalidRequest for hashes of
    another length."""
    for run in message.runs:
        parent = run.parent
        for block_hash in split_hashes(run.block_hashes):
            yield BlockChange(block_hash, not run.removed, b"" if run.removed else parent)
            parent = block_hash


def _digest(blocks: Iterable[bytes]) -> int:
    return reduce(xor, map(digest_share, blocks), 0)
