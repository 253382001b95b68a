"""Keeps the folder of --batch-path: files, batches, their bounds and their ages. Several gateways may share it.

    FOLDER/files/ID.part                 a file that is being written; ID.jsonl once it is whole and on the disk
    FOLDER/files/ID.json                 its record; a file without one is not there
    FOLDER/batches/ID/batch.json         the batch's record; who holds the lock writes it, and nobody else
    FOLDER/batches/ID/lock               locked (flock) by the one gateway that runs the batch
    FOLDER/batches/ID/cancel             made by whichever gateway was asked to cancel it
    FOLDER/batches/ID/journal            a result for each line that has one; gone once the outputs are written

Records replace each other whole, by renames. A tenant sees what is its own; anything else is not found. All functions
here block. They raise NotFound for an id that is not the tenant's, and FolderFull where the disk is full or a bound is
met.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import TypeVar

import msgspec

from pillion.errors import ConfigError, Conflict, FieldViolation, InvalidRequest, NotFound, Overloaded
from pillion.gateway.batches.batch_records import COMPLETION_WINDOW, COMPLETION_WINDOW_S, BatchRecord, FileRecord
from pillion.host.locks import try_lock

INPUT_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
# The folder holds at most this many files, of all tenants, because a list has to look through them.
MAX_FILES = 8192
MAX_BATCHES = 4096
# A tenant of --api-keys may have this share of the folder's bytes, files and batches.
TENANT_PERCENT = 25
# One tenant may have this many batches that have not ended.
MAX_OPEN_BATCHES = 100
MAX_FILENAME_CHARS = 256
# Clients may send at most MAX_UPLOADS files to one gateway at the same time, and those of one tenant at most
# TENANT_UPLOADS; a further one may come after UPLOAD_RETRY_MS.
MAX_UPLOADS, TENANT_UPLOADS = 64, 4
UPLOAD_RETRY_MS = 1000
# An unfinished file that has not changed for this long has lost its writer.
PART_AGE_S = 3600
# A client may try again after this time where a bound of the folder is met: files go when they are old or deleted.
FULL_RETRY_MS = 60_000
# The names of a batch's outputs begin alike, so that a gateway that writes them again replaces them.
OUTPUT, ERRORS = "-output", "-errors"

_FILE_ID = re.compile(r"file-[0-9a-f]{24}(-output|-errors)?")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
_OWNER_ONLY_FOLDER, _OWNER_ONLY_FILE = 0o700, 0o600
# These errors of a disk say that nothing more can be kept now, because it is full, fails or has become read-only.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

T = TypeVar("T")


class FolderFull(Overloaded):
    """Says that neither a file nor a result can be kept now, for want of room."""


class FileTooLarge(InvalidRequest):
    """A file larger than ``file_bytes``."""


@contextlib.contextmanager
def told_if_full() -> Iterator[None]:
    """Raises FolderFull for an OSError which says that the disk keeps nothing more."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise FolderFull(f"the disk of --batch-path keeps nothing more: {error.strerror}", FULL_RETRY_MS) from None


class Upload:
    """Represents a file that is being uploaded or written. Its tenant sees it once it is whole, or never.

    The part file is made as long as the file may become, so that every gateway counts what is reserved.
    """

    def __init__(self, folder: BatchFolder, tenant: str, most_bytes: int) -> None:
        self._folder = folder
        self.tenant = tenant
        self.id = f"file-{secrets.token_hex(12)}"
        self._path = folder.content(self.id).with_suffix(".part")
        self.size, self.most_bytes = 0, most_bytes
        self._file = open_new(self._path)
        try:
            self._resize(most_bytes)
        except BaseException:
            self.close()
            raise
        folder.uploads.add(self)

    def write(self, data: bytes | bytearray) -> None:
        """Adds bytes to the file. Raises FileTooLarge, and FolderFull."""
        self.size += len(data)
        if self.size > self.most_bytes:
            raise self._folder.too_large()
        with told_if_full():
            write_all(self._file, data)

    def keep(self, filename: str, purpose: str, seconds: int | None = None) -> FileRecord:
        """Ends the writing of the file, which is its tenant's for ``seconds``, or ``keep_s``. Raises
        InvalidRequest for an empty file."""
        if not self.size:
            raise InvalidRequest.of(FieldViolation("file", "it is empty"))
        self._resize(self.size)
        return self._folder.keep_file(self._file, self._path, self.id, self.tenant, filename, purpose, seconds)

    def close(self) -> None:
        """Ends the writing of the file. A file that was not kept is removed."""
        self._folder.uploads.discard(self)
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _resize(self, size_bytes: int) -> None:
        with told_if_full():
            os.ftruncate(self._file, size_bytes)


