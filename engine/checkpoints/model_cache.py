"""What preparing a model leaves on disk, so that it happens once.

$PILLION_CACHE or ~/.cache/pillion
|-- prepare.lock          one process prepares at a time
|-- packed/               weights in the layout of the CPU kernels (engine/backends/cpu/cpu_weights.py)
|-- kernels/              machine code of the CPU kernels (kernels/cpu/runtime/code_cache.py)
|-- models/<digest>/      converted models, made beside their place and renamed into it: there or not, never half
`-- records/<key>.json    what is known of a source, valid while all its files keep size and time
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pillion.engine.checkpoints.model_files import Progress
from pillion.errors import ConfigError

# Grows when conversion or loading changes numbers: other KV, so other fingerprints and other records.
CONVERSION_VERSION = 2
# Grows when the layout of packed weights changes: old files are then of no use, and removed.
PACKING_VERSION = 3

LOCK_TIMEOUT_S = 1800.0
LOCK_POLL_S = 0.1
_DIGEST_PIECE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """What was found out about one source in one dtype. ``files``: (path, bytes, time of change in ns) of all of it."""

    folder: str
    fingerprint: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    files: tuple[tuple[str, int, int], ...]


class ModelCache:
    """The folder above. Raises ConfigError where it cannot be written."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(os.environ.get("PILLION_CACHE") or "~/.cache/pillion").expanduser()

    def read_record(self, source: Path, dtype: str) -> ModelRecord | None:
        """What is known, or None when nothing is or a file has changed since."""
        try:
            said = json.loads(self._record_path(source, dtype).read_text("utf-8"))
            files = tuple((str(path), int(size), int(changed)) for path, size, changed in said.pop("files"))
            record = ModelRecord(files=files, eos_token_ids=tuple(said.pop("eos_token_ids")), **said)
            now = stamp(Path(path) for path, _, _ in files)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None  # Not there, from another version, or of files that are gone: prepared again, then.
        return record if now == files else None

    def write_record(self, source: Path, dtype: str, record: ModelRecord) -> None:
        """Keeps it, atomically."""
        path = self._record_path(source, dtype)
        self._make(path.parent)
        draft = path.with_suffix(f".tmp-{os.getpid()}")
        try:
            draft.write_text(json.dumps(asdict(record)), "utf-8")
            draft.replace(path)
        except OSError as error:
            raise ConfigError(f"the model cache {self._root} cannot be written: {error.strerror}") from None

    def _record_path(self, source: Path, dtype: str) -> Path:
        key = hashlib.sha256(f"{CONVERSION_VERSION}\0{dtype}\0{source}".encode()).hexdigest()[:32]
        return self._root / "records" / f"{key}.json"

    def folder(self, digest: str, fill: Callable[[Path], None]) -> Path:
        """The model folder of that digest; ``fill`` makes its files when it is not there. Call it under the lock."""
        target = self._root / "models" / digest
        if target.is_dir():
            return target
        self._make(target.parent)
        for left_over in target.parent.glob("*.tmp"):
            shutil.rmtree(left_over, ignore_errors=True)  # A process died in here; whoever holds the lock is alone.
        draft = target.with_name(digest + ".tmp")
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
    def lock(self, progress: Progress) -> Iterator[None]:
        """One process of this machine prepares. Raises ConfigError after LOCK_TIMEOUT_S."""
        self._make(self._root)
        give_up = time.monotonic() + LOCK_TIMEOUT_S
        with (self._root / "prepare.lock").open("w") as file:
            told = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > give_up:
                        raise ConfigError("another process has been preparing a model for too long") from None
                if not told:
                    progress("waiting for another process that prepares a model")
                    told = True
                time.sleep(LOCK_POLL_S)
            yield

    def packed_weights(self, fingerprint: str, quantization: str) -> Path:
        """Where the weights of a model lie, or will, in the layout of the CPU kernels."""
        return self.make("packed") / f"{fingerprint[:32]}-{quantization}-{PACKING_VERSION}.weights"

    def make(self, name: str) -> Path:
        """A folder of the cache for something else."""
        self._make(self._root / name)
        return self._root / name

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the model cache {self._root} cannot be made: {error.strerror}") from None


def stamp(paths: Iterator[Path]) -> tuple[tuple[str, int, int], ...]:
    """(path, bytes, time of change in ns) of each file. Raises OSError for one that is not there."""
    found = []
    for path in paths:
        status = path.stat()
        found.append((str(path), status.st_size, status.st_mtime_ns))
    return tuple(found)


def digest_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal. Raises ConfigError for one that cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_DIGEST_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()
