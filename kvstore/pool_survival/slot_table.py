"""Table of committed blocks by slot, in memory that outlives the node.

    header   magic, version, pool id, number of slots, bytes of a block, namespace, check
    entry    block hash, parent's hash, checksum of the block's bytes, number, check       one for each slot

An entry consists of words of 8 bytes, each stored by one instruction, so a killed process leaves only whole words. An
entry is valid if its check matches the rest of it, the slot and the pool; otherwise the slot is empty:

    write    check := 0, then hash, parent, checksum, number, and the check last
    remove   check := 0

So a half-written entry is empty, a half-removed one is valid or empty, and none mixes two blocks. A slot's entry is
removed before the slot may be written again (:mod:`pillion.kvstore.pool_survival.surviving_blocks`).

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
# Version of the layout. A node of another version starts with an empty pool.
VERSION = 1
_MAGIC = int.from_bytes(b"PillionT", "little")
_HEADER = struct.Struct(f"=QQ{POOL_ID_BYTES}sQQ{HASH_BYTES}s")
_BODY = struct.Struct(f"={HASH_BYTES}s{HASH_BYTES}sQQ")
HEADER_WORDS = _HEADER.size // WORD_BYTES + 1
ENTRY_WORDS = _BODY.size // WORD_BYTES + 1
NO_PARENT = bytes(HASH_BYTES)


@dataclass(frozen=True, slots=True)
class SurvivingBlock:
    """A table entry with its slot.

    Attributes:
        parent: hash of the previous block, NO_PARENT for the first block of a chain.
        checksum: :func:`pillion.kvstore.memory.memory.block_checksum` of the block's bytes.
        number: increases with every entry written.
    """

    slot: int
    hash: bytes
    parent: bytes
    checksum: int
    number: int


def table_bytes(num_slots: int) -> int:
    """Return the size of a pool's table in bytes."""
    return (HEADER_WORDS + num_slots * ENTRY_WORDS) * WORD_BYTES


class SlotTable:
    """The table of one pool in ``words``, shared memory as unsigned words of 8 bytes. Used by one process at a time.

    Attributes:
        pool_id: identifies the pool's memory to workers that have mapped it.
        shape: slots, bytes per block and namespace of the pool.
    """

    def __init__(self, words: memoryview, pool_id: bytes, shape: PoolShape) -> None:
        self.pool_id, self.shape = pool_id, shape
        self._words = words
        self._number = 0

    @classmethod
    def create(cls, words: memoryview, pool_id: bytes, shape: PoolShape) -> SlotTable:
        """Create an empty table in zeroed memory. The shape's namespace has HASH_BYTES bytes."""
        table = cls(words, pool_id, shape)
        header = table._header()
        for index, word in enumerate(_words(header)):
            words[index] = word
        words[HEADER_WORDS - 1] = _check(header)
        return table

    @classmethod
    def open(cls, words: memoryview) -> SlotTable:
        """Open the table of an earlier process. Raises ConfigError if ``words`` is not a table of this version."""
        if len(words) < HEADER_WORDS:
            raise ConfigError("the stored memory is too short for a table of blocks")
        header = struct.pack(f"={HEADER_WORDS - 1}Q", *words[: HEADER_WORDS - 1])
        magic, version, pool_id, num_slots, block_bytes, namespace = _HEADER.unpack(header)
        if magic != _MAGIC or words[HEADER_WORDS - 1] != _check(header):
            raise ConfigError("the stored memory is not a table of blocks")
        if version != VERSION:
            raise ConfigError(f"the stored table of blocks has version {version}, this node needs {VERSION}")
        if len(words) * WORD_BYTES < table_bytes(num_slots):
            raise ConfigError("the stored table of blocks is too short for its pool")
        return cls(words, pool_id, PoolShape(num_slots, block_bytes, namespace.hex()))

    def forsake(self) -> None:
        """Prevent any later process from recovering the pool."""
        self._words[HEADER_WORDS - 1] = 0

    def write(self, slot: int, block_hash: bytes, parent: bytes, checksum: int) -> None:
        """Write the entry of a whole block in ``slot``, which stays unchanged until :meth:`remove`."""
        self.remove(slot)
        self._number += 1
        body = _BODY.pack(block_hash, parent, checksum, self._number)
        first = self._first_word(slot)
        for index, word in enumerate(_words(body), first):
            self._words[index] = word
        self._words[first + ENTRY_WORDS - 1] = self._entry_check(slot, body)

    def remove(self, slot: int) -> None:
        """Empty the entry of ``slot``."""
        self._words[self._first_word(slot) + ENTRY_WORDS - 1] = 0

    def read(self, slot: int) -> SurvivingBlock | None:
        """Return a slot's entry, or None if it is empty or incomplete."""
        first = self._first_word(slot)
        check = self._words[first + ENTRY_WORDS - 1]
        if not check:
            return None
        body = struct.pack(f"={ENTRY_WORDS - 1}Q", *self._words[first : first + ENTRY_WORDS - 1])
        if check != self._entry_check(slot, body):
            return None
        block_hash, parent, checksum, number = _BODY.unpack(body)
        return SurvivingBlock(slot, block_hash, parent, checksum, number)

    def blocks(self) -> list[SurvivingBlock]:
        """Return all entries in the order of writing, and empty incomplete ones. Later entries get greater numbers.
        O(slots)."""
        entries = []
        for slot in range(self.shape.num_slots):
            entry = self.read(slot)
            if entry is not None:
                entries.append(entry)
            elif self._words[self._first_word(slot) + ENTRY_WORDS - 1]:
                self.remove(slot)
        entries.sort(key=lambda entry: entry.number)
        if entries:
            self._number = max(self._number, entries[-1].number)
        return entries

    def _first_word(self, slot: int) -> int:
        return HEADER_WORDS + slot * ENTRY_WORDS

    def _header(self) -> bytes:
        shape = self.shape
        namespace = bytes.fromhex(shape.namespace)
        return _HEADER.pack(_MAGIC, VERSION, self.pool_id, shape.num_slots, shape.block_bytes, namespace)

    def _entry_check(self, slot: int, body: bytes) -> int:
        return _check(self.pool_id + struct.pack("=Q", slot) + body)


def _check(data: bytes) -> int:
    """Return the XXH3-64 of ``data``, mapping 0, the mark of an empty entry, to 1."""
    return xxhash.xxh3_64_intdigest(data) or 1


def _words(data: bytes) -> Iterator[int]:
    return (word for (word,) in struct.iter_unpack("=Q", data))
