"""Cache of adapters on a machine, by digest, in the model cache that all components share.

$PILLION_CACHE or ~/.cache/pillion
`-- adapters/
    |-- <digest>/         the ADAPTER_FILES, complete and immutable
    `-- <random>.tmp/     a temporary folder, locked by the process that writes it, then renamed

A process that begins one frees space first: it removes those of dead processes, then the least recently used copies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from pillion.host.locks import try_lock

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
ADAPTERS = "adapters"
# Max sizes of an adapter's config, and of its tensor file's header, which has some hundred kilobytes for a large model.
MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 2**24
MAX_ADAPTER_BYTES = 8 * 2**30
# Max size of all copies of a machine.
STORE_BYTES = 64 * 2**30
TRANSFER_TIMEOUT_S = 120.0
# Free disk space to keep when storing adapters.
MIN_FREE_BYTES = 2**30
# Time after its last use during which a copy is not evicted.
KEEP_S = 3600.0
# Min age at which an unlocked temporary folder (*.tmp) counts as abandoned.
MIN_TMP_AGE_S = 60.0


def cache_root() -> Path:
    """Return the model cache's folder, which may not exist yet."""
    return Path(os.environ.get("PILLION_CACHE") or "~/.cache/pillion").expanduser()


def is_adapter_digest(text: str) -> bool:
    """Return whether ``text`` is a SHA-256 in hexadecimal."""
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


@contextlib.contextmanager
def temporary_folder(adapters: Path, size_bytes: int, max_bytes: int = STORE_BYTES) -> Iterator[Path]:
    """Yield a new folder in ``adapters`` for an adapter's files, and remove it at the end unless it was renamed. Raises
    OSError if there is no room for ``size_bytes``."""
    make_room(adapters, size_bytes, max_bytes)
    folder = adapters / f"{secrets.token_hex(8)}.tmp"
    folder.mkdir()
    try:
        with _locked(folder) as locked:
            assert locked, "the name of a temporary folder is random"
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_room(adapters: Path, size_bytes: int, max_bytes: int = STORE_BYTES) -> None:
    """Remove abandoned temporary folders and copies of adapters until ``size_bytes`` more fit below ``max_bytes`` and
    on the disk. Raises OSError if that is not enough."""
    now, copies = time.time(), []
    for folder in adapters.iterdir():
        try:
            used = folder.stat().st_mtime
            if folder.suffix != ".tmp":
                copies.append((used, sum(file.stat().st_size for file in folder.iterdir()), folder))
            elif now - used > MIN_TMP_AGE_S:
                with _locked(folder) as locked:
                    if locked:
                        shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # Another process has removed the folder meanwhile.
    total_bytes = size_bytes + sum(size for _, size, _ in copies)
    free_bytes = shutil.disk_usage(adapters).free
    excess_bytes = max(total_bytes - max_bytes, size_bytes + MIN_FREE_BYTES - free_bytes)
    for used, size, folder in sorted(copies):
        if excess_bytes <= 0 or now - used < KEEP_S:
            break
        shutil.rmtree(folder, ignore_errors=True)
        excess_bytes -= size
    if excess_bytes > 0:
        reason = (
            f"the adapters would have {total_bytes} bytes, at most {max_bytes} are allowed; the disk has"
            f" {free_bytes} bytes free, of which {MIN_FREE_BYTES} are reserved"
        )
        raise OSError(errno.ENOSPC, reason)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a temporary folder; yield False if another process has it locked. The lock ends with this process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)
