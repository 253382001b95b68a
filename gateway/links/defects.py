"""Handles an exception that nobody foresaw in a task that must never end: logs it once and goes on."""

from __future__ import annotations

import logging

log = logging.getLogger("pillion.gateway")


class Defects:
    """Notes the unforeseen exceptions of one task. The first of each kind is logged with its trace, so an exception
    that comes back with every attempt fills no log."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._kinds: set[type[Exception]] = set()

    def note(self, error: Exception) -> None:
        """Logs an unforeseen exception, with its trace if it is the first of its kind; call it where the exception is
        handled."""
        if type(error) not in self._kinds:
            self._kinds.add(type(error))
            log.error("%s met a defect and goes on", self._task, exc_info=error)
