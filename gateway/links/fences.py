"""Workers that a KV node has fenced: whatever runs on them will not go on (I4), though their connections stand.

A paused process (SIGSTOP, a frozen container) keeps its sockets; without this, keepalive would find it after some 40
seconds. The node finds it after ``heartbeat_timeout_ms`` and says so in its registry record. Sans-IO (I9).
"""

from __future__ import annotations

from collections.abc import Iterable

from pillion.wire.registry import ComponentRecord


class Fences:
    """``named``: who is fenced as far as the registry says. A worker that went on is named a moment too long."""

    def __init__(self) -> None:
        self.named: frozenset[str] = frozenset()

    def look(self, records: Iterable[ComponentRecord]) -> frozenset[str]:
        """The registry's answer; returns who is named for the first time, or again."""
        named = frozenset(component_id for record in records for component_id in record.fenced_components)
        fresh, self.named = named - self.named, named
        return fresh
