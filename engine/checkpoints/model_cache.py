"""Keeps prepared models on disk, so that a model is converted and fingerprinted once.

$PILLION_CACHE or ~/.cache/pillion
|-- locks/                one for each thing that is made, so that one process makes it at a time
|-- packed/               weights in the layout of kernels (engine/backends/{cpu/cpu,gpu/gpu}_weights.py)
|-- kernels/              machine code of the CPU kernels (kernels/cpu/runtime/code_cache.py)
|-- models/<digest>/      converted models, made beside their place and renamed into it: there or not, never half
`-- records/<key>.json    a ModelRecord, valid while all files of the source keep their size and time of change
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

# Raise this when conversion or loading changes numbers: KV, fingerprints and records then are new ones, and older
# results stay on the disk.
CONVERSION_VERSION = 4
# Raise this when what is written beside a converted model's weights changes: the model is then converted again, into
# weights with the same fingerprint. So do it when configs are read in another way, because records are kept.
TEXTS_VERSION = 4
# Raise this when the layout of packed weights changes: older files are then removed.
PACKING_VERSION = 13

_DIGEST_PIECE_BYTES = 2**22
LOCK_TIMEOUT_S = 1800.0
LOCK_POLL_S = 0.1
# A file or folder that is being made has this after its name.
DRAFT_SUFFIX = ".tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """Holds facts about one source in one kind of weights. ``files``: (path, bytes, time of change in ns) of each."""

    folder: str
    fingerprint: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    files: tuple[tuple[str, int, int], ...]


class ModelCache:
    """Manages the cache's folder, whose layout the module's docstring shows. Raises ConfigError if it cannot be
    written."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or cache_root()

    def read_record(self, source: Path, kind: str) -> ModelRecord | None:
        """Returns the record of a source, or None if the cache has no record or a file of the source has changed
        since."""
        try:
            fields = json.loads(self.record_path(source, kind).read_text("utf-8"))
            files = tuple((str(path), int(size), int(changed)) for path, size, changed in fields.pop("files"))
            record = ModelRecord(files=files, eos_token_ids=tuple(fields.pop("eos_token_ids")), **fields)
            now = stamp(Path(path) for path, _, _ in files)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            # The record is missing, or another version of Pillion wrote it, so the source is prepared again.
            return None
        return record if now == files else None

    def write_record(self, source: Path, kind: str, record: ModelRecord) -> None:
        """Writes the record of a source atomically."""
        path = self.record_path(source, kind)
        self.make("records")
        draft = path.with_suffix(f".tmp-{os.getpid()}")
        with self._written():
            try:
                draft.write_text(json.dumps(asdict(record)), "utf-8")
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)

    def record_path(self, source: Path, kind: str) -> Path:
        """Returns the path of a source's record, whether or not the file exists."""
        key = hashlib.sha256(f"{CONVERSION_VERSION}.{TEXTS_VERSION}\0{kind}\0{source}".encode()).hexdigest()[:32]
        return self._root / "records" / f"{key}.json"

    def folder(self, digest: str, fill: Callable[[Path], None], progress: Progress) -> Path:
        """Returns the folder of a converted model by its digest; ``fill`` makes the files if need be, under the
        folder's lock. Raises ConfigError where the folder cannot be kept, and where :meth:`lock` does."""
        target = self._root / "models" / digest
        if target.is_dir():
            return target
        self.make("models")
        with self.lock(target, progress):
            if target.is_dir():
                return target
            self.remove_drafts(target.parent)
            draft = target.with_name(digest + DRAFT_SUFFIX)
            # A process that died has left this draft, and this process holds the folder's lock.
            shutil.rmtree(draft, ignore_errors=True)
            try:
                draft.mkdir()
                fill(draft)
                draft.rename(target)
            except OSError as error:
                raise ConfigError(f"the model cannot be kept in {target.parent}: {error.strerror or error}") from None
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return target

    @contextmanager
    def lock(self, target: Path, progress: Progress) -> Iterator[None]:
        """Lets one process of this machine at a time make ``target``, a path in this cache. Raises ConfigError after
        LOCK_TIMEOUT_S. A caller that has the lock of a record may take that of a folder, and no other second lock, so
        nobody waits in a circle."""
        give_up = time.monotonic() + LOCK_TIMEOUT_S
        with self._lock_file(target) as file:
            reported = False
            while not try_lock(file):
                if time.monotonic() > give_up:
                    raise ConfigError(f"another process has been making {target} for too long")
                if not reported:
                    progress("waiting for another process that prepares the same model")
                    reported = True
                time.sleep(LOCK_POLL_S)
            yield

    def remove_drafts(self, folder: Path) -> None:
        """Removes the drafts in ``folder`` that processes left when they died: those whose targets nobody has
        locked."""
        for draft in folder.glob("*" + DRAFT_SUFFIX):
            with self._lock_file(draft.with_suffix("")) as file:
                if try_lock(file):
                    if draft.is_dir():
                        shutil.rmtree(draft, ignore_errors=True)
                    else:
                        draft.unlink(missing_ok=True)

    def _lock_file(self, target: Path) -> IO[bytes]:
        # Lock files stay: a process that waits for a removed file would not exclude one that makes it anew.
        path = self.make("locks") / "-".join(target.relative_to(self._root).parts)
        with self._written():
            return path.open("wb")

    def packed_weights(self, fingerprint: str, kernels: str) -> Path:
        """Returns the path of a model's weights in the layout of ``kernels``, whether the file exists or not."""
        return self.make("packed") / f"{fingerprint[:32]}-{kernels}-{PACKING_VERSION}.weights"

    def make(self, name: str) -> Path:
        """Makes a folder of the cache, such as for machine code, and returns its path. "" is the cache's own folder."""
        folder = self._root / name
        with self._written():
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Raises ConfigError where the disk does not take what the block writes."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the model cache {self._root} cannot be written: {error.strerror}; PILLION_CACHE names another"
            ) from None


def stamp(paths: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Returns (path, bytes, time of change in ns) of each file; (path, -1, 0) of a missing one, which may appear."""

    def of(path: Path) -> tuple[str, int, int]:
        try:
            status = path.stat()
        except FileNotFoundError:
            return str(path), -1, 0
        return str(path), status.st_size, status.st_mtime_ns

    return tuple(of(path) for path in paths)


def digest_file(path: Path, count: Callable[[int], None] = lambda size: None) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal; ``count`` gets the size of each piece. Raises
    ConfigError for a file that cannot be read."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_DIGEST_PIECE_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(piece):
                digest.update(piece[:size])
                count(size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()
