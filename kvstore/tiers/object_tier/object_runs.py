"""Runs of blocks as objects: how blocks are joined, and an object's name and bytes. Sans-IO (I9).

    <namespace, 64 digits>/<segment, 64 digits>/<first block, 64 digits>-<4 digits of each following block>

    header, 2,048 bytes, little-endian: magic 8, version 4, blocks 4, block bytes 8, length of parent 4, zero 4,
    namespace 32, segment 32, the first block's parent 32, then hash 32 and payload checksum 8 of each block, zeros,
    checksum of all before 8; then the payloads

A run is a chain of blocks within one segment (SEGMENT_BLOCKS blocks, the unit of the index). Its name describes its
blocks, so one list request for a segment locates each of a prompt's blocks, whichever node wrote it, including nodes of
other clusters that share the bucket. Two clusters with the same run write the same object.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pillion.kvstore.hashing import HASH_BYTES, SEGMENT_BLOCKS
from pillion.kvstore.memory.memory import block_checksum
from pillion.kvstore.tiers.tiers import BlockName, CorruptBlock

MAGIC = b"PILLIONR"
VERSION = 1
HEADER_BYTES = 2048
# Max payload per object, unless a single block is bigger: large enough that latency is a small part of the transfer,
# small enough that a reader of a few blocks does not wait for many others.
MAX_RUN_BYTES = 16 * 2**20
# Bytes of each block's hash, except the first's, in an object's name; file-based services allow names of 255
# characters. One in 65,536 matches is false, which is detected when the object is read.
_TAG_BYTES = 2

_FIELDS = struct.Struct("<8sIIQI4x32s32s32s")
_ENTRY = struct.Struct("<32sQ")
_CHECKSUM = struct.Struct("<Q")
_NAME = re.compile(r"([0-9a-f]{64})-((?:[0-9a-f]{4})*)")


@dataclass(frozen=True, slots=True)
class RunName:
    """Contents of a run, as encoded in its object's name.

    Attributes:
        segment: hash of the segment's first block.
        first: hash of the run's first block.
        tags: leading bytes of the hash of each block after the first one.
    """

    segment: bytes
    first: bytes
    tags: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, names: Sequence[BlockName]) -> RunName:
        """Return the object name of a run of these blocks."""
        tags = tuple(name.hash[:_TAG_BYTES] for name in names[1:])
        return cls(names[0].segment, names[0].hash, tags)

    @classmethod
    def parse(cls, segment: bytes, text: str) -> RunName | None:
        """Parse the last part of an object's path; None if it is not the name of a run."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        packed = bytes.fromhex(match[2])
        tags = tuple(packed[at : at + _TAG_BYTES] for at in range(0, len(packed), _TAG_BYTES))
        return cls(segment, bytes.fromhex(match[1]), tags) if len(tags) < SEGMENT_BLOCKS else None

    def __len__(self) -> int:
        return 1 + len(self.tags)

    def __str__(self) -> str:
        return f"{self.first.hex()}-{b''.join(self.tags).hex()}"

    def leading(self, hashes: Sequence[bytes]) -> int:
        """Return how many of ``hashes`` the run has; the first of them is the run's first block."""
        for count, (tag, block_hash) in enumerate(zip(self.tags, hashes[1:], strict=False), 1):
            if not block_hash.startswith(tag):
                return count
        return min(len(self), len(hashes))


def split_runs(
    blocks: Iterable[tuple[BlockName, memoryview]], block_bytes: int
) -> list[list[tuple[BlockName, memoryview]]]:
    """Join blocks, in any order, into runs within one segment and of at most MAX_RUN_BYTES."""
    kept = {name.hash: (name, payload) for name, payload in blocks}
    child: dict[bytes, bytes] = {}
    for name, _ in kept.values():
        # If several blocks follow one, the others begin separate runs.
        if name.parent in kept and kept[name.parent][0].segment == name.segment:
            child.setdefault(name.parent, name.hash)
    heads = kept.keys() - set(child.values())
    max_blocks = _max_blocks(block_bytes)
    runs: list[list[tuple[BlockName, memoryview]]] = []
    for head in (block_hash for block_hash in kept if block_hash in heads):
        run: list[tuple[BlockName, memoryview]] = []
        at: bytes | None = head
        while at is not None:
            if len(run) == max_blocks:
                runs.append(run)
                run = []
            run.append(kept[at])
            at = child.get(at)
        runs.append(run)
    return runs


