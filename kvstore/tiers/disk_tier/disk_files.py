"""Blocks as files: the file format, and the folder that one node owns.

    FOLDER/pillion-kv.lock                                   locked (flock) while a node uses the folder
    FOLDER/<namespace, 16 digits>/<hash, 2 digits>/<hash, 64 digits>.kv
    ...                                             .kv.part while being written; renamed when complete

    header, 192 bytes, little-endian: magic 8, version 4, length of parent 4, namespace 32, hash 32, parent 32,
    segment 32, payload bytes 8, payload checksum 8, zero 24, checksum of all before 8; then the payload

A file's modification time, in nanoseconds, is its LRU stamp. Nothing is synced: after a power cut a file may be short
or damaged, which the header, the length or the payload's checksum reveals. Only files named like blocks in this
namespace's folder are ever removed. All functions of this module block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from pillion.errors import ConfigError
from pillion.kvstore.hashing import HASH_BYTES
from pillion.kvstore.memory.memory import block_checksum
from pillion.kvstore.tiers.tiers import BlockName, CorruptBlock

MAGIC = b"PILLIONB"
VERSION = 1
HEADER_BYTES = 192
LOCK_NAME = "pillion-kv.lock"
SUFFIX = ".kv"
# Unit of disk space.
PAGE_BYTES = 4096
# Errors of a full disk.
NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT))
# Subfolders of a namespace, by the first byte of a hash.
SHARDS = 256

_FIELDS = struct.Struct("<8sII32s32s32s32sQQ24x")
_OUR_NAME = re.compile(r"[0-9a-f]{64}\.kv(\.part)?")


class Foreign(Exception):  # noqa: N818
    """The file is intact but belongs to another namespace."""


@dataclass(frozen=True, slots=True)
class BlockFileLayout:
    """Layout of all files of one tier. ``namespace`` has 32 bytes."""

    namespace: bytes
    block_bytes: int

    @property
    def file_bytes(self) -> int:
        """Disk space per block."""
        return -(-(HEADER_BYTES + self.block_bytes) // PAGE_BYTES) * PAGE_BYTES

    def pack(self, name: BlockName) -> bytes:
        """Return the header of a block's file."""
        fields = _FIELDS.pack(
            MAGIC, VERSION, len(name.parent), self.namespace, name.hash, name.parent, name.segment,
            self.block_bytes, name.checksum,
        )  # fmt: skip
        return fields + block_checksum(fields).to_bytes(8, "little")

    def unpack(self, header: bytes, block_hash: bytes) -> BlockName:
        """Decode the header of a block's file. Raises Foreign for another namespace, CorruptBlock unless it is an
        intact header of ``block_hash`` in this version and size."""
        fields, checksum_bytes = header[: _FIELDS.size], header[_FIELDS.size :]
        if len(header) != HEADER_BYTES or int.from_bytes(checksum_bytes, "little") != block_checksum(fields):
            raise CorruptBlock("the header is damaged")
        magic, version, parent_bytes, namespace, stored_hash, parent, segment, length, checksum = _FIELDS.unpack(fields)
        if namespace != self.namespace:
            raise Foreign
        if magic != MAGIC or version != VERSION:
            raise CorruptBlock(f"format version {version}, not {VERSION}")
        if stored_hash != block_hash or length != self.block_bytes or parent_bytes not in (0, HASH_BYTES):
            raise CorruptBlock("it belongs to another block")
        return BlockName(stored_hash, parent[:parent_bytes], segment, checksum)


