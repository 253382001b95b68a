"""Watches files that may be replaced while a process runs: keys and certificates.

    in use --changed, and at rest again-------> read --good--> in use
                                                 | bad: a warning, once; what was read before stays in use
                                                 | could not be read at all: tried again at the next look

A file that is written in place is short for a moment, and half of a list of keys is a valid list too. So changed files
are read once they are the same at two looks, or last changed a while ago.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pillion.errors import ConfigError

log = logging.getLogger("pillion.net.watched")

# The files are checked for a change this often.
WATCH_INTERVAL_S = 1.0
# A file that has not changed for this long is taken to be written completely.
AT_REST_S = 2 * WATCH_INTERVAL_S

T = TypeVar("T")
Signature = tuple[tuple[int, ...] | None, ...]


class Watched:
    """Watches files that belong together. A rename over a file, a swapped link and new permissions are changes too."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._used = self._seen = self._look()
        self._complaint = ""

    def newer(self, read: Callable[[], T]) -> T | None:
        """Look at the files once.

        Args:
            read: parses the files. Raises ConfigError where they are bad, caused by an OSError where they
                could not be read.

        Returns:
            What ``read`` returned for changed files; None where they are the same, still changing, or bad.
        """
        now = self._look()
        # The wall clock is the only clock that file systems have.
        at_rest = now == self._seen or all(file is None or time.time() - file[-1] / 1e9 > AT_REST_S for file in now)
        self._seen = now
        if now == self._used or not at_rest:
            return None
        try:
            found = read()
        except ConfigError as error:
            if error.message != self._complaint:
                log.warning("%s; what was read before stays in use", error.message)
            self._complaint = error.message
            if not isinstance(error.__cause__, OSError):
                self._used = now
            return None
        if self._look() != now:
            # The files changed meanwhile, so ``read`` may have mixed old and new ones.
            return None
        self._used, self._complaint = now, ""
        return found

    def _look(self) -> Signature:
        """Return a signature of each file; None for a file that cannot be read."""
        return tuple(_signature(path) for path in self._paths)


def _signature(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    # New permissions alter nothing but the time of change.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