def _max_blocks(block_bytes: int) -> int:
    return max(1, min(SEGMENT_BLOCKS, MAX_RUN_BYTES // block_bytes))


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Layout of all objects of one namespace. ``namespace`` has 32 bytes."""

    namespace: bytes
    block_bytes: int

    def folder(self, segment: bytes) -> str:
        """Return the path prefix of all objects of a segment."""
        return f"{self.namespace.hex()}/{segment.hex()}"

    def path(self, run: RunName) -> str:
        """Return the path of a run's object."""
        return f"{self.folder(run.segment)}/{run}"

    def size_bytes(self, run: RunName) -> int:
        """Return the size of a run's object in bytes. Raises CorruptBlock for a name with too many blocks."""
        if len(run) > _max_blocks(self.block_bytes):
            raise CorruptBlock(f"its name has {len(run)} blocks, and a run has at most {_max_blocks(self.block_bytes)}")
        return HEADER_BYTES + len(run) * self.block_bytes

    def pack(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> bytearray:
        """Return the object of a run whose blocks have ``block_bytes`` each."""
        first = blocks[0][0]
        packed = bytearray(HEADER_BYTES + len(blocks) * self.block_bytes)
        _FIELDS.pack_into(
            packed, 0, MAGIC, VERSION, len(blocks), self.block_bytes, len(first.parent),
            self.namespace, first.segment, first.parent,
        )  # fmt: skip
        for index, (name, payload) in enumerate(blocks):
            _ENTRY.pack_into(packed, _FIELDS.size + index * _ENTRY.size, name.hash, name.checksum)
            begin = HEADER_BYTES + index * self.block_bytes
            packed[begin : begin + self.block_bytes] = payload.cast("B")
        checked = HEADER_BYTES - _CHECKSUM.size
        _CHECKSUM.pack_into(packed, checked, block_checksum(memoryview(packed)[:checked]))
        return packed

    def unpack(self, data: memoryview, run: RunName) -> dict[bytes, tuple[int, memoryview]]:
        """Return the checksum and payload of each block of an object, by its hash, with the payloads unchecked. Raises
        CorruptBlock unless it is an intact object of this run, version and size."""
        checked = HEADER_BYTES - _CHECKSUM.size
        if len(data) < HEADER_BYTES or _CHECKSUM.unpack_from(data, checked)[0] != block_checksum(data[:checked]):
            raise CorruptBlock("the header is damaged")
        magic, version, count, length, parent_bytes, namespace, segment, _ = _FIELDS.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise CorruptBlock(f"format version {version}, not {VERSION}")
        if (namespace, segment, length) != (self.namespace, run.segment, self.block_bytes):
            raise CorruptBlock("it belongs to another namespace or segment")
        if parent_bytes not in (0, HASH_BYTES) or count != len(run):
            raise CorruptBlock("it belongs to another run")
        if len(data) != HEADER_BYTES + count * self.block_bytes:
            raise CorruptBlock("it has another length")
        entries = [_ENTRY.unpack_from(data, _FIELDS.size + index * _ENTRY.size) for index in range(count)]
        hashes = [block_hash for block_hash, _ in entries]
        if hashes[0] != run.first or run.leading(hashes) != count:
            raise CorruptBlock("it belongs to another run")
        begins = range(HEADER_BYTES, len(data), self.block_bytes)
        payloads = (data[begin : begin + self.block_bytes] for begin in begins)
        return {block_hash: (checksum, part) for (block_hash, checksum), part in zip(entries, payloads, strict=True)}


def locate(runs: Iterable[RunName], hashes: Sequence[bytes]) -> Mapping[bytes, RunName]:
    """Return, by block hash, the run that has it, for blocks of a chain within one segment; if several runs have a
    block, the one with the most blocks after it."""
    index_of = {block_hash: index for index, block_hash in enumerate(hashes)}
    located: dict[bytes, tuple[int, RunName]] = {}
    for run in runs:
        begin = index_of.get(run.first)
        if begin is None:
            continue
        end = begin + run.leading(hashes[begin:])
        for block_hash in hashes[begin:end]:
            if block_hash not in located or located[block_hash][0] < end:
                located[block_hash] = end, run
    return {block_hash: run for block_hash, (_, run) in located.items()}


def locate_followers(
    runs: Iterable[RunName], hashes: Sequence[bytes], followers: Sequence[bytes]
) -> Mapping[bytes, RunName]:
    """Return, by block hash, the run that has it, for ``followers``: one candidate successor for each block of
    ``hashes``, which are of one chain and segment."""
    index_of = {block_hash: index for index, block_hash in enumerate(hashes)}
    begins, located = frozenset(followers), dict[bytes, RunName]()
    for run in runs:
        if run.first in begins:
            located[run.first] = run
        begin = index_of.get(run.first)
        if begin is None:
            continue
        count = run.leading(hashes[begin:])
        last = begin + count - 1
        if count < len(run) and last < len(followers) and followers[last].startswith(run.tags[count - 1]):
            located[followers[last]] = run
    return located
