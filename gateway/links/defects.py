"""What a task that must never end does about an exception that nobody foresaw: it logs it once and goes on."""

from __future__ import annotations

import logging

log = logging.getLogger("pillion.gateway")


class Defects:
    """The unforeseen exceptions of one task. Of each kind the first is logged with its trace, so one that comes back
    with every attempt fills no log."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._kinds: set[type[Exception]] = set()

    def note(self, error: Exception) -> None:
        """Takes an exception; call it where the exception is handled."""
        if type(error) not in self._kinds:
            self._kinds.add(type(error))
            log.error("%s met a defect and goes on", self._task, exc_info=error)