class DiskFolder:
    """A folder used by this process alone, created if missing. Raises ConfigError if it is not writable or another node
    uses it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = -1
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(f"--disk-path {self.path}: another node uses this folder") from None
        except OSError as error:
            self.close()
            raise ConfigError(f"--disk-path {self.path}: {error.strerror}") from None

    def close(self) -> None:
        """Unlock the folder for other nodes. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class BlockFiles:
    """Files of one namespace in a folder. Raises ConfigError if its subfolders cannot be created; if the disk is just
    full, a later write creates them."""

    def __init__(self, folder: DiskFolder, layout: BlockFileLayout) -> None:
        self.layout = layout
        self.root = folder.path / layout.namespace.hex()[:16]
        self._root = f"{self.root}{os.sep}"
        self._has_folders = False
        try:
            self._make_folders()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise ConfigError(f"--disk-path {folder.path}: {error.strerror}") from None

    def _make_folders(self) -> None:
        self.root.mkdir(mode=0o700, exist_ok=True)
        for shard in range(SHARDS):
            (self.root / f"{shard:02x}").mkdir(mode=0o700, exist_ok=True)
        self._has_folders = True

    def path_of(self, block_hash: bytes) -> str:
        """Return the path of a block's file, existing or not."""
        digits = block_hash.hex()
        return f"{self._root}{digits[:2]}{os.sep}{digits}{SUFFIX}"

    def write(self, name: BlockName, payload: memoryview, stamp: int, old: bytes = b"") -> None:
        """Write a block's file, whole or not at all. Raises OSError.

        Args:
            stamp: LRU stamp.
            old: hash of a dropped block whose file to reuse, which no thread may be reading. Creating a file can cost
                more than writing its bytes.
        """
        path = self.path_of(name.hash)
        part = f"{path}.part"
        try:
            if not self._has_folders:
                self._make_folders()
            if old:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.path_of(old), part)
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _write_all(fd, [memoryview(self.layout.pack(name)), payload])
                if os.fstat(fd).st_size != HEADER_BYTES + self.layout.block_bytes:
                    os.ftruncate(fd, HEADER_BYTES + self.layout.block_bytes)
                os.utime(fd, ns=(stamp, stamp))
            finally:
                os.close(fd)
            os.rename(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise

    def has(self, block_hash: bytes) -> bool:
        """Return whether a block's file exists."""
        return os.path.exists(self.path_of(block_hash))

    def read(self, name: BlockName, target: memoryview) -> None:
        """Read a block into ``target``. Raises CorruptBlock, or OSError (FileNotFoundError for a missing file)."""
        header = bytearray(HEADER_BYTES)
        fd = os.open(self.path_of(name.hash), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != HEADER_BYTES + self.layout.block_bytes:
                raise CorruptBlock("it has another length")
            _read_all(fd, [memoryview(header), target])
            try:
                if self.layout.unpack(bytes(header), name.hash) != name:
                    raise CorruptBlock("its header changed")
            except Foreign:
                raise CorruptBlock("its header changed") from None
            if block_checksum(target) != name.checksum:
                raise CorruptBlock("its bytes do not match their checksum")
        finally:
            os.close(fd)

    def probe(self, block_hash: bytes) -> None:
        """Read a block's file from the medium, bypassing the page cache, and discard it. Raises OSError."""
        fd = os.open(self.path_of(block_hash), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            while os.read(fd, 2**20):
                pass
        finally:
            os.close(fd)

    def stamp(self, block_hash: bytes, stamp: int) -> None:
        """Set a file's LRU stamp, ignoring errors."""
        with contextlib.suppress(OSError):
            os.utime(self.path_of(block_hash), ns=(stamp, stamp))

    def remove(self, block_hash: bytes) -> None:
        """Remove a block's file, ignoring errors."""
        with contextlib.suppress(OSError):
            os.unlink(self.path_of(block_hash))

    def scan(self, shard: int) -> list[tuple[int, BlockName | None]]:
        """Return (stamp, name) of each block in subfolder ``shard`` of SHARDS, by its header alone.

        Removes incomplete and broken files. A broken or unreadable file is returned as (0, None). Skips files of
        another namespace, and a subfolder that cannot be listed.
        """
        folder, blocks = f"{self._root}{shard:02x}{os.sep}", list[tuple[int, BlockName | None]]()
        with contextlib.suppress(OSError):
            for file in filter(_OUR_NAME.fullmatch, os.listdir(folder)):
                try:
                    blocks.append(self._inspect(folder + file, file))
                except Foreign:
                    continue
                except OSError:
                    # The file may be readable later; otherwise the next write of this hash replaces it.
                    blocks.append((0, None))
                except CorruptBlock:
                    with contextlib.suppress(OSError):
                        os.unlink(folder + file)
                    if file.endswith(SUFFIX):
                        blocks.append((0, None))
        return blocks

    def _inspect(self, path: str, file: str) -> tuple[int, BlockName]:
        """Return the LRU stamp and name of a block's file, without reading its payload. Raises CorruptBlock, Foreign
        and OSError."""
        if not file.endswith(SUFFIX):
            raise CorruptBlock("it was never finished")
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            header, status = os.pread(fd, HEADER_BYTES, 0), os.fstat(fd)
        finally:
            os.close(fd)
        name = self.layout.unpack(header, bytes.fromhex(file.removesuffix(SUFFIX)))
        if status.st_size != HEADER_BYTES + self.layout.block_bytes:
            raise CorruptBlock("it has another length")
        return status.st_mtime_ns, name


def _write_all(fd: int, pieces: list[memoryview]) -> None:
    """Write all pieces to a file. Continues after a short write; if the disk is full, the next write raises."""
    while pieces:
        done = os.writev(fd, pieces)
        while pieces and done >= len(pieces[0]):
            done -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][done:]


def _read_all(fd: int, pieces: list[memoryview]) -> None:
    """Fill all pieces from a file. Raises CorruptBlock if the file is too short."""
    while pieces:
        done = os.readv(fd, pieces)
        if not done:
            raise CorruptBlock("it ends early")
        while pieces and done >= len(pieces[0]):
            done -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][done:]
