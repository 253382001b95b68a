"""On-disk cache of compiled kernels, so that the next start does not compile.

A file's name is the digest of everything that determines its machine code. Its first line is the digest of its name and
content: a truncated, edited or renamed file is a miss, and so is a file that another user could have written. These
checks guard against accidents and other users, not against processes of the same user.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pillion.host import core_lending_table

_log = logging.getLogger(__name__)

# Limits of the folder; a write evicts the least recently used files beyond them. The demo model needs 28 files.
MAX_ENTRIES = 8192
MAX_CACHE_BYTES = 256 * 2**20
MAX_ENTRY_BYTES = 64 * 2**20
# Max wait for another process that compiles the same code, before compiling it here.
MAX_COMPILE_WAIT_S = 120.0
_COMPILE_POLL_S = 0.05
_SUFFIX = ".kernels"
# A hexadecimal SHA-256 digest, and a newline.
_HEADER_BYTES = 64 + 1


class CodeCache:
    """A folder of cached machine code. Failures are logged as warnings, and only cost the time to compile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: str) -> bytes | None:
        """Return the code written under ``key``, or None."""
        path = self._path(key)
        if not sources_digest:
            return None
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if others_could_write(status):
                    _log.warning("ignoring %s: other users could have written it", path)
                    return None
                content = file.read(min(status.st_size, MAX_ENTRY_BYTES + _HEADER_BYTES))
            digest, code = content[:_HEADER_BYTES], content[_HEADER_BYTES:]
            if digest != _digest(key, code):
                _log.warning("%s is damaged; compiling again", path)
                return None
            with contextlib.suppress(OSError):
                os.utime(path)  # recency for LRU eviction
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("cannot read compiled kernels from %s: %s", path, error.strerror)
            return None
        return code

    def write(self, codes: Mapping[str, bytes]) -> None:
        """Write machine codes by key. Files appear atomically, so several processes may write at once."""
        if not sources_digest:
            _log.warning("not caching compiled kernels: cannot read the sources whose digest names the files")
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.chmod(0o700)
            for key, code in codes.items():
                if len(code) > MAX_ENTRY_BYTES:
                    _log.warning(
                        "not caching a compiled kernel of %d bytes: the limit is %d", len(code), MAX_ENTRY_BYTES
                    )
                    continue
                self._write(key, code)
            self._trim()
        except OSError as error:
            _log.warning("cannot cache compiled kernels in %s: %s", self._folder, error.strerror)

    def _write(self, key: str, code: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self._folder, prefix="new-", suffix=_SUFFIX)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(key, code) + code)
            os.replace(name, self._path(key))
        except BaseException:
            os.unlink(name)
            raise

    @contextlib.contextmanager
    def one_compiler(self, key: str) -> Iterator[None]:
        """Hold a lock between processes while compiling ``key``, so that workers that start together compile once.

        Other processes wait for at most MAX_COMPILE_WAIT_S. The lock is one byte of a file, at an offset that follows
        from the key, and ends with its process. Threads of one process do not exclude each other.
        """
        with contextlib.ExitStack() as stack:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = stack.enter_context((self._folder / "compile.lock").open("ab"))
                offset, deadline = int(key[:12], 16), time.monotonic() + MAX_COMPILE_WAIT_S
                while time.monotonic() < deadline:
                    try:
                        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
                        break
                    except BlockingIOError:
                        time.sleep(_COMPILE_POLL_S)
            except OSError as error:
                _log.warning("other processes may compile the same kernels at the same time: %s", error.strerror)
            yield

    def _path(self, key: str) -> Path:
        return self._folder / (key + _SUFFIX)

    def _trim(self) -> None:
        """Remove the least recently used files beyond the limits. Other processes may do so at the same time."""
        files: list[tuple[float, int, Path]] = []
        for path in self._folder.glob("*" + _SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = 0
        for count, (_, size, path) in enumerate(sorted(files, reverse=True)):
            total += size
            if count >= MAX_ENTRIES or total > MAX_CACHE_BYTES:
                path.unlink(missing_ok=True)


def others_could_write(status: os.stat_result) -> bool:
    """Return whether a file belongs to another user, or is writable by its group or others."""
    return status.st_uid != os.geteuid() or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def key_of(*parts: str) -> str:
    """Return a hexadecimal digest of the kernels' sources and of ``parts``; lists that differ only in where one part
    ends differ."""
    return hashlib.sha256(sources_digest + json.dumps(parts).encode()).hexdigest()


def digest_sources() -> bytes:
    """Return the digest of the sources on disk that machine code depends on: pillion.kernels.cpu, and modules whose
    constants it contains. Empty if there are no sources, which disables the cache."""
    here = Path(__file__).parents[1]
    paths = sorted(here.rglob("*.py"))
    shared = ("torch/quantized_matrix.py", "kv_codes.py", "state_pieces.py")
    others = (Path(core_lending_table.__file__), *(here.parent / name for name in shared))
    paths += [path for path in others if paths and path.is_file()]
    files = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]
    return hashlib.sha256(json.dumps(files).encode()).digest() if files else b""


# Computed at import, like the other modules' code: the sources on disk may change before something is compiled.
sources_digest = digest_sources()


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + code).hexdigest().encode() + b"\n"
