"""Files that may be replaced while a process runs: keys and certificates.

    in use --changed, then stable-------------> read --good--> in use
                                                 | bad: one warning; the previous content stays in use
                                                 | unreadable: retried at the next check

A file that is rewritten in place is short for a moment, and half a list of keys is a valid list. So changed files are
read once two checks find the same state, or it is old enough.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pillion.errors import ConfigError

log = logging.getLogger("pillion.net.watched")

WATCH_INTERVAL_S = 1.0
# Age of a change after which a file is assumed to be complete.
AT_REST_S = 2 * WATCH_INTERVAL_S

T = TypeVar("T")
Signature = tuple[tuple[int, ...] | None, ...]


class Watched:
    """Files that are read together. A rename over a file, a swapped link and new permissions count as changes."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._used = self._seen = self._signatures()
        self._complaint = ""

    def newer(self, read: Callable[[], T]) -> T | None:
        """Check the files once.

        Args:
            read: parses the files. Raises ConfigError if they are bad, caused by an OSError if they are unreadable.

        Returns:
            The result of ``read`` for changed files; None if they are unchanged, still changing, or bad.
        """
        now = self._signatures()
        at_rest = now == self._seen or all(file is None or time.time() - file[-1] / 1e9 > AT_REST_S for file in now)
        self._seen = now
        if now == self._used or not at_rest:
            return None
        try:
            content = read()
        except ConfigError as error:
            if error.message != self._complaint:
                log.warning("%s; the previous content stays in use", error.message)
            self._complaint = error.message
            if not isinstance(error.__cause__, OSError):
                self._used = now
            return None
        if self._signatures() != now:
            return None
        self._used, self._complaint = now, ""
        return content

    def _signatures(self) -> Signature:
        """Return a signature per file; None for an unreadable one."""
        return tuple(_signature(path) for path in self._paths)


def _signature(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
