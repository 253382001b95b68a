"""Locks of files and folders that end with their process."""

from __future__ import annotations

import fcntl
from typing import IO


def try_lock(file: int | IO[bytes]) -> bool:
    """Lock an open file or folder until it is closed. Return False if another process, or another descriptor in this
    one, has it locked. Raises OSError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
