"""Makes the private directory of one local cluster: it has mode 0700, holds the sockets, and is gone when the cluster
is.

A supervisor holds a lock on a file in its directory. The kernel drops the lock when the supervisor dies, so a process
that can take the lock knows that the directory has no owner, and removes it: the next start cleans up after a kill -9.

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
# sun_path holds 104 bytes on macOS, 108 on Linux; so the path of a socket in the directory has at most this many bytes.
MAX_SOCKET_PATH_BYTES = 100
LONGEST_NAME_BYTES = len("/prefill-63.sock")


class RuntimeDir:
    """Represents a private directory with a lock. :meth:`create` makes it; :meth:`remove` is idempotent."""

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, base: Path | None = None) -> RuntimeDir:
        """Make a new directory under ``base`` (default: the user's runtime or temporary directory), after removing
        those of dead supervisors there."""
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
    """Return TMPDIR, XDG_RUNTIME_DIR or the temporary directory: the first one short enough for the path of a Unix
    socket."""
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
    """Return whether ``path`` is the directory of a supervisor of this user that lives."""
    if path.name.startswith(PREFIX):
        with contextlib.suppress(OSError), _lock_of(path) as lock:
            return not try_lock(lock)
    return False


def _lock_of(path: Path) -> IO[bytes]:
    """Open the lock file of one of this user's directories. Raises OSError for any other."""
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} is not this user's")
    # The file is opened read-only and without O_CREAT: every directory that Pillion made has a lock file.
    return open(path / LOCK, "rb")
