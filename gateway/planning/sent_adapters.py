"""Workers that this gateway has sent requests with an adapter lately: they load it, though no heartbeat says so yet."""

from __future__ import annotations

from collections.abc import Set

# So long it counts: a heartbeat comes within a second, once the adapter is loaded.
SENT_COUNTS_S = 5.0
# Adapters that are remembered; of more, those that were sent last.
MAX_SENT_ADAPTERS = 1024


class SentAdapters:
    """The adapters of one gateway's requests. Sans-IO: every call has the time, in seconds (I9)."""

    def __init__(self) -> None:
        # Until when each worker counts, by digest; the adapter that was sent last is the last.
        self._until_s: dict[str, dict[str, float]] = {}

    def note(self, digest: str, component_ids: Set[str], now: float) -> None:
        """A request with an adapter goes to these workers."""
        workers = self._until_s.pop(digest, {})
        self._until_s[digest] = workers | dict.fromkeys(component_ids, now + SENT_COUNTS_S)
        if len(self._until_s) > MAX_SENT_ADAPTERS:
            del self._until_s[next(iter(self._until_s))]

    def forget(self, digest: str, component_id: str) -> None:
        """The request failed there: nothing shows that the worker has the adapter."""
        self._until_s.get(digest, {}).pop(component_id, None)

    def workers(self, digest: str, now: float) -> Set[str]:
        """Workers that such a request went to within SENT_COUNTS_S."""
        workers = self._until_s.get(digest)
        if workers is None:
            return frozenset()
        for component_id in [name for name, until_s in workers.items() if until_s < now]:
            del workers[component_id]
        return workers.keys()
