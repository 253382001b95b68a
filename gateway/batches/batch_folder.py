"""The folder of --batch-path: files, batches, limits and expiry. Several gateways may share it.

    FOLDER/files/ID.part                 a file being written; ID.jsonl once complete and synced
    FOLDER/files/ID.json                 its record; a file without one does not exist
    FOLDER/batches/ID/batch.json         the batch's record, written only by the holder of the lock
    FOLDER/batches/ID/lock               locked (flock) by the one gateway that runs the batch
    FOLDER/batches/ID/cancel             created by a gateway whose client has cancelled it
    FOLDER/batches/ID/journal            a result per finished line; removed once the outputs are written

Records are replaced atomically, by renames. Tenants see only their own files and batches. All functions block. They
raise NotFound for an id that is not the tenant's, and FolderFull if the disk is full or a limit is reached.
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
# Bytes read or written at once.
PIECE_BYTES = 256 * 2**10
MAX_FILES = 8192
MAX_BATCHES = 4096
# Share of all limits for a named tenant.
TENANT_PERCENT = 25
MAX_OPEN_BATCHES = 100
MAX_FILENAME_CHARS = 256
# Max concurrent uploads at one gateway, of all tenants and per tenant, and the Retry-After of a refused one.
MAX_UPLOADS, TENANT_UPLOADS = 64, 4
UPLOAD_RETRY_MS = 1000
# Age at which files and batches without a record are removed: their writer is gone.
PART_AGE_S = 3600
FULL_RETRY_MS = 60_000
# Suffixes of a batch's output files, whose names are fixed, so that writing them again replaces them.
OUTPUT, ERRORS = "-output", "-errors"

_FILE_ID = re.compile(r"file-[0-9a-f]{24}(-output|-errors)?")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
_OWNER_ONLY_FOLDER, _OWNER_ONLY_FILE = 0o700, 0o600

T = TypeVar("T")


class FolderFull(Overloaded):
    """A file or result cannot be stored, for lack of space or because a limit of the folder is reached."""


class FileTooLarge(InvalidRequest):
    """A file larger than ``file_bytes``."""


@contextlib.contextmanager
def disk_full_errors() -> Iterator[None]:
    """Raise FolderFull for an OSError that means that the disk cannot store more."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
            raise
        raise FolderFull(f"the disk of --batch-path cannot store more: {error.strerror}", FULL_RETRY_MS) from None


class Upload:
    """A file being uploaded, visible to its tenant once complete.

    Its .part file has the max size from the start, so that every gateway counts the reserved bytes.
    """

    def __init__(self, folder: BatchFolder, tenant: str, max_bytes: int) -> None:
        self._folder = folder
        self.tenant = tenant
        self.id = f"file-{secrets.token_hex(12)}"
        self._path = folder.content(self.id).with_suffix(".part")
        self.size, self.max_bytes = 0, max_bytes
        self._file = open_new(self._path)
        try:
            self._resize(max_bytes)
        except BaseException:
            self.close()
            raise
        folder.uploads.add(self)

    def write(self, data: bytes | bytearray) -> None:
        """Append bytes. Raises FileTooLarge and FolderFull."""
        self.size += len(data)
        if self.size > self.max_bytes:
            raise self._folder.too_large()
        with disk_full_errors():
            write_all(self._file, data)

    def finish(self, filename: str, purpose: str, seconds: int | None = None) -> FileRecord:
        """Finish the file, which expires after ``seconds`` or ``keep_s``. Raises InvalidRequest for an empty file."""
        if not self.size:
            raise InvalidRequest.of(FieldViolation("file", "it is empty"))
        self._resize(self.size)
        return self._folder.publish_file(self._file, self._path, self.id, self.tenant, filename, purpose, seconds)

    def close(self) -> None:
        """Close the file, and remove it unless it was finished."""
        self._folder.uploads.discard(self)
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _resize(self, size_bytes: int) -> None:
        with disk_full_errors():
            os.ftruncate(self._file, size_bytes)


