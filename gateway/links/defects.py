"""Unforeseen exceptions in a task that must never end: logged once per kind."""

from __future__ import annotations

import logging

log = logging.getLogger("pillion.gateway")


class Defects:
    """The unforeseen exceptions of one task. The first of each kind is logged with its traceback, so that a recurring
    one does not fill the log."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._kinds: set[type[Exception]] = set()

    def note(self, error: Exception) -> None:
        """Log an exception, with its traceback if it is the first of its kind; call it in the handler."""
        if type(error) not in self._kinds:
            self._kinds.add(type(error))
            log.error("%s failed unexpectedly and continues", self._task, exc_info=error)
