"""The private directory of one local cluster: it has mode 0700, holds the sockets, and is removed with the cluster.

A supervisor holds a lock on a file in its directory. The kernel releases the lock when the supervisor dies, so whoever
can take it knows that the directory has no owner, and removes it: the next start cleans up after a kill -9.

    hidden name, lock taken -> renamed to pillion-XXXXXXXX (visible to sweeps only with its lock) -> removed
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from pillion.errors import ConfigError
from pillion.host.locks import try_lock

PREFIX = "pillion-"
LOCK = "lock"
# sun_path has 104 bytes on macOS and 108 on Linux, so this is the maximum length of a socket's path in the directory.
MAX_SOCKET_PATH_BYTES = 100
LONGEST_NAME_BYTES = len("/prefill-63.sock")


class RuntimeDir:
    """A private directory with a lock. :meth:`create` makes it; :meth:`remove` is idempotent."""

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, base: Path | None = None) -> RuntimeDir:
        """Create a directory under ``base`` (default: the user's runtime or temporary directory), after removing those
        of dead supervisors."""
        base = default_base() if base is None else base
        sweep(base)
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
        lock = open(hidden / LOCK, "wb")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = hidden.with_name(hidden.name.lstrip("."))
        hidden.rename(path)
        return cls(path, lock)

    def remove(self) -> None:
        """Delete the directory and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def default_base() -> Path:
    """Return TMPDIR, XDG_RUNTIME_DIR or the temporary directory: the first one that is short enough for the path of a
    Unix socket."""
    named = [os.environ.get(name, "") for name in ("TMPDIR", "XDG_RUNTIME_DIR")]
    choices = [*named, tempfile.gettempdir(), "/tmp"]  # noqa: S108
    for choice in choices:
        room = MAX_SOCKET_PATH_BYTES - LONGEST_NAME_BYTES - len(PREFIX) - 9
        if choice and len(choice) <= room and os.path.isdir(choice) and os.access(choice, os.W_OK | os.X_OK):
            return Path(choice)
    raise ConfigError("no directory for the cluster's sockets: set TMPDIR to a short writable path")


def sweep(base: Path) -> list[Path]:
    """Remove directories under ``base`` whose supervisor is dead, and return them. Other users' directories stay."""
    removed = []
    for path in base.glob(PREFIX + "*"):
        with contextlib.suppress(OSError), _lock_of(path) as lock:
            if try_lock(lock):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def is_supervised(path: Path) -> bool:
    """Return whether ``path`` is the directory of a live supervisor of this user."""
    if path.name.startswith(PREFIX):
        with contextlib.suppress(OSError), _lock_of(path) as lock:
            return not try_lock(lock)
    return False


def _lock_of(path: Path) -> IO[bytes]:
    """Open the lock file of one of this user's directories. Raises OSError for any other."""
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return open(path / LOCK, "rb")
