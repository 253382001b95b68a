"""Logs unexpected exceptions of a task that must never end, once per exception class."""

from __future__ import annotations

import logging

log = logging.getLogger("pillion.gateway")


class Defects:
    """Log of one task's unexpected exceptions. Only the first of each class is logged, so that a recurring one does not
    fill the log."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._kinds: set[type[Exception]] = set()

    def note(self, error: Exception) -> None:
        """Log an exception with its traceback, if it is the first of its class."""
        if type(error) not in self._kinds:
            self._kinds.add(type(error))
            log.error("%s failed unexpectedly and continues", self._task, exc_info=error)
