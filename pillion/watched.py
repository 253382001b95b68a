"""Files that may be replaced while a process runs: keys and certificates."""

from __future__ import annotations

import os
from collections.abc import Sequence

# How often a change is looked for.
WATCH_INTERVAL_S = 1.0

Signature = tuple[tuple[int, int, int, int] | None, ...]


class Watched:
    """Says when any of some files is another one than before. A rename over a file and a swapped link are seen too."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._seen = self.signature()

    def changed(self) -> bool:
        """Whether something is different since the last call, or since this was made."""
        now = self.signature()
        if now == self._seen:
            return False
        self._seen = now
        return True

    def signature(self) -> Signature:
        """What tells two versions of the files apart; None for one that cannot be looked at."""
        return tuple(_look(path) for path in self._paths)


def _look(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