class BatchFolder:
    """Manages the folder of --batch-path. Raises ConfigError where it cannot be made or used.

    Args:
        max_bytes: most bytes in it before uploads are refused and batches stand still.
        file_bytes: the largest file that clients may bring.
        keep_s: age at which files, and batches that have ended, are removed.
        tenant_percent: share of all bounds that a tenant with a name may have.

    Attributes:
        uploads: files that clients are bringing to this process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int,
        file_bytes: int,
        keep_s: int,
        tenant_percent: int = 100,
    ) -> None:
        self.path = Path(path)
        self.tenant_percent = tenant_percent
        self.uploads: set[Upload] = set()
        # No two threads may reserve the same bytes.
        self._lock = threading.Lock()
        self.max_bytes, self.file_bytes, self.keep_s = max_bytes, file_bytes, keep_s
        self._files, self._batches = self.path / "files", self.path / "batches"
        try:
            for folder in (self.path, self._files, self._batches):
                folder.mkdir(mode=_OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
            probe = self._files / f"{secrets.token_hex(8)}.part"
            os.close(open_new(probe))
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"--batch-path {self.path}: {error.strerror}") from None

    def upload(self, tenant: str, size_bytes: int = 0) -> Upload:
        """Begins to write a file of at most so many bytes; 0 means that the size is unknown, so that the file reserves
        as much as any may have. Raises FolderFull, and FileTooLarge."""
        if size_bytes > self.file_bytes:
            raise self.too_large()
        size_bytes = size_bytes or self.file_bytes
        with self._lock, told_if_full():
            mine = [upload for upload in self.uploads if upload.tenant == tenant]
            if len(mine) >= TENANT_UPLOADS or len(self.uploads) >= MAX_UPLOADS:
                text = f"{TENANT_UPLOADS} files are being sent by this tenant, or {MAX_UPLOADS} by all"
                raise Overloaded(text, UPLOAD_RETRY_MS)
            # A tenant without a name may fill the folder, so its files are not looked through.
            files = self.files(tenant) if tenant else []
            mine_bytes = sum(one.bytes for one in files) + sum(upload.most_bytes for upload in mine)
            self._require_room("bytes", self.max_bytes, self.used_bytes(), tenant, mine_bytes, size_bytes)
            count = len(list(self._files.glob("*.json")))
            self._require_room("files", MAX_FILES, count + len(self.uploads), tenant, len(files) + len(mine), 1)
            return Upload(self, tenant, size_bytes)

    def too_large(self) -> InvalidRequest:
        """Makes the error for a file that is larger than clients may bring."""
        return FileTooLarge.of(FieldViolation("file", f"larger than {self.file_bytes} bytes"))

    def _require_room(self, what: str, most: int, used: int, tenant: str, mine: int, more: int) -> None:
        """Raises FolderFull where so much more does not fit in the folder, or within the share of a tenant with a
        name. ``used`` is what all have, ``mine`` what the tenant has."""
        if used + more > most:
            raise FolderFull(f"there are in the folder of --batch-path already {most} {what}", FULL_RETRY_MS)
        share = max(1, most * self.tenant_percent // 100)
        if tenant and mine + more > share:
            text = f"the share of a tenant ({self.tenant_percent} %)"
            raise FolderFull(
                f"this tenant has in the folder of --batch-path already {share} {what}, {text}", FULL_RETRY_MS
            )

    def keep_file(
        self,
        file: int,
        part: Path,
        name: str,
        tenant: str,
        filename: str,
        purpose: str,
        seconds: int | None = None,
    ) -> FileRecord:
        """Moves a whole file, written as ``part``, to its place and writes its record; both are on the disk then. It is
        removed after ``seconds``, if that is sooner than ``keep_s``."""
        now = int(time.time())
        record = FileRecord(
            id=name,
            tenant=tenant,
            filename=filename[:MAX_FILENAME_CHARS],
            purpose=purpose,
            bytes=os.fstat(file).st_size,
            created_at=now,
            expires_at=now + min(self.keep_s, self.keep_s if seconds is None else seconds),
        )
        with told_if_full():
            os.fsync(file)
            part.replace(self.content(name))
            replace_file(self._files / f"{name}.json", msgspec.json.encode(record))
        return record

    def file(self, tenant: str, name: str) -> FileRecord:
        """Returns the record of a tenant's file."""
        known = _read(self._files / f"{name}.json", FileRecord) if _FILE_ID.fullmatch(name) else None
        if known is None or known.tenant != tenant:
            raise NotFound(f"there is no file {name[:100]!r}")
        return known

    def open_file(self, tenant: str, name: str) -> tuple[FileRecord, FileIO]:
        """Opens a tenant's file, which the caller reads and closes; it can be read to its end even if somebody removes
        it meanwhile."""
        known = self.file(tenant, name)
        try:
            return known, FileIO(self.content(name))
        except FileNotFoundError:
            raise NotFound(f"there is no file {name!r}") from None

    def files(self, tenant: str, purpose: str = "") -> list[FileRecord]:
        """Returns a tenant's files, the newest first."""
        known = (_read(path, FileRecord) for path in self._files.glob("*.json"))
        mine = [one for one in known if one and one.tenant == tenant and purpose in ("", one.purpose)]
        return sorted(mine, key=lambda one: (one.created_at, one.id), reverse=True)

    def content(self, name: str) -> Path:
        """Returns the path of a file's content."""
        return self._files / f"{name}.jsonl"

    def delete_file(self, tenant: str, name: str) -> None:
        """Removes a tenant's file. Raises Conflict where a batch reads it."""
        known = self.file(tenant, name)
        for batch in self.open_batches():
            if batch.input_file_id == known.id:
                raise Conflict(f"batch {batch.id} reads {known.id}: cancel it, or wait for its end")
        self._remove_file(known.id)

    def create(
        self,
        tenant: str,
        file_id: str,
        endpoint: str,
        metadata: dict[str, str] | None,
        output_seconds: int | None = None,
    ) -> BatchRecord:
        """Makes a new batch on the disk. Raises InvalidRequest, which names ``input_file_id``, and Overloaded."""
        try:
            known = self.file(tenant, file_id)
        except NotFound as error:
            raise InvalidRequest.of(FieldViolation("input_file_id", error.message)) from None
        if known.purpose != INPUT_PURPOSE:
            text = f"a file of purpose {known.purpose!r} is no input; purpose={INPUT_PURPOSE} is"
            raise InvalidRequest.of(FieldViolation("input_file_id", text))
        mine = self.batches(tenant)
        self._require_room("batches", MAX_BATCHES, len(self.batch_ids()), tenant, len(mine), 1)
        if sum(not batch.over for batch in mine) >= MAX_OPEN_BATCHES:
            raise Overloaded(f"{MAX_OPEN_BATCHES} batches have not ended yet", FULL_RETRY_MS)
        now = int(time.time())
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(12)}",
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=file_id,
            created_at=now,
            expires_at=now + COMPLETION_WINDOW_S,
            completion_window=COMPLETION_WINDOW,
            metadata=metadata,
            output_seconds=output_seconds,
        )
        with told_if_full():
            self.of_batch(record.id).mkdir(mode=_OWNER_ONLY_FOLDER)
            replace_file(self.of_batch(record.id) / "batch.json", msgspec.json.encode(record))
            sync_folder(self._batches)
        return record

    def batch(self, tenant: str, name: str) -> BatchRecord:
        """Returns a tenant's batch as it is now."""
        known = self.known_batch(name) if _BATCH_ID.fullmatch(name) else None
        if known is None or known.tenant != tenant:
            raise NotFound(f"there is no batch {name[:100]!r}")
        return known

    def batches(self, tenant: str) -> list[BatchRecord]:
        """Returns a tenant's batches, the newest first."""
        known = map(self.known_batch, self.batch_ids())
        mine = [one for one in known if one is not None and one.tenant == tenant]
        return sorted(mine, key=lambda one: (one.created_at, one.id), reverse=True)

    def cancel(self, tenant: str, name: str) -> BatchRecord:
        """Asks the gateway that runs a batch to end it early. Raises Conflict where the batch has ended."""
        known = self.batch(tenant, name)
        if known.over:
            raise Conflict(f"batch {known.id} is {known.status}, so it cannot be cancelled")
        with told_if_full():
            (self.of_batch(name) / "cancel").touch(mode=_OWNER_ONLY_FILE)
            sync_folder(self.of_batch(name))
        return self.batch(tenant, name)

    def of_batch(self, name: str) -> Path:
        """Returns the folder of a batch."""
        return self._batches / name

    def batch_ids(self) -> list[str]:
        """Returns the ids of all batches."""
        return [entry.name for entry in os.scandir(self._batches) if _BATCH_ID.fullmatch(entry.name)]

    def known_batch(self, name: str) -> BatchRecord | None:
        """Returns the record of any tenant's batch; None if there is no such batch. A batch that is asked to end is
        shown as being cancelled."""
        known = _read(self.of_batch(name) / "batch.json", BatchRecord)
        if known is None or known.over:
            return known
        with contextlib.suppress(OSError):
            return known.moved("cancelling", (self.of_batch(name) / "cancel").stat().st_mtime)
        return known

    def open_batches(self) -> list[BatchRecord]:
        """Returns all batches that have not ended."""
        known = map(self.known_batch, self.batch_ids())
        return [one for one in known if one is not None and not one.over]

    def used_bytes(self) -> int:
        """Returns the bytes of all files and journals, with those that files which are being sent may have."""
        journals = (self.of_batch(name) / "journal" for name in self.batch_ids())
        return sum(map(_size, os.scandir(self._files))) + sum(map(_size, journals))

    def full(self) -> bool:
        """Return True if ``max_bytes`` are used."""
        return self.used_bytes() >= self.max_bytes

    def sweep(self, now_s: float) -> None:
        """Removes files and batches that are older than they are kept, and what writers that died have left."""
        in_use = {batch.input_file_id for batch in self.open_batches()}
        for path in self._files.iterdir():
            known = _read(path, FileRecord) if path.suffix == ".json" else None
            if known is not None:
                if known.expires_at <= now_s and known.id not in in_use:
                    self._remove_file(known.id)
            elif not path.with_suffix(".json").exists() and _age_s(path, now_s) > PART_AGE_S:
                path.unlink(missing_ok=True)
        for name in self.batch_ids():
            batch, place = self.known_batch(name), self.of_batch(name)
            if batch is not None and batch.over:
                # The gateway that ended this batch was killed before it removed the batch's journal, which it does
                # last.
                (place / "journal").unlink(missing_ok=True)
            old = batch is not None and batch.over and batch.ended_at + self.keep_s <= now_s
            if old or (batch is None and _age_s(place, now_s) > PART_AGE_S):
                self._remove_batch(name)

    def lock(self, name: str) -> int | None:
        """Takes the lock of a batch; None where another process has it, or the batch is gone. Closing the descriptor,
        or the end of the process, gives the lock back."""
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(self.of_batch(name) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _OWNER_ONLY_FILE)
            if try_lock(lock):
                return lock
            os.close(lock)
        return None

    def _remove_file(self, name: str) -> None:
        # The record goes first, because content without a record is no file.
        (self._files / f"{name}.json").unlink(missing_ok=True)
        self.content(name).unlink(missing_ok=True)

    def _remove_batch(self, name: str) -> None:
        lock = self.lock(name)
        if lock is not None:
            shutil.rmtree(self.of_batch(name), ignore_errors=True)
            os.close(lock)


def open_new(path: Path) -> int:
    """Opens a new file for writing, which only its owner may read; an older file of this name goes."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _OWNER_ONLY_FILE)


def write_all(file: int, data: bytes | bytearray) -> None:
    """Writes all of ``data``, or raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Puts a small file whole in the place of another; with ``sync`` it is on the disk afterwards. Raises OSError."""
    part = path.with_suffix(f".{secrets.token_hex(4)}.part")
    file = open_new(part)
    try:
        write_all(file, data)
        if sync:
            os.fsync(file)
        part.replace(path)
    finally:
        os.close(file)
        part.unlink(missing_ok=True)
    if sync:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Forces the names in a folder to the disk. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(path: Path, kind: type[T]) -> T | None:
    """Reads a record from its file; None where the file is missing or cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError):
        return None


def _size(path: Path | os.DirEntry[str]) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _age_s(path: Path, now_s: float) -> float:
    try:
        return now_s - path.stat().st_mtime
    except OSError:
        return 0.0
