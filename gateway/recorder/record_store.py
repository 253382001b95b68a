"""Opens the bundles at --record-path: in a folder, or in the cluster's Redis. All functions block."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pillion.errors import ConfigError
from pillion.gateway.recorder.record_folder import RecordFolder
from pillion.gateway.recorder.record_redis import RecordRedis
from pillion.records.bundle import KEY_FILE, Bundle, decode, read, read_key

# Value of --record-path for the Redis of --redis-url; a folder of this name is ./redis.
REDIS = "redis"
# Default max total size of bundles. A Redis, which may be small, also has the index of all blocks.
FOLDER_BYTES, REDIS_BYTES = 2**30, 64 * 2**20

_ID = re.compile(r"[0-9a-f]{24}")
RecordStore = RecordFolder | RecordRedis


@contextlib.contextmanager
def open_records(path: str, redis_url: str, max_bytes: int = 0, keep_s: float = 0.0) -> Iterator[RecordStore]:
    """Yield the bundles at a --record-path. Raises ConfigError."""
    if path != REDIS:
        yield RecordFolder(Path(path), max_bytes, keep_s)
        return
    if not redis_url:
        raise ConfigError(f"--record-path {REDIS} needs --redis-url")
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        records = RecordRedis(runner, redis_url, max_bytes, keep_s)
        try:
            yield records
        finally:
            runner.run(records.aclose())


def key_at(path: str, key_file: str) -> bytes | None:
    """Return the key of a deployment's bundles: from ``key_file`` or, if that is "", from the folder ``path``; None if
    there is none. Raises ConfigError for an invalid key file."""
    path_in_folder = Path(path) / KEY_FILE
    if key_file:
        return read_key(Path(key_file))
    return read_key(path_in_folder) if path != REDIS and path_in_folder.exists() else None


def read_named(name: str, path: str, key_file: str, redis_url: str = "") -> tuple[Bundle, bool]:
    """Return a bundle, and whether its HMAC was verified.

    ``name``: its file or, with ``path`` (--record-path), its id or the label of its request; of several with this label
    the newest. Raises ConfigError.
    """
    if not path and not Path(name).exists():
        raise ConfigError(f"there is no file {name!r}; finding a bundle by its id needs --record-path")
    if not path or Path(name).is_file():
        return read(Path(name), key_at(str(Path(name).parent), key_file))
    with open_records(path, redis_url) as records:
        raw = (_ID.fullmatch(name) and records.read(name)) or _labelled(records, name)
    if not raw:
        raise ConfigError(f"{path} has no bundle of request {name!r}")
    return decode(raw, name, key_at(path, key_file))


def _labelled(records: RecordStore, name: str) -> bytes:
    """Return the newest encoded bundle of the request with a label or OpenAI id; b"" if there is none."""
    # Ids in OpenAI's answers (chatcmpl-...) end like the gateway's labels.
    labels = {name, f"req-{name.rpartition('-')[2]}"}
    wanted = [b'"label":' + msgspec.json.encode(label) for label in labels]
    raws = (records.read(bundle_id) for bundle_id, _ in records.listed())
    return next((raw for raw in raws if any(label in raw for label in wanted)), b"")
