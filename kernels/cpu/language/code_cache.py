"""Compiled kernels on disk, so that the next start does not compile.

A file's name is the digest of all that its machine code follows from. Its first line is the digest of its name and its
content: a truncated, edited or renamed file is no hit, and neither is one that another user could have written. That
keeps out accidents and strangers, not whoever runs as this very user.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)

# Oldest use first, what is beyond either bound is removed when something is written.
MAX_ENTRIES = 16
MAX_CACHE_BYTES = 256 * 2**20
MAX_ENTRY_BYTES = 64 * 2**20
_SUFFIX = ".kernels"
_DIGEST_CHARS = 64
_HEADER_BYTES = _DIGEST_CHARS + 1


class CodeCache:
    """A folder of machine code. Whatever goes wrong with it costs a warning and the time to compile, no more."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: str) -> bytes | None:
        """The code that was written under ``key``, or None."""
        path = self._path(key)
        if not _SOURCES:
            return None
        try:
            with path.open("rb") as file:
                about = os.fstat(file.fileno())
                if others_could_write(about):
                    _log.warning("%s could have been written by others; it is not used", path)
                    return None
                content = file.read(MAX_ENTRY_BYTES + _HEADER_BYTES)
            digest, code = content[:_HEADER_BYTES], content[_HEADER_BYTES:]
            if digest != _digest(key, code):
                _log.warning("%s is damaged; compiling again", path)
                return None
            with contextlib.suppress(OSError):
                os.utime(path)  # Used just now: the last to be removed.
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("compiled kernels cannot be read from %s: %s", path, error.strerror)
            return None
        return code

    def write(self, key: str, code: bytes) -> None:
        """Keeps ``code`` under ``key``. Two processes may do so at once: files appear whole or not at all."""
        if not _SOURCES:
            _log.warning("compiled kernels are not kept: there are no sources to name them by")
            return
        if len(code) > MAX_ENTRY_BYTES:
            _log.warning("compiled kernels of %d bytes are not kept: the bound is %d", len(code), MAX_ENTRY_BYTES)
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.chmod(0o700)
            handle, name = tempfile.mkstemp(dir=self._folder, prefix="new-", suffix=_SUFFIX)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_digest(key, code) + code)
                os.replace(name, self._path(key))
            except BaseException:
                os.unlink(name)
                raise
            self._trim()
        except OSError as error:
            _log.warning("compiled kernels cannot be kept in %s: %s", self._folder, error.strerror)

    def _path(self, key: str) -> Path:
        return self._folder / (key + _SUFFIX)

    def _trim(self) -> None:
        """Files that another process removes meanwhile are no trouble; those it is writing are the newest."""
        known: list[tuple[float, int, Path]] = []
        for path in self._folder.glob("*" + _SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                known.append((about.st_mtime, about.st_size, path))
        total = 0
        for count, (_, size, path) in enumerate(sorted(known, reverse=True)):
            total += size
            if count >= MAX_ENTRIES or total > MAX_CACHE_BYTES:
                path.unlink(missing_ok=True)


def others_could_write(about: os.stat_result) -> bool:
    """Whether a file is somebody else's, or one that group or others may write."""
    return about.st_uid != os.geteuid() or bool(about.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def key_of(*parts: str) -> str:
    """One digest of the sources of pillion.kernels.cpu and of ``parts``; where the parts are cut counts too."""
    digest = hashlib.sha256(_SOURCES)
    for part in parts:
        _add(digest, part.encode())
    return digest.hexdigest()


def _add(digest: hashlib._Hash, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little") + part)


def _digest_sources() -> bytes:
    """Of the sources as they are now; empty where there are none to read, and then nothing is kept."""
    digest = hashlib.sha256()
    paths = sorted(Path(__file__).parents[1].rglob("*.py"))
    for path in paths:
        _add(digest, path.name.encode())
        _add(digest, path.read_bytes())
    return digest.digest() if paths else b""


# When this module is imported, as the others are: not when something is compiled, when they may have changed on disk.
_SOURCES = _digest_sources()


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + code).hexdigest().encode() + b"\n"
