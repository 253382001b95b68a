"""Defines the table of committed blocks that outlives its node. It says what is in each slot.

    header   magic, version, pool id, number of slots, bytes of a block, namespace, check
    entry    block hash, parent's hash, checksum of the block's bytes, number, check       one for each slot

An entry has words of 8 bytes, each stored in one instruction, so a process that is killed leaves whole words behind. An
entry counts while its check fits the rest of it, the slot and the pool; everything else is an empty slot:

    write    check := 0, then hash, parent, checksum, number, and the check last
    remove   check := 0

So an entry that was being written is empty, one that was being removed is there or empty, and none is ever mixed from
two blocks. When a slot may be written to again its entry is gone already
(:mod:`pillion.kvstore.pool_survival.surviving_blocks`).

The table does no I/O (I9): the memory is the caller's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from pillion.errors import ConfigError
from pillion.kvstore.hashing import HASH_BYTES
from pillion.kvstore.ledger.records import PoolShape

WORD_BYTES = 8
POOL_ID_BYTES = 16
# This number changes with every change of the table's layout: a node of another version begins with an empty pool.
VERSION = 1
_MAGIC = int.from_bytes(b"PillionT", "little")
_HEADER = struct.Struct(f"=QQ{POOL_ID_BYTES}sQQ{HASH_BYTES}s")
_BODY = struct.Struct(f"={HASH_BYTES}s{HASH_BYTES}sQQ")
_WORD = struct.Struct("=Q")
HEADER_WORDS = _HEADER.size // WORD_BYTES + 1
ENTRY_WORDS = _BODY.size // WORD_BYTES + 1
# The first block of a chain has this parent.
NO_PARENT = bytes(HASH_BYTES)


@dataclass(frozen=True, slots=True)
class SurvivingBlock:
    """Describes an entry of the table, with its slot.

    Attributes:
        parent: hash of the block before this block, NO_PARENT for the first block of a chain.
        checksum: :func:`pillion.kvstore.memory.memory.block_checksum` of the block's bytes.
        number: grows with every entry that is written.
    """

    slot: int
    hash: bytes
    parent: bytes
    checksum: int
    number: int


def table_bytes(num_slots: int) -> int:
    """Returns the size of the table of a pool."""
    return (HEADER_WORDS + num_slots * ENTRY_WORDS) * WORD_BYTES


class SlotTable:
    """Reads and writes the table in ``words``, shared memory that is cast to unsigned words of 8 bytes. One process at
    a time uses it.

    Attributes:
        pool_id: name of the pool's memory, for the workers that mapped it.
        shape: slots, bytes of a block and namespace of the pool.
    """

    def __init__(self, words: memoryview, pool_id: bytes, shape: PoolShape) -> None:
        self.pool_id, self.shape = pool_id, shape
        self._words = words
        self._number = 0

    @classmethod
    def create(cls, words: memoryview, pool_id: bytes, shape: PoolShape) -> SlotTable:
        """Makes an empty table in fresh memory, which is all zeros. The shape's namespace has HASH_BYTES bytes."""
        table = cls(words, pool_id, shape)
        header = table._header()
        for place, word in enumerate(_words(header)):
            words[place] = word
        words[HEADER_WORDS - 1] = _check(header)
        return table

    @classmethod
    def found(cls, words: memoryview) -> SlotTable:
        """Opens a table that an earlier process made. Raises ConfigError if ``words`` hold no table of this version."""
        if len(words) < HEADER_WORDS:
            raise ConfigError("what was kept is too short for a table of blocks")
        header = b"".join(_WORD.pack(words[place]) for place in range(HEADER_WORDS - 1))
        magic, version, pool_id, num_slots, block_bytes, namespace = _HEADER.unpack(header)
        if magic != _MAGIC or words[HEADER_WORDS - 1] != _check(header):
            raise ConfigError("what was kept is no table of blocks")
        if version != VERSION:
            raise ConfigError(f"the table of kept blocks is of version {version}, this node's of {VERSION}")
        if len(words) * WORD_BYTES < table_bytes(num_slots):
            raise ConfigError("the table of kept blocks is too short for its pool")
        return cls(words, pool_id, PoolShape(num_slots, block_bytes, namespace.hex()))

    def forsake(self) -> None:
        """Makes sure that no process recovers the pool from now on."""
        self._words[HEADER_WORDS - 1] = 0

    def write(self, slot: int, block_hash: bytes, parent: bytes, checksum: int) -> None:
        """Writes the entry which says that ``slot`` holds a block, which is whole and stays unchanged until
        :meth:`remove`."""
        self.remove(slot)
        self._number += 1
        body = _BODY.pack(block_hash, parent, checksum, self._number)
        first = self._place(slot)
        for place, word in enumerate(_words(body), first):
            self._words[place] = word
        self._words[first + ENTRY_WORDS - 1] = self._entry_check(slot, body)

    def remove(self, slot: int) -> None:
        """Empties the entry of ``slot``, which from now on holds no known block."""
        self._words[self._place(slot) + ENTRY_WORDS - 1] = 0

    def read(self, slot: int) -> SurvivingBlock | None:
        """Returns a slot's entry, or None if the entry is empty or was not written whole."""
        first = self._place(slot)
        check = self._words[first + ENTRY_WORDS - 1]
        if not check:
            return None
        body = b"".join(_WORD.pack(self._words[place]) for place in range(first, first + ENTRY_WORDS - 1))
        if check != self._entry_check(slot, body):
            return None
        block_hash, parent, checksum, number = _BODY.unpack(body)
        return SurvivingBlock(slot, block_hash, parent, checksum, number)

    def blocks(self) -> list[SurvivingBlock]:
        """Returns all entries in the order in which they were written, and empties the slots whose entries were not
        written whole. Later entries will have greater numbers. O(slots)."""
        found = []
        for slot in range(self.shape.num_slots):
            entry = self.read(slot)
            if entry is not None:
                found.append(entry)
            elif self._words[self._place(slot) + ENTRY_WORDS - 1]:
                self.remove(slot)
        found.sort(key=lambda entry: entry.number)
        if found:
            self._number = max(self._number, found[-1].number)
        return found

    def _place(self, slot: int) -> int:
        return HEADER_WORDS + slot * ENTRY_WORDS

    def _header(self) -> bytes:
        shape = self.shape
        namespace = bytes.fromhex(shape.namespace)
        return _HEADER.pack(_MAGIC, VERSION, self.pool_id, shape.num_slots, shape.block_bytes, namespace)

    def _entry_check(self, slot: int, body: bytes) -> int:
        return _check(self.pool_id + _WORD.pack(slot) + body)


def _check(data: bytes) -> int:
    """Returns the XXH3-64 of ``data``, but never 0, which stands for an empty entry."""
    return xxhash.xxh3_64_intdigest(data) or 1


def _words(data: bytes) -> Iterator[int]:
    return (word for (word,) in struct.iter_unpack("=Q", data))
