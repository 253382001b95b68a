"""Takes locks of files and folders, which end with the process that has them."""

from __future__ import annotations

import fcntl
from typing import IO


def try_lock(file: int | IO[bytes]) -> bool:
    """Lock an open file or folder until it is closed. Returns False where another process, or another place in this
    one, has its lock. Raises OSError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
