"""On-disk cache of models, each of which is converted and fingerprinted once.

$PILLION_CACHE or ~/.cache/pillion
|-- locks/                one per item of the cache, held by the process that makes it
|-- packed/               weights in the layout of kernels (engine/backends/{cpu/cpu,gpu/gpu}_weights.py)
|-- kernels/              machine code of the CPU kernels (kernels/cpu/runtime/code_cache.py)
|-- models/<digest>/      converted models, made under a temporary name and renamed when complete
`-- records/<key>.json    a ModelRecord, valid until a file of its model changes in size or modification time
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from pillion.engine.checkpoints.model_files import Progress
from pillion.errors import ConfigError
from pillion.host.adapter_folders import cache_root
from pillion.host.locks import try_lock

# To be raised when conversion or loading changes KV or logits: this invalidates fingerprints, KV and records. Converted
# models of older versions stay on disk.
CONVERSION_VERSION = 4
# To be raised when the other files of a converted model change, or when configs are parsed differently: models are then
# converted again, to weights with the same fingerprint.
TEXTS_VERSION = 4
# To be raised when the layout of packed weights changes; files of older versions are then removed.
PACKING_VERSION = 13

LOCK_TIMEOUT_S = 1800.0
LOCK_POLL_S = 0.1
TEMP_SUFFIX = ".tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """Facts about a model with one kind of weights. ``files``: (path, bytes, modification time in ns) of each file that
    they depend on."""

    folder: str
    fingerprint: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    files: tuple[tuple[str, int, int], ...]


class ModelCache:
    """The cache, whose folder is described in the module docstring. Methods raise ConfigError if it is not writable."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or cache_root()

    def read_record(self, source: Path, kind: str) -> ModelRecord | None:
        """Return the record of a model's folder or GGUF file with a kind of weights; None if it is missing, or if a
        file that it depends on has changed."""
        try:
            fields = json.loads(self.record_path(source, kind).read_text("utf-8"))
            files = tuple((str(path), int(size), int(mtime_ns)) for path, size, mtime_ns in fields.pop("files"))
            record = ModelRecord(files=files, eos_token_ids=tuple(fields.pop("eos_token_ids")), **fields)
            current = stamp(Path(path) for path, _, _ in files)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return record if current == files else None

    def write_record(self, source: Path, kind: str, record: ModelRecord) -> None:
        """Write a record atomically."""
        path = self.record_path(source, kind)
        self.make("records")
        draft = path.with_suffix(f".tmp-{os.getpid()}")
        with self._write_errors():
            try:
                draft.write_text(json.dumps(asdict(record)), "utf-8")
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)

    def record_path(self, source: Path, kind: str) -> Path:
        """Return the path of a record; the file need not exist."""
        key = hashlib.sha256(f"{CONVERSION_VERSION}.{TEXTS_VERSION}\0{kind}\0{source}".encode()).hexdigest()[:32]
        return self._root / "records" / f"{key}.json"

    def folder(self, digest: str, fill: Callable[[Path], None], progress: Progress) -> Path:
        """Return the folder of a converted model by digest. If it is missing, create it under its lock and call
        ``fill`` with its temporary path. Raises ConfigError if the folder cannot be written, and on lock timeout."""
        target = self._root / "models" / digest
        if target.is_dir():
            return target
        self.make("models")
        with self.lock(target, progress):
            if target.is_dir():
                return target
            self.remove_temporary(target.parent)
            draft = target.with_name(digest + TEMP_SUFFIX)
            shutil.rmtree(draft, ignore_errors=True)
            try:
                draft.mkdir()
                fill(draft)
                draft.rename(target)
            except OSError as error:
                raise ConfigError(f"the model cannot be stored in {target.parent}: {error.strerror or error}") from None
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return target

    @contextmanager
    def lock(self, target: Path, progress: Progress) -> Iterator[None]:
        """Hold the lock of ``target``, a path in the cache, among processes of this machine. Raises ConfigError after
        LOCK_TIMEOUT_S. To avoid deadlocks, a process may hold two locks only if it first took a record's, then a
        folder's."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        with self._lock_file(target) as file:
            reported = False
            while not try_lock(file):
                if time.monotonic() > deadline:
                    raise ConfigError(f"another process is still writing {target} after {LOCK_TIMEOUT_S:.0f} s")
                if not reported:
                    progress("waiting for another process that prepares the same model")
                    reported = True
                time.sleep(LOCK_POLL_S)
            yield

    def remove_temporary(self, folder: Path) -> None:
        """Remove temporary files and folders of dead processes in ``folder``: those whose targets are not locked."""
        for draft in folder.glob("*" + TEMP_SUFFIX):
            with self._lock_file(draft.with_suffix("")) as file:
                if try_lock(file):
                    if draft.is_dir():
                        shutil.rmtree(draft, ignore_errors=True)
                    else:
                        draft.unlink(missing_ok=True)

    def _lock_file(self, target: Path) -> IO[bytes]:
        # Lock files are never removed: a process that waits for a removed file would not exclude one that creates it.
        path = self.make("locks") / "-".join(target.relative_to(self._root).parts)
        with self._write_errors():
            return path.open("wb")

    def packed_weights(self, fingerprint: str, kernels: str) -> Path:
        """Return the path of a model's weights packed for ``kernels``; the file need not exist."""
        return self.make("packed") / f"{fingerprint[:32]}-{kernels}-{PACKING_VERSION}.weights"

    def make(self, name: str) -> Path:
        """Make a subfolder of the cache and return its path; "" is the cache itself."""
        folder = self._root / name
        with self._write_errors():
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Convert an OSError of the block to a ConfigError."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the model cache {self._root} cannot be written: {error.strerror}; set PILLION_CACHE to another folder"
            ) from None


def stamp(paths: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return (path, bytes, modification time in ns) of each file; (path, -1, 0) for a missing file, so that its
    creation is a change."""

    def of(path: Path) -> tuple[str, int, int]:
        try:
            status = path.stat()
        except FileNotFoundError:
            return str(path), -1, 0
        return str(path), status.st_size, status.st_mtime_ns

    return tuple(of(path) for path in paths)


def digest_file(path: Path, count: Callable[[int], None] = lambda size: None) -> str:
    """Return the SHA-256 of a file, in hexadecimal; ``count`` is called with the number of bytes after each read.
    Raises ConfigError for an unreadable file."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(2**22))
    try:
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                digest.update(buffer[:size])
                count(size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()
