"""Bundles in the folder of --record-path, within limits. Several gateways may share it. All functions block.

    FOLDER/ID.json       a bundle; FOLDER/ID.part while it is written
    FOLDER/record.key    the deployment's key, unless --record-key-file names another file

The oldest bundles are removed to make room for a new one, and expired ones whenever one is written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from pillion.errors import ConfigError
from pillion.records.bundle import KEY_FILE, read_file, read_key

# Interval between scans of the folder, to which other gateways write too. A folder that may be full is scanned at once.
LOOK_EVERY_S = 300.0
# Age from which an unfinished file counts as abandoned.
PART_AGE_S = 3600.0

_OWNER_ONLY, _FOLDER_OWNER_ONLY = 0o600, 0o700


class RecordFolder:
    """Bundles in the folder ``path``: at most ``max_bytes`` in total, none older than ``keep_s`` seconds. With
    ``max_bytes`` = 0 it is only read, else the folder is created. Methods raise ConfigError if it cannot be used."""

    def __init__(self, path: Path, max_bytes: int = 0, keep_s: float = 0.0) -> None:
        try:
            if max_bytes:
                path.mkdir(mode=_FOLDER_OWNER_ONLY, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--record-path {path}: {error.strerror}") from None
        self._path = path
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._bytes, self._scanned_s = 0, 0.0

    def store(self, bundle_id: str, raw: bytes) -> None:
        """Write an encoded bundle. Raises ConfigError if it is too large, and OSError."""
        now = time.time()
        if len(raw) > self._max_bytes:
            raise ConfigError(f"the bundle {bundle_id} has {len(raw)} bytes, more than {self._max_bytes}")
        if self._bytes + len(raw) > self._max_bytes or now - self._scanned_s > LOOK_EVERY_S:
            self._make_room(len(raw), now)
        write(self._path, bundle_id, raw)
        self._bytes += len(raw)

    def listed(self) -> list[tuple[str, int]]:
        """Return the ids and sizes in bytes of all bundles, newest first."""
        return [(path.stem, about.st_size) for path, about in self._files(".json")]

    def read(self, bundle_id: str) -> bytes:
        """Return an encoded bundle; b"" if it does not exist any more."""
        path = self._path / f"{bundle_id}.json"
        return read_file(path) if path.exists() else b""

    def _make_room(self, size_bytes: int, now: float) -> None:
        """Remove expired bundles, and further ones, oldest first, until there is room for ``size_bytes``."""
        files = self._files(".json", ".part")
        self._bytes, self._scanned_s = sum(about.st_size for _, about in files), now
        for path, about in reversed(files):
            is_part, age_s = path.suffix == ".part", now - about.st_mtime
            if is_part and age_s < PART_AGE_S:
                continue
            if not is_part and self._bytes + size_bytes <= self._max_bytes and age_s <= self._keep_s:
                continue
            path.unlink(missing_ok=True)
            self._bytes -= about.st_size

    def _files(self, *suffixes: str) -> list[tuple[Path, os.stat_result]]:
        """Return the folder's files with these suffixes, newest first."""
        files = []
        try:
            with os.scandir(self._path) as entries:
                for one in entries:
                    # Another gateway may remove the file meanwhile.
                    with contextlib.suppress(FileNotFoundError):
                        if one.name.endswith(suffixes):
                            files.append((self._path / one.name, one.stat()))
        except OSError as error:
            raise ConfigError(f"--record-path {self._path}: {error.strerror}") from None
        return sorted(files, key=lambda one: one[1].st_mtime_ns, reverse=True)


def write(folder: Path, bundle_id: str, raw: bytes) -> None:
    """Write an encoded bundle atomically, readable only by this user. Raises OSError."""
    part = folder / f"{bundle_id}.part"
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _OWNER_ONLY), "wb") as file:
            file.write(raw)
        os.replace(part, folder / f"{bundle_id}.json")
    finally:
        part.unlink(missing_ok=True)


def make_key(folder: Path) -> bytes:
    """Return the key in ``folder``, created if missing. Gateways that share a folder get the same key. Raises
    ConfigError."""
    path, part = folder / KEY_FILE, folder / f".{KEY_FILE}.{secrets.token_hex(4)}"
    try:
        folder.mkdir(mode=_FOLDER_OWNER_ONLY, parents=True, exist_ok=True)
        if not path.exists():
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY), "w") as file:
                file.write(secrets.token_hex(32))
            # link is atomic, and does not replace another gateway's key.
            with contextlib.suppress(FileExistsError):
                os.link(part, path)
            part.unlink()
    except OSError as error:
        raise ConfigError(f"--record-path {folder}: {error.strerror}") from None
    return read_key(path)
