"""Keeps the folder of --record-path: its key, and its bundles within their bounds. Several gateways may share it.

    FOLDER/ID.json       a bundle; FOLDER/ID.part while it is written
    FOLDER/record.key    the deployment's key, unless --record-key-file names another file

The oldest bundles make room for a new one, and bundles that are too old go with the next one that is written. All
functions here block.
"""

from __future__ import annotations

import time
from pathlib import Path

from pillion.errors import ConfigError
from pillion.records.bundle import Bundle, encode, listed, make_key, read_key, write

# The folder is looked through this often at the most, unless it may be full: other gateways write into it, too.
LOOK_EVERY_S = 300.0
# A bundle that was being written this long ago has lost its writer.
PART_AGE_S = 3600.0

_OWNER_ONLY = 0o700


class RecordFolder:
    """Manages the folder ``path``, which holds at most ``max_bytes`` of bundles, none older than ``keep_s`` seconds.
    ``key`` is the deployment's. Raises ConfigError where the folder or the key cannot be made or used."""

    def __init__(self, path: str, key_file: str, max_bytes: int, keep_s: float) -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        # These are the bytes of all bundles as far as they are known, and when they were counted.
        self._bytes, self._counted_s = 0, 0.0
        try:
            self._path.mkdir(mode=_OWNER_ONLY, parents=True, exist_ok=True)
            self.key = read_key(Path(key_file)) if key_file else make_key(self._path)
        except OSError as error:
            raise ConfigError(f"--record-path {path}: {error.strerror}") from None

    def keep(self, bundle: Bundle) -> None:
        """Writes a bundle. Raises ConfigError for one that is too large, and OSError."""
        raw, now = encode(bundle, self.key), time.time()
        if len(raw) > self._max_bytes:
            raise ConfigError(f"the bundle {bundle.id} has {len(raw)} bytes, more than --record-bytes")
        if self._bytes + len(raw) > self._max_bytes or now - self._counted_s > LOOK_EVERY_S:
            self._make_room(len(raw), now)
        write(self._path, bundle.id, raw)
        self._bytes += len(raw)

    def _make_room(self, size_bytes: int, now: float) -> None:
        """Removes old bundles, and more of them, the oldest first, until there is room for ``size_bytes`` more."""
        found = listed(self._path, ".json", ".part")
        self._bytes, self._counted_s = sum(about.st_size for _, about in found), now
        for path, about in reversed(found):
            is_part, age_s = path.suffix == ".part", now - about.st_mtime
            if is_part and age_s < PART_AGE_S:
                continue
            if not is_part and self._bytes + size_bytes <= self._max_bytes and age_s <= self._keep_s:
                continue
            path.unlink(missing_ok=True)
            self._bytes -= about.st_size