class BatchFolder:
    """Manager of the folder of --batch-path. Raises ConfigError if it cannot be created or used.

    Args:
        max_bytes: total size at which uploads are refused and batches pause.
        file_bytes: limit on an uploaded file.
        keep_s: age at which files, and batches that have ended, are removed.
        tenant_percent: share of all limits for a named tenant.

    Attributes:
        uploads: this process's uploads in progress.
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
        """Start to write a file of at most ``size_bytes``; 0 (unknown) reserves the limit. Raises FolderFull and
        FileTooLarge."""
        if size_bytes > self.file_bytes:
            raise self.too_large()
        size_bytes = size_bytes or self.file_bytes
        with self._lock, disk_full_errors():
            uploads = [upload for upload in self.uploads if upload.tenant == tenant]
            if len(uploads) >= TENANT_UPLOADS or len(self.uploads) >= MAX_UPLOADS:
                text = f"this tenant is uploading {TENANT_UPLOADS} files, or all tenants {MAX_UPLOADS}"
                raise Overloaded(text, UPLOAD_RETRY_MS)
            # A tenant without a name has no limit of its own, so its files need not be listed.
            files = self.files(tenant) if tenant else []
            tenant_bytes = sum(file.bytes for file in files) + sum(upload.max_bytes for upload in uploads)
            self._require_room("bytes", self.max_bytes, self.used_bytes(), tenant, tenant_bytes, size_bytes)
            count = len(list(self._files.glob("*.json")))
            self._require_room("files", MAX_FILES, count + len(self.uploads), tenant, len(files) + len(uploads), 1)
            return Upload(self, tenant, size_bytes)

    def too_large(self) -> InvalidRequest:
        """Create the error for a file above the limit."""
        return FileTooLarge.of(FieldViolation("file", f"larger than {self.file_bytes} bytes"))

    def _require_room(self, what: str, limit: int, used: int, tenant: str, tenant_used: int, more: int) -> None:
        """Raise FolderFull if ``used + more`` exceeds the limit, or ``tenant_used + more`` a named tenant's share.

        ``what``: the unit, for the error.
        """
        if used + more > limit:
            raise FolderFull(f"the folder of --batch-path already has {limit} {what}", FULL_RETRY_MS)
        share = max(1, limit * self.tenant_percent // 100)
        if tenant and tenant_used + more > share:
            text = f"the share of a tenant ({self.tenant_percent} %)"
            raise FolderFull(
                f"this tenant already has {share} {what} in the folder of --batch-path, {text}", FULL_RETRY_MS
            )

    def publish_file(
        self,
        file: int,
        part: Path,
        name: str,
        tenant: str,
        filename: str,
        purpose: str,
        seconds: int | None = None,
    ) -> FileRecord:
        """Move a finished file, written as ``part``, to its place and write its record, both synced. It expires after
        ``seconds``, or ``keep_s`` if that is sooner."""
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
        with disk_full_errors():
            os.fsync(file)
            part.replace(self.content(name))
            replace_file(self._files / f"{name}.json", msgspec.json.encode(record))
        return record

    def file(self, tenant: str, name: str) -> FileRecord:
        """Return the record of a tenant's file."""
        record = _read(self._files / f"{name}.json", FileRecord) if _FILE_ID.fullmatch(name) else None
        if record is None or record.tenant != tenant:
            raise NotFound(f"there is no file {name[:100]!r}")
        return record

    def open_file(self, tenant: str, name: str) -> tuple[FileRecord, FileIO]:
        """Open a tenant's file for the caller to read and close. It stays readable if it is removed."""
        record = self.file(tenant, name)
        try:
            return record, FileIO(self.content(name))
        except FileNotFoundError:
            raise NotFound(f"there is no file {name!r}") from None

    def files(self, tenant: str, purpose: str = "") -> list[FileRecord]:
        """Return a tenant's files, newest first."""
        records = (_read(path, FileRecord) for path in self._files.glob("*.json"))
        files = [one for one in records if one and one.tenant == tenant and purpose in ("", one.purpose)]
        return sorted(files, key=lambda one: (one.created_at, one.id), reverse=True)

    def content(self, name: str) -> Path:
        """Return the path of a file's content."""
        return self._files / f"{name}.jsonl"

    def delete_file(self, tenant: str, name: str) -> None:
        """Remove a tenant's file. Raises Conflict if a batch reads it."""
        record = self.file(tenant, name)
        for batch in self.open_batches():
            if batch.input_file_id == record.id:
                raise Conflict(f"batch {batch.id} reads {record.id}: cancel it, or wait for its end")
        self._remove_file(record.id)

    def create(
        self,
        tenant: str,
        file_id: str,
        endpoint: str,
        metadata: dict[str, str] | None,
        output_seconds: int | None = None,
    ) -> BatchRecord:
        """Create a batch on disk. Raises InvalidRequest, which names ``input_file_id``, and Overloaded."""
        try:
            file = self.file(tenant, file_id)
        except NotFound as error:
            raise InvalidRequest.of(FieldViolation("input_file_id", error.message)) from None
        if file.purpose != INPUT_PURPOSE:
            text = f"a file of purpose {file.purpose!r} cannot be an input; use purpose={INPUT_PURPOSE}"
            raise InvalidRequest.of(FieldViolation("input_file_id", text))
        batches = self.batches(tenant)
        self._require_room("batches", MAX_BATCHES, len(self.batch_ids()), tenant, len(batches), 1)
        if sum(not batch.over for batch in batches) >= MAX_OPEN_BATCHES:
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
        with disk_full_errors():
            self.batch_path(record.id).mkdir(mode=_OWNER_ONLY_FOLDER)
            replace_file(self.batch_path(record.id) / "batch.json", msgspec.json.encode(record))
            sync_folder(self._batches)
        return record

    def batch(self, tenant: str, name: str) -> BatchRecord:
        """Return the current record of a tenant's batch."""
        record = self.find_batch(name) if _BATCH_ID.fullmatch(name) else None
        if record is None or record.tenant != tenant:
            raise NotFound(f"there is no batch {name[:100]!r}")
        return record

    def batches(self, tenant: str) -> list[BatchRecord]:
        """Return a tenant's batches, newest first."""
        records = map(self.find_batch, self.batch_ids())
        batches = [one for one in records if one is not None and one.tenant == tenant]
        return sorted(batches, key=lambda one: (one.created_at, one.id), reverse=True)

    def cancel(self, tenant: str, name: str) -> BatchRecord:
        """Request that the gateway that runs a batch ends it early. Raises Conflict if it has ended."""
        record = self.batch(tenant, name)
        if record.over:
            raise Conflict(f"batch {record.id} is {record.status}, so it cannot be cancelled")
        with disk_full_errors():
            (self.batch_path(name) / "cancel").touch(mode=_OWNER_ONLY_FILE)
            sync_folder(self.batch_path(name))
        return self.batch(tenant, name)

    def batch_path(self, name: str) -> Path:
        """Return the folder of a batch."""
        return self._batches / name

    def batch_ids(self) -> list[str]:
        """Return the ids of all batches."""
        return [entry.name for entry in os.scandir(self._batches) if _BATCH_ID.fullmatch(entry.name)]

    def find_batch(self, name: str) -> BatchRecord | None:
        """Return the record of any tenant's batch, or None. One with a cancel request has status "cancelling"."""
        record = _read(self.batch_path(name) / "batch.json", BatchRecord)
        if record is None or record.over:
            return record
        with contextlib.suppress(OSError):
            return record.with_status("cancelling", (self.batch_path(name) / "cancel").stat().st_mtime)
        return record

    def open_batches(self) -> list[BatchRecord]:
        """Return all batches that have not ended."""
        records = map(self.find_batch, self.batch_ids())
        return [one for one in records if one is not None and not one.over]

    def used_bytes(self) -> int:
        """Return the bytes of all files and journals, with those reserved by uploads."""
        journals = (self.batch_path(name) / "journal" for name in self.batch_ids())
        return sum(map(_size, os.scandir(self._files))) + sum(map(_size, journals))

    def full(self) -> bool:
        """Return whether the folder has reached ``max_bytes``."""
        return self.used_bytes() >= self.max_bytes

    def sweep(self, now_s: float) -> None:
        """Remove expired files and batches, and those whose writer died before it wrote their record."""
        in_use = {batch.input_file_id for batch in self.open_batches()}
        for path in self._files.iterdir():
            record = _read(path, FileRecord) if path.suffix == ".json" else None
            if record is not None:
                if record.expires_at <= now_s and record.id not in in_use:
                    self._remove_file(record.id)
            elif not path.with_suffix(".json").exists() and _age_s(path, now_s) > PART_AGE_S:
                path.unlink(missing_ok=True)
        for name in self.batch_ids():
            batch, folder = self.find_batch(name), self.batch_path(name)
            if batch is not None and batch.over:
                # Left if the gateway was killed before its last action, the removal of the journal.
                (folder / "journal").unlink(missing_ok=True)
            expired = batch is not None and batch.over and batch.ended_at + self.keep_s <= now_s
            if expired or (batch is None and _age_s(folder, now_s) > PART_AGE_S):
                self._remove_batch(name)

    def lock(self, name: str) -> int | None:
        """Lock a batch; return the lock's descriptor, None if another process has the lock or the batch is gone.

        Closing the descriptor, or the end of the process, unlocks it.
        """
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(self.batch_path(name) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _OWNER_ONLY_FILE)
            if try_lock(lock):
                return lock
            os.close(lock)
        return None

    def _remove_file(self, name: str) -> None:
        # The record goes first, since content without a record does not exist.
        (self._files / f"{name}.json").unlink(missing_ok=True)
        self.content(name).unlink(missing_ok=True)

    def _remove_batch(self, name: str) -> None:
        lock = self.lock(name)
        if lock is not None:
            shutil.rmtree(self.batch_path(name), ignore_errors=True)
            os.close(lock)


def open_new(path: Path) -> int:
    """Create or truncate a file for writing, readable only by its owner; return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _OWNER_ONLY_FILE)


def write_all(file: int, data: bytes | bytearray) -> None:
    """Write all of ``data``, or raise OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace a small file atomically; with ``sync``, durably. Raises OSError."""
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
    """Sync a folder's directory entries to disk. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(path: Path, kind: type[T]) -> T | None:
    """Read a record; None if the file is missing or invalid."""
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
