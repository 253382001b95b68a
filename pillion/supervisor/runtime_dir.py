"""The private directory of one local cluster: it has mode 0700, contains the sockets, and is removed with the cluster.

A supervisor locks a file in its directory, and the kernel releases the lock when the supervisor dies. So a directory
whose lock can be acquired has no owner and is removed: the next start cleans up after a kill -9.

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
# Max length of a socket's path: sun_path has 104 bytes on macOS and 108 on Linux.
MAX_SOCKET_PATH_BYTES = 100


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
    """Return the first of TMPDIR, XDG_RUNTIME_DIR and the temporary directory that is writable and short enough for the
    paths of Unix sockets. Raises ConfigError."""
    choices = [os.environ.get("TMPDIR", ""), os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]  # noqa: S108
    for choice in choices:
        max_bytes = MAX_SOCKET_PATH_BYTES - len(f"/{PREFIX}XXXXXXXX/prefill-63.sock")
        if choice and len(choice) <= max_bytes and os.path.isdir(choice) and os.access(choice, os.W_OK | os.X_OK):
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
    """Open the lock file of this user's directory ``path``. Raises OSError, also for another user's directory."""
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return open(path / LOCK, "rb")
